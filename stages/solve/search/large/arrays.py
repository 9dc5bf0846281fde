"""A problem as flat arrays, for the compiled loops.

Node v has the choices start[v] .. start[v + 1] - 1 of `costs`. Arcs are edges seen from one end: node v's are
arc_start[v] .. arc_start[v + 1] - 1; arc_to is the other end, arc_matrix its cost matrix. Equal matrices are stored
once: number 2m as given, 2m + 1 transposed, from matrix_start on in `pool`, row by row. Node v's holdings are
hold_start[v] .. hold_start[v + 1] - 1, each with first, end and usages per choice from usage_start on in `usage`.

No cost is below zero: the least of each node and of each edge is in `constant`. Forbidden pairs, and whatever costs
more than a known solution, cost `forbidden`: no solution with such a pair is better than the known one, and numbers
stay small enough to be exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.solve.problem.data import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass
class Arrays:
    start: Ints
    costs: Floats
    arc_start: Ints
    arc_to: NDArray[np.int32]
    arc_matrix: NDArray[np.int32]
    matrix_start: Ints
    pool: Floats
    hold_start: Ints
    first: Ints
    end: Ints
    usage_start: Ints
    usage: Floats
    base: Floats  # held at every moment whatever is chosen
    limit: float
    constant: float
    forbidden: float

    @property
    def count(self) -> int:
        return len(self.start) - 1

    @property
    def graph(self) -> tuple[Ints, NDArray[np.int32], NDArray[np.int32], Ints, Floats]:
        return self.arc_start, self.arc_to, self.arc_matrix, self.matrix_start, self.pool

    @property
    def holdings(self) -> tuple[Ints, Ints, Ints, Ints, Floats]:
        return self.hold_start, self.first, self.end, self.usage_start, self.usage

    def cap(self, cost: float) -> None:
        """A solution of this cost is known: what costs more, constant aside, is as good as forbidden."""
        most = 2.0 * max(cost - self.constant, 0.0) + 1.0
        if most < 0.5 * self.forbidden:
            self.forbidden = most
            np.minimum(self.pool, most, out=self.pool)
            np.minimum(self.costs, most, out=self.costs)


def flatten(problem: Problem, base: Floats, limit: float, constant: float, dear: float = 1.0) -> Arrays:
    """`dear`: how many times what any solution costs a forbidden pair costs, for memory at high prices."""
    nodes, edges = problem.nodes, problem.edges
    most = [float(n.costs.max() - n.costs.min()) for n in nodes]
    most += [float(e.costs[np.isfinite(e.costs)].max() - e.costs.min()) for e in edges]
    forbidden = dear * (2.0 * sum(most) + 1.0)  # more than any solution costs
    constant += sum(float(n.costs.min()) for n in nodes)
    arcs: list[list[tuple[int, int]]] = [[] for _ in nodes]
    known: dict[tuple[tuple[int, ...], bytes], int] = {}
    chunks: list[Floats] = []
    for e in edges:
        least = float(e.costs.min())
        constant += least
        matrix = np.ascontiguousarray(np.minimum(e.costs - least, forbidden))
        key = (matrix.shape, matrix.tobytes())
        if key not in known:
            known[key] = len(chunks)
            chunks += [matrix, np.ascontiguousarray(matrix.T)]
        arcs[e.first].append((e.second, known[key]))
        arcs[e.second].append((e.first, known[key] + 1))
    holdings = [h for n in nodes for h in n.holdings]
    return Arrays(
        start=_offsets([len(n.costs) for n in nodes]),
        costs=_joined([n.costs - n.costs.min() for n in nodes]),
        arc_start=_offsets([len(a) for a in arcs]),
        arc_to=np.array([j for a in arcs for j, _ in a], np.int32),
        arc_matrix=np.array([m for a in arcs for _, m in a], np.int32),
        matrix_start=_offsets([c.size for c in chunks]),
        pool=_joined([c.ravel() for c in chunks]),
        hold_start=_offsets([len(n.holdings) for n in nodes]),
        first=np.array([h.first for h in holdings], np.int64),
        end=np.array([h.end for h in holdings], np.int64),
        usage_start=_offsets([len(h.usages) for h in holdings]),
        usage=_joined([h.usages for h in holdings]),
        base=np.array(base, float),
        limit=float(limit),
        constant=constant,
        forbidden=forbidden,
    )


def _offsets(sizes: list[int]) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))])


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *parts])
