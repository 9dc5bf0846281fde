"""Into how many parts the dims of a graph fall, so that an op may be split as the ops around it take its dims apart.

A fused projection writes `(t h d)`; the op after it takes t and h apart, and wants each of the t parts split on h. The
projection's own line knows one letter n. So the parts travel along equal letters through the graph, both ways, until
nothing changes: the projection learns that n may lie in t parts.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ops.dims import read_line
from shardwright.pipeline.ops.rule import plain_view
from shardwright.pipeline.ops.table import rule_of

Factors = dict[str, tuple[tuple[str, tuple[int, ...]], ...]]
_MOST = 3  # ways of cutting one letter that are kept, fewest parts first
_PASSES = 8

Spot = tuple[str, int]  # a value's dim
Letter = tuple[str, int, tuple[tuple[Spot, int], ...]]  # name, size, where it lies and in how many parts
T = TypeVar("T")


def once_per_graph(find: Callable[[OpGraph], T]) -> Callable[[OpGraph], T]:
    """What is found of a graph is kept as long as the graph, which has no hash."""
    known: dict[int, tuple[weakref.ref[OpGraph], T]] = {}

    @wraps(find)
    def found(graph: OpGraph) -> T:
        key = id(graph)
        entry = known.get(key)
        if entry is None or entry[0]() is not graph:
            entry = known[key] = (weakref.ref(graph, lambda _: known.pop(key, None)), find(graph))
        return entry[1]

    return found


@once_per_graph
def factors_of(graph: OpGraph) -> Factors:
    """For each op, the letters that may be split in parts, with the numbers of parts."""
    letters = {op.name: letters_of(graph, op.name) for op in graph.ops}
    parts: dict[Spot, set[int]] = defaultdict(set)
    for found in letters.values():
        for _, _, spots in found:
            for spot, outer in spots:
                parts[spot].update({outer} if outer > 1 else ())
    if not parts:
        return {}
    for _ in range(_PASSES):
        before = sum(map(len, parts.values()))
        for name in (*letters, *reversed(letters)):
            for letter in letters[name]:
                for cut in _cuts(letter, parts):
                    for spot, outer in letter[2]:
                        parts[spot].add(outer * cut)
        if sum(map(len, parts.values())) == before:
            break
    found_by_op = {
        name: tuple((letter[0], own) for letter in found if (own := _cuts(letter, parts)))
        for name, found in letters.items()
    }
    return {name: found for name, found in found_by_op.items() if found}


def letters_of(graph: OpGraph, name: str) -> list[Letter]:
    """Of an op that has a rule: those that may be split."""
    op = graph.op(name)
    rule = rule_of(op)
    if rule is None:
        return []
    line = read_line(rule.line(view := plain_view(graph, op)), view)
    found: list[Letter] = []
    for letter in line.letters:
        if (places := line.places(letter)) and line.sizes[letter] > 1:
            tensors = zip((*op.inputs, *op.outputs), (*places[0], *places[1]), strict=True)
            spots = tuple(((value, place.dim), place.outer) for value, place in tensors if place is not None)
            found.append((letter, line.sizes[letter], spots))
    return found


def _cuts(letter: Letter, parts: dict[Spot, set[int]]) -> tuple[int, ...]:
    """In how many parts the letter itself may lie."""
    _, size, spots = letter
    found = {n // outer for spot, outer in spots for n in parts.get(spot, ()) if n % outer == 0}
    return tuple(sorted(n for n in found if n > 1 and size % n == 0 and size > n)[:_MOST])
