"""Links that make one block of the model: what is compiled as one function.

A module that stands in a list (`layers.3`) is a block with all its links, and what lies between blocks is one too.
Where such a module holds lists of its own (`stages.1.layers.0`), as many of their modules as stay small are one block.
A model without lists is cut as its chain is: one block would leave nothing to choose.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise

from shardwright.pipeline.ir.graph import Link, OpGraph, Role
from shardwright.pipeline.ops.table import rule_of

FEWEST = 4  # blocks by which a model is cut
MOST_OPS = 24  # of several inner modules as one block: larger ones leave too little to choose between for a budget

Path = tuple[str, ...]


def blocks_of(graph: OpGraph) -> tuple[tuple[int, int], ...]:
    """(first, last) links of each block, in order."""
    homes = [_home(graph, link) for link in graph.chain]
    blocks: list[list[int]] = []
    for (outermost, _), numbers in groupby(range(len(homes)), key=homes.__getitem__):
        own = list(numbers)  # the links of an innermost module
        together = [*blocks[-1], *own] if blocks else own
        inside_one = blocks and homes[blocks[-1][0]][0] == outermost != ()  # numbered module
        if inside_one and sum(len(graph.chain[number].ops) for number in together) <= MOST_OPS:
            blocks[-1] = together
        else:
            blocks.append(own)
    if len(blocks) < FEWEST:
        return tuple((number, number) for number in range(len(homes)))
    return tuple((own[0], own[-1]) for own in blocks)


def relus_between(graph: OpGraph, blocks: Iterable[tuple[int, int]]) -> frozenset[str]:
    """Results of relus that leave one of these (first, last) links and that the next ones alone read."""
    readers = graph.consumers()
    found = set()
    for (_, last), (first, end) in pairwise(blocks):
        value = graph.values[graph.chain[last].output]
        inside = {name for link in graph.chain[first : end + 1] for name in link.ops}
        rule = rule_of(graph.op(value.origin)) if value.role is Role.RESULT else None
        if rule and rule.masks_gradient and first == last + 1 and all(op.name in inside for op in readers[value.name]):
            found.add(value.name)
    return frozenset(found)


def convolves(graph: OpGraph) -> bool:
    """Whether it has convolutions over two dims, which are faster where channels lie together in memory."""
    return any(op.target.startswith(("aten.conv2d.", "aten.convolution.")) for op in graph.ops)


def _home(graph: OpGraph, link: Link) -> tuple[Path, Path]:
    """The outermost and the innermost numbered module that hold all ops of the link; nothing where there is none."""
    paths = [graph.op(name).module.split(".") for name in link.ops]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    numbered = [place + 1 for place, part in enumerate(shared) if part.isdigit()]
    return (tuple(shared[: numbered[0]]), tuple(shared[: numbered[-1]])) if numbered else ((), ())
