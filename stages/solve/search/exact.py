"""What is given to the solver: the linear program for prices, and the integer program at a memory limit.

The integer program is solved again with a row for every moment at which its plan is seen to hold too much. Before it,
choices that another of their node beats or equals everywhere are dropped: in cost, in memory, on every edge and share.
Then those whose reduced cost in the relaxation is more than what lies between its bound and the best known plan.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from pipeline.config import Solve
from stages.solve.problem.data import Edge, Holding, Node, Problem, Reader, Share
from stages.solve.search.backends import NothingFound
from stages.solve.search.integer_program import (
    Plane,
    build_model,
    build_prices,
    read_choices,
    read_prices,
    read_reduced_costs,
)
from stages.solve.search.memory_price import BestPrices

MOST_ROWS = 12  # moments that are added one after another
ROUNDING = 1e-6  # of a plan's cost: what a solver's tolerances may have taken from its reduced costs


def best_prices(settings: Solve, where: str) -> BestPrices:
    """The linear program for prices, solved by the backend."""
    backend = importlib.import_module(f"stages.solve.search.backends.{settings.backend.value}")

    def solve_prices(planes: list[Plane], most: float) -> tuple[float, list[float]]:
        built = build_prices(planes, most)
        backend.solve(built.model, settings, where)
        return read_prices(built, most)

    return solve_prices


@dataclass(frozen=True)
class Exact:
    picked: tuple[int, ...]
    bound: float
    variables: int
    constraints: int


def solve(problem: Problem, limit: float | None, moments: tuple[int, ...], settings: Solve, where: str) -> Exact:
    """The optimum, or what was found in the time limit with the solver's bound. Raises NothingFound."""
    backend = importlib.import_module(f"stages.solve.search.backends.{settings.backend.value}")
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


def without_hopeless(
    problem: Problem, limit: float | None, moments: tuple[int, ...], known: float, settings: Solve, where: str
) -> tuple[float, Reduced]:
    """The relaxation's bound, and the problem without the choices that no plan as good as the known cost has."""
    backend = importlib.import_module(f"stages.solve.search.backends.{settings.backend.value}")
    built = build_model(problem, limit, moments, relaxed=True)
    bound = backend.solve(built.model, settings, where) * built.unit
    most = known - bound + ROUNDING * known
    kept = tuple(tuple(k for k, cost in own.items() if cost <= most) for own in read_reduced_costs(problem, built))
    return bound, restrict(problem, kept)


@dataclass(frozen=True, eq=False)
class Reduced:
    problem: Problem
    kept: tuple[tuple[int, ...], ...]  # per node: its choices that are left

    def expand(self, picked: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(own[k] for own, k in zip(self.kept, picked, strict=True))

    def shrink(self, picked: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(own.index(k) for own, k in zip(self.kept, picked, strict=True))


def as_it_is(problem: Problem) -> Reduced:
    return Reduced(problem, tuple(tuple(range(len(node.costs))) for node in problem.nodes))


def restrict(problem: Problem, kept: tuple[tuple[int, ...], ...]) -> Reduced:
    """The problem with these choices of each node alone. What was one array stays one array."""
    at = [np.array(own) for own in kept]
    cut = _Cut()
    nodes = tuple(Node(n.name, cut(n.costs, k), cut.all(n.holdings, k)) for n, k in zip(problem.nodes, at, strict=True))
    edges = tuple(
        Edge(e.first, e.second, cut(e.costs, at[e.first], at[e.second]), cut.all(e.holdings, at[e.first], at[e.second]))
        for e in problem.edges
    )
    shares = []
    for share in problem.shares:
        readers = tuple(Reader(r.node, cut(r.wants, at[r.node])) for r in share.readers)
        rows, forms = at[share.maker], cut.every(share.costs.shape[1])
        shares.append(Share(share.maker, readers, cut(share.costs, rows, forms), cut.all(share.holdings, rows, forms)))
    return Reduced(Problem(nodes, edges, tuple(shares)), kept)


class _Cut:
    """Parts of arrays, each made once."""

    def __init__(self) -> None:
        self.made: dict[Hashable, np.ndarray] = {}

    def __call__(self, table: np.ndarray, *at: np.ndarray) -> np.ndarray:
        key = (id(table), *(own.tobytes() for own in at))
        if key not in self.made:
            self.made[key] = table[np.ix_(*at)]
        return self.made[key]

    def all(self, holdings: tuple[Holding, ...], *at: np.ndarray) -> tuple[Holding, ...]:
        return tuple(Holding(h.first, h.end, self(h.usages, *at)) for h in holdings)

    def every(self, count: int) -> np.ndarray:
        return np.arange(count)


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
    """Rows that no other row with equal forms beats or equals everywhere; of equal ones the first."""
    out: set[int] = set()
    for a in range(len(table)):
        for b in range(len(table)):
            if a == b or b in out or a in out or any(f[a] != f[b] for f in forms):
                continue
            if (table[b] <= table[a]).all() and (b < a or (table[b] < table[a]).any()):
                out.add(a)
    kept = tuple(k for k in range(len(table)) if k not in out and np.isfinite(table[k, 0]))
    return kept or tuple(range(len(table)))
