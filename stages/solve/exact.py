"""The integer program at a memory limit: built, solved, and given a row for every moment at which its plan holds too much.

Before it, choices that cannot be in a better plan than the best one known are dropped. With the prices of bytes that
gave the bound, a plan's cost is at least the bound plus what its worst single choice costs on top: the least over plans
with that choice, found by elimination with all others of the node forbidden. Where that exceeds the best known cost,
the choice is out.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass, replace

import numpy as np

from pipeline.config import Solve
from stages.solve.backends import NothingFound
from stages.solve.data import Edge, Holding, Node, Problem, Reader, Share
from stages.solve.model import build_model, read_choices

MOST_ROWS = 12  # moments that are added one after another


@dataclass(frozen=True)
class Exact:
    picked: tuple[int, ...]
    bound: float
    variables: int
    constraints: int


def solve(problem: Problem, limit: float | None, moments: tuple[int, ...], settings: Solve, where: str) -> Exact:
    """The optimum, or what was found in the time limit with the solver's bound. Raises NothingFound."""
    backend = importlib.import_module(f"stages.solve.backends.{settings.backend.value}")
    if any(not np.isfinite(node.costs).any() for node in problem.nodes):
        raise NothingFound("no plan exists: every choice of some node is forbidden", where=where)
    if limit is not None and limit < 0:
        raise NothingFound("no plan exists: the limit is below nothing at all", where=where)
    deadline = time.monotonic() + settings.time_limit_s
    rows = list(dict.fromkeys(moments))
    while True:
        built = build_model(problem, limit, rows)
        left = replace(settings, time_limit_s=max(1.0, deadline - time.monotonic()))
        bound = backend.solve(built.model, left, where) * built.unit
        picked = read_choices(problem, built)
        if limit is None:
            break
        held = problem.held(picked)
        worst = int(held.argmax()) if len(held) else 0
        if not len(held) or held[worst] <= limit * (1 + 1e-9) or worst in rows or len(rows) >= MOST_ROWS:
            break
        rows.append(worst)
    return Exact(picked, bound, built.variables, built.constraints)


@dataclass(frozen=True, eq=False)
class Reduced:
    problem: Problem
    kept: tuple[tuple[int, ...], ...]  # per node: its choices that are left

    def expand(self, picked: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(own[k] for own, k in zip(self.kept, picked, strict=True))

    def shrink(self, picked: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(own.index(k) for own, k in zip(self.kept, picked, strict=True))


def restrict(problem: Problem, kept: tuple[tuple[int, ...], ...]) -> Reduced:
    """The problem with these choices of each node alone."""
    at = [np.array(own) for own in kept]
    nodes = tuple(Node(n.name, n.costs[k], _cut(n.holdings, (k,))) for n, k in zip(problem.nodes, at, strict=True))
    edges = tuple(
        Edge(
            e.first, e.second, e.costs[np.ix_(at[e.first], at[e.second])], _cut(e.holdings, (at[e.first], at[e.second]))
        )
        for e in problem.edges
    )
    shares = tuple(_restricted(share, at) for share in problem.shares)
    return Reduced(Problem(nodes, edges, shares), kept)


def _restricted(share: Share, at: list[np.ndarray]) -> Share:
    every = np.arange(share.costs.shape[1])
    readers = tuple(Reader(r.node, r.wants[at[r.node]]) for r in share.readers)
    rows = at[share.maker]
    return Share(share.maker, readers, share.costs[rows], _cut(share.holdings, (rows, every)))


def _cut(holdings: tuple[Holding, ...], at: tuple[np.ndarray, ...]) -> tuple[Holding, ...]:
    return tuple(Holding(h.first, h.end, h.usages[np.ix_(*at)]) for h in holdings)


def without_dominated(problem: Problem) -> Reduced:
    """Drops each choice that another of its node beats or equals in cost, in memory and on every edge and share."""
    columns: list[list[np.ndarray]] = [[] for _ in problem.nodes]
    forms: list[list[np.ndarray]] = [[] for _ in problem.nodes]
    for number, node in enumerate(problem.nodes):
        columns[number] += [node.costs[:, None], *(h.usages[:, None] for h in node.holdings)]
    for edge in problem.edges:
        for table in (edge.costs, *(h.usages for h in edge.holdings)):
            columns[edge.first].append(table)
            columns[edge.second].append(table.T)
    for share in problem.shares:
        for table in (share.costs, *(h.usages for h in share.holdings)):
            columns[share.maker].append(table)
        for reader in share.readers:
            forms[reader.node].append(reader.wants)
    kept = tuple(_undominated(np.concatenate(c, axis=1), f) for c, f in zip(columns, forms, strict=True))
    return restrict(problem, kept)


def _undominated(table: np.ndarray, forms: list[np.ndarray]) -> tuple[int, ...]:
    """Rows that no other row beats or equals everywhere; of equal ones the first. Rows compare where forms are equal."""
    out: set[int] = set()
    for a in range(len(table)):
        for b in range(len(table)):
            if a == b or b in out or a in out or any(f[a] != f[b] for f in forms):
                continue
            if (table[b] <= table[a]).all() and (b < a or (table[b] < table[a]).any()):
                out.add(a)
    kept = tuple(k for k in range(len(table)) if k not in out and np.isfinite(table[k, 0]))
    return kept or tuple(range(len(table)))
