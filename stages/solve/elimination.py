"""Exact minimisation of a problem without a memory row, by eliminating one node after another.

A table holds a cost for every combination of choices of some nodes; at first there is one per node and one per edge.
To eliminate a node: add up the tables that name it, and replace them by one table that holds, for every combination of
its neighbours' choices, the least cost over its own. When all nodes are gone the least cost is known, and going back in
the reverse order tells every choice. The work is exponential in how many neighbours a node gathers (the graph's
tree-width), not in the number of nodes: a chain of a thousand layers is no harder than one of ten.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.solve.problem import Problem

MOST_ENTRIES = 4_000_000  # of one table: beyond this the graph is too wide for elimination


@dataclass(frozen=True)
class _Table:
    nodes: tuple[int, ...]  # one per dim of `costs`
    costs: NDArray[np.float64]


@dataclass(frozen=True)
class _Answer:
    """The best choice of an eliminated node for every combination of its neighbours' choices."""

    node: int
    neighbours: tuple[int, ...]
    best: NDArray[np.int64]


def minimise(problem: Problem, most_entries: int = MOST_ENTRIES) -> tuple[int, ...] | None:
    """The choices of least cost, or None where the graph is too wide."""
    sizes = [len(node.costs) for node in problem.nodes]
    tables = [_Table((i,), np.array(node.costs)) for i, node in enumerate(problem.nodes)]
    tables += [_Table((e.first, e.second), np.array(e.costs)) for e in problem.edges]
    naming: list[set[int]] = [set() for _ in sizes]  # node -> tables that name it
    for number, table in enumerate(tables):
        for node in table.nodes:
            naming[node].add(number)
    left = set(range(len(sizes)))
    answers: list[_Answer] = []
    while left:
        node = min(left, key=lambda n: (_entries(n, tables, naming, sizes), n))
        if _entries(node, tables, naming, sizes) > most_entries:
            return None
        answers.append(_eliminate(node, tables, naming, sizes))
        left.remove(node)
    return _trace_back(answers, len(sizes))


def _neighbours(node: int, tables: list[_Table], naming: list[set[int]]) -> tuple[int, ...]:
    return tuple(sorted({n for number in naming[node] for n in tables[number].nodes} - {node}))


def _entries(node: int, tables: list[_Table], naming: list[set[int]], sizes: list[int]) -> int:
    count = sizes[node]
    for neighbour in _neighbours(node, tables, naming):
        count *= sizes[neighbour]
    return count


def _eliminate(node: int, tables: list[_Table], naming: list[set[int]], sizes: list[int]) -> _Answer:
    neighbours = _neighbours(node, tables, naming)
    axes = (*neighbours, node)
    total = np.zeros(tuple(sizes[n] for n in axes))
    for number in sorted(naming[node]):
        total = total + _spread(tables[number], axes)
        for named in tables[number].nodes:
            if named != node:
                naming[named].discard(number)
    tables.append(_Table(neighbours, total.min(axis=-1)))
    for neighbour in neighbours:
        naming[neighbour].add(len(tables) - 1)
    return _Answer(node, neighbours, total.argmin(axis=-1))


def _spread(table: _Table, axes: tuple[int, ...]) -> NDArray[np.float64]:
    """The table with one dim per axis, of size one where it does not name it."""
    order = sorted(range(len(table.nodes)), key=lambda d: axes.index(table.nodes[d]))
    named = [table.nodes[d] for d in order]
    shape = [table.costs.shape[order[named.index(axis)]] if axis in named else 1 for axis in axes]
    return table.costs.transpose(order).reshape(shape)


def _trace_back(answers: list[_Answer], count: int) -> tuple[int, ...]:
    picked = [0] * count
    for answer in reversed(answers):
        picked[answer.node] = int(answer.best[tuple(picked[n] for n in answer.neighbours)])
    return tuple(picked)
