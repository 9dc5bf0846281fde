"""A graph with few of the equal blocks that follow one another: what is chosen for those holds for all.

A chain `a b c b c b c b c b c d` (links of equal structure have one letter) becomes `a b c b c b c d`: of each run of
equal blocks the first two and the last are left. Every op and value of the whole graph has one that stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.pipeline.ir.graph import Link, OpGraph, Role
from shardwright.pipeline.ir.plan import Sharding

HEAD, TAIL = 2, 1  # blocks of a run that are left: the first may read what none after it does
LONGEST = 64  # links of a block


@dataclass(frozen=True)
class EqualBlocks:
    """Links first .. first + length * count - 1, every `length` of them one block."""

    first: int
    length: int
    count: int

    @property
    def left_out(self) -> range:
        return range(self.first + HEAD * self.length, self.first + (self.count - TAIL) * self.length)

    def stands_for(self, link: int) -> int:
        """The link of the second block that is as one that is left out."""
        return self.first + self.length + (link - self.first) % self.length


@dataclass(frozen=True)
class Shortened:
    whole: OpGraph
    graph: OpGraph
    ops: Mapping[str, str]  # of the whole -> what stands for it
    values: Mapping[str, str]

    def expanded(self, sharding: Sharding) -> Sharding:
        """The sharding of the short graph for the whole; paths between layouts are to be found anew."""
        whole, short = self.whole.values, self.graph.values
        origins = {
            value.origin: short[self.values[name]].origin
            for name, value in whole.items()
            if value.role is Role.PARAMETER and name in self.values
        }
        again = set(sharding.regathered)
        return Sharding(
            strategies={op.name: sharding.strategies[self.ops[op.name]] for op in self.whole.ops},
            storage={name: sharding.storage[other] for name, other in origins.items()},
            inputs=sharding.inputs,
            state={name: sharding.state[other] for name, other in origins.items() if other in sharding.state},
            regathered=tuple(name for name, other in origins.items() if other in again),
        )


def shortened(graph: OpGraph) -> Shortened:
    """As it is, where nothing can be left out."""
    numbers = [link.block for link in graph.chain]
    runs = [run for run in equal_blocks(numbers) if run.count > HEAD + TAIL and _stand_alone(graph, run)]
    stands = {link: run.stands_for(link) for run in runs for link in run.left_out}
    ops = {op.name: op.name for op in graph.ops}
    values = {name: name for name in graph.values}
    for link, other in stands.items():
        pairs = zip(graph.chain[link].ops, graph.chain[other].ops, strict=True)
        for own, same in ((graph.op(a), graph.op(b)) for a, b in pairs):
            ops[own.name] = same.name
            values |= dict(zip((*own.inputs, *own.outputs), (*same.inputs, *same.outputs), strict=True))
    for run in runs:  # what the second block gives goes into the last one
        values[graph.chain[run.left_out[-1]].output] = graph.chain[run.left_out[0] - 1].output
    return Shortened(graph, _without(graph, set(stands), values), ops, values)


def equal_blocks(numbers: Sequence[int]) -> Iterator[EqualBlocks]:
    """Runs of equal blocks, from the left; of several at one place what reaches furthest, in the shortest blocks."""
    at = 0
    while at < len(numbers):
        found = max((_run(numbers, at, length) for length in range(1, LONGEST + 1)), key=_reach)
        if found.count > 1:
            yield found
        at += _reach(found)[0]


def _run(numbers: Sequence[int], first: int, length: int) -> EqualBlocks:
    same = 0
    while first + same + length < len(numbers) and numbers[first + same] == numbers[first + same + length]:
        same += 1
    return EqualBlocks(first, length, same // length + 1)


def _reach(run: EqualBlocks) -> tuple[int, int]:
    return (run.length * run.count if run.count > 1 else 1), -run.length


def _stand_alone(graph: OpGraph, run: EqualBlocks) -> bool:
    """Whether nothing that is left out is read after it, but for what the last block gets."""
    gone = {name for link in run.left_out for name in graph.chain[link].ops}
    passed = graph.chain[run.left_out[-1]].output
    users = graph.consumers()
    return all(
        out == passed or all(reader.name in gone for reader in users[out])
        for name in gone
        for out in graph.op(name).outputs
    )


def _without(graph: OpGraph, links: set[int], values: Mapping[str, str]) -> OpGraph:
    gone = {name for link in links for name in graph.chain[link].ops}
    ops = tuple(replace(op, args=op.args.renamed(values)) for op in graph.ops if op.name not in gone)
    needed = {name for op in ops for name in (*op.inputs, *op.outputs)} | {graph.output}
    written = {name for op in graph.ops for name in op.outputs}  # what nothing writes or reads stays as it is
    needed |= {name for name, readers in graph.consumers().items() if not readers and name not in written}
    chain = tuple(
        replace(link, input=link.input and values[link.input])
        for number, link in enumerate(graph.chain)
        if number not in links
    )
    kept = {name: v for name, v in graph.values.items() if name in needed or v.role is Role.INPUT}
    return OpGraph(kept, ops, graph.output, graph.prologue, _numbered(chain))


def _numbered(chain: Sequence[Link]) -> tuple[Link, ...]:
    numbers: dict[int, int] = {}
    return tuple(replace(link, block=numbers.setdefault(link.block, len(numbers))) for link in chain)
