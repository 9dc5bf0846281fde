"""A problem as flat arrays, for the compiled loops; and the same with few of each node's choices.

No cost is below zero: the least of each node and of each edge is in `constant`. Forbidden pairs, and whatever costs
more than a known solution, cost `forbidden`: no solution with such a pair is better than the known one, and numbers
stay small enough to be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.stages.solve.problem.data import Problem
from shardwright.stages.solve.search.large.loops import fill_matrices, fill_usages

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class CostGraph(NamedTuple):
    """Node v has the choices start[v] .. start[v + 1] - 1. Arcs are edges seen from one end.

    Node v's arcs are arc_start[v] .. arc_start[v + 1] - 1; arc_to is the other end, arc_matrix the cost matrix. Equal
    matrices are stored once: number 2m as given, 2m + 1 transposed, from matrix_start on in `pool`, row by row.
    """

    start: Ints
    arc_start: Ints
    arc_to: NDArray[np.int32]
    arc_matrix: NDArray[np.int32]
    matrix_start: Ints
    pool: Floats


class HoldingArrays(NamedTuple):
    """Node v's holdings are start[v] .. start[v + 1] - 1; bytes by choice are from usage_start on in `usage`."""

    start: Ints
    first: Ints
    end: Ints
    usage_start: Ints
    usage: Floats


@dataclass
class Arrays:
    graph: CostGraph
    costs: Floats  # by choice
    holdings: HoldingArrays
    base: Floats  # held at every moment whatever is chosen
    limit: float
    constant: float
    forbidden: float

    @property
    def start(self) -> Ints:
        return self.graph.start

    @property
    def count(self) -> int:
        return len(self.start) - 1

    def cap(self, cost: float) -> None:
        """A solution of this cost is known: what costs more, constant aside, is as good as forbidden."""
        most = 2.0 * max(cost - self.constant, 0.0) + 1.0
        if most < 0.5 * self.forbidden:
            self.forbidden = most
            np.minimum(self.graph.pool, most, out=self.graph.pool)
            np.minimum(self.costs, most, out=self.costs)


def flatten(problem: Problem, base: Floats, limit: float, constant: float, scale: float = 1.0) -> Arrays:
    """`scale`: how many times what any solution costs a forbidden pair costs, for memory at high prices."""
    nodes, edges = problem.nodes, problem.edges
    most = [float(n.costs.max() - n.costs.min()) for n in nodes]
    most += [float(e.costs[np.isfinite(e.costs)].max() - e.costs.min()) for e in edges]
    forbidden = scale * (2.0 * sum(most) + 1.0)  # more than any solution costs
    constant += sum(float(n.costs.min()) for n in nodes)
    arcs: list[list[tuple[int, int]]] = [[] for _ in nodes]
    known: dict[tuple[tuple[int, ...], bytes], int] = {}
    matrices: list[Floats] = []
    for e in edges:
        least = float(e.costs.min())
        constant += least
        matrix = np.ascontiguousarray(np.minimum(e.costs - least, forbidden))
        key = (matrix.shape, matrix.tobytes())
        if key not in known:
            known[key] = len(matrices)
            matrices += [matrix, np.ascontiguousarray(matrix.T)]
        arcs[e.first].append((e.second, known[key]))
        arcs[e.second].append((e.first, known[key] + 1))
    holdings = [h for n in nodes for h in n.holdings]
    graph = CostGraph(
        start=offsets([len(n.costs) for n in nodes]),
        arc_start=offsets([len(a) for a in arcs]),
        arc_to=np.array([j for a in arcs for j, _ in a], np.int32),
        arc_matrix=np.array([m for a in arcs for _, m in a], np.int32),
        matrix_start=offsets([m.size for m in matrices]),
        pool=_joined([m.ravel() for m in matrices]),
    )
    held = HoldingArrays(
        start=offsets([len(n.holdings) for n in nodes]),
        first=np.array([h.first for h in holdings], np.int64),
        end=np.array([h.end for h in holdings], np.int64),
        usage_start=offsets([len(h.usages) for h in holdings]),
        usage=_joined([h.usages for h in holdings]),
    )
    costs = _joined([n.costs - n.costs.min() for n in nodes])
    return Arrays(graph, costs, held, np.array(base, float), float(limit), constant, forbidden)


def offsets(sizes: Sequence[int] | Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, np.int64))])


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *parts])


def candidates(arrays: Arrays, rank: Floats, most: int, always: Ints) -> Ints:
    """The `most` choices of each node with the least rank, and the one that is always kept: places, in their order."""
    node = np.repeat(np.arange(arrays.count), np.diff(arrays.start))
    rank = rank.copy()
    rank[arrays.start[:-1] + always] = -np.inf
    order = np.lexsort((rank, node))
    return np.sort(order[np.arange(len(order)) - arrays.start[node] < most])


def narrowed(arrays: Arrays, kept: Ints, back: Ints) -> Arrays:
    """Arrays with these choices alone; `back`: the arc that goes the other way."""
    old, held = arrays.graph, arrays.holdings
    node = np.searchsorted(old.start, kept, side="right") - 1
    sizes = np.bincount(node, minlength=arrays.count)
    own = kept - old.start[node]  # choices by their number among the node's
    leaves = np.repeat(np.arange(arrays.count), np.diff(old.arc_start))
    forward = leaves < old.arc_to
    matrix = np.zeros(len(leaves), np.int32)
    matrix[forward] = 2 * np.arange(int(forward.sum()))
    matrix[back[forward]] = matrix[forward] + 1
    matrix_start = offsets(np.repeat((sizes[leaves] * sizes[old.arc_to])[forward], 2))
    pool = np.empty(int(matrix_start[-1]))
    graph = CostGraph(offsets(sizes), old.arc_start, old.arc_to, matrix, matrix_start, pool)
    fill_matrices(old, graph, own, leaves)
    holder = np.repeat(np.arange(arrays.count), np.diff(held.start))
    usage_start = offsets(sizes[holder])
    fewer = held._replace(usage_start=usage_start, usage=np.empty(int(usage_start[-1])))
    fill_usages(graph.start, own, holder, held, fewer)
    return replace(arrays, graph=graph, costs=arrays.costs[kept], holdings=fewer)
