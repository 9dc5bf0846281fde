"""The problem as an integer linear program in Pyomo, solved at a memory limit; and the linear program for prices.

    minimise    sum_i,k cost_ik s_ik + sum_e,a,b cost_eab e_eab + sum_g,a,f cost_gaf m_gaf   (objective)
    one         sum_k s_ik = 1                        for every node i                       one_choice
    flow        sum_b e_eab = sum_{k in a} s_ik       for every edge e = (i,j), class a      _Variables._edge
                sum_a e_eab = sum_{k in b} s_jk       for every edge e = (i,j), class b      _Variables._edge
    made        m_gaf <= sum_{k in a} s_ik            for every share g of maker i, class a, form f
                sum_{k wants f} s_jk <= sum_a m_gaf   for every reader j of share g, form f  _Variables._share
    memory      sum of the bytes that the taken entries hold at moment t <= limit            memory[t]
    s, e, m in {0, 1}; e and m exist only where they are allowed.

Choices of a node that have equal rows in an edge's matrices (costs and bytes) form one class: an edge needs one
variable per pair of classes (layouts), not per pair of strategies. With the flow rows the relaxation of a tree is
integral, and a sharding graph is nearly a tree. Few rows of memory ever bind: `solve` adds one for every moment at
which its plan is seen to hold too much. Seconds and bytes are scaled so that the solver's tolerances mean something.

Relaxed, s, e and m lie anywhere between 0 and 1; the reduced cost of s_ik is then what a plan with that choice costs
beyond the relaxation's optimum, at least. `without_too_costly` drops the choices for which that is more than what lies
between the bound and the best known plan.

Prices of bytes for the bound (memory_price.py) come from a linear program over the plans seen so far, `best_prices`:

    maximise    h                                                                            (objective)
    below       h <= cost_p + sum_t price_t over_pt      for every plan p                    below
    0 <= price_t <= most
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.pipeline.config import Solve
from shardwright.stages.solve.problem.data import Array, Edge, Node, Problem, Share
from shardwright.stages.solve.search.backends import NothingFound
from shardwright.stages.solve.search.memory_price import BestPrices, Plane
from shardwright.stages.solve.search.restricted import Restricted, restrict

MOST_ROWS = 12  # moments that are added one after another
ROUNDING = 1e-6  # of a plan's cost: what a solver's tolerances may have taken from its reduced costs


def best_prices(settings: Solve, where: str) -> BestPrices:
    """The linear program for prices, solved by the backend: how high the lowest plane is at the best, and these."""

    def solve_prices(planes: list[Plane], most: float) -> tuple[float, list[float]]:
        import pyomo.environ as pyo

        model = pyo.ConcreteModel()
        unit = max(cost for cost, _ in planes) / 1000 or 1.0
        model.h = pyo.Var()
        model.price = pyo.Var(range(len(planes[0][1])), bounds=(0, 1000))  # in units of `most` per thousand
        model.below = pyo.ConstraintList()
        for cost, overs in planes:
            paid = sum(over * most / 1000 / unit * model.price[t] for t, over in enumerate(overs))
            model.below.add(model.h - paid <= cost / unit)
        model.objective = pyo.Objective(expr=-model.h)
        _run_backend(model, settings, where)
        prices = [max(0.0, float(p.value or 0.0)) * most / 1000 for p in model.price.values()]
        return float(model.h.value) * unit, prices

    return solve_prices


@dataclass(frozen=True)
class Exact:
    picked: tuple[int, ...]
    bound: float
    variables: int
    constraints: int


def solve(problem: Problem, limit: float, moments: tuple[int, ...], settings: Solve, where: str) -> Exact:
    """The optimum, or what was found in the time limit with the solver's bound. Raises NothingFound."""
    if any(not np.isfinite(node.costs).any() for node in problem.nodes):
        raise NothingFound("no plan exists: every choice of some node is forbidden", where=where)
    if limit < 0:
        raise NothingFound("no plan exists: the limit is below nothing at all", where=where)
    deadline = time.monotonic() + settings.time_limit_s
    rows = list(dict.fromkeys(moments))
    while True:
        built = _build_model(problem, limit, rows)
        left = replace(settings, time_limit_s=max(1.0, deadline - time.monotonic()))
        bound = _run_backend(built.model, left, where) * built.unit
        picked = built.picked()
        held = problem.held(picked)
        worst = int(held.argmax()) if len(held) else 0
        if not len(held) or held[worst] <= limit * (1 + 1e-9) or worst in rows or len(rows) >= MOST_ROWS:
            return Exact(picked, bound, len(built.model.x), built.constraints)
        rows.append(worst)


def without_too_costly(
    problem: Problem, limit: float, moments: tuple[int, ...], known: float, settings: Solve, where: str
) -> tuple[float, Restricted]:
    """The relaxation's bound, and the problem without the choices that no plan as good as the known cost has."""
    built = _build_model(problem, limit, moments, relaxed=True)
    bound = _run_backend(built.model, settings, where) * built.unit
    most = known - bound + ROUNDING * known
    reduced, x = built.model.rc, built.model.x
    kept = tuple(
        tuple(k for k, v in own.items() if reduced.get(x[v], 0.0) * built.unit <= most) for own in built.choices
    )
    return bound, restrict(problem, kept)


def _run_backend(model: Any, settings: Solve, where: str) -> float:
    backend = importlib.import_module(f"shardwright.stages.solve.search.backends.{settings.backend.value}")
    bound: float = backend.solve(model, settings, where)
    return bound


@dataclass(frozen=True)
class PyomoModel:
    model: Any
    unit: float  # seconds that one unit of its objective stands for
    choices: list[dict[int, int]]  # per node: choice -> variable
    constraints: int

    def picked(self) -> tuple[int, ...]:
        """The choice of every node, once the model is solved."""
        return tuple(max(own, key=lambda k: self.model.x[own[k]].value or 0.0) for own in self.choices)


def _build_model(problem: Problem, limit: float, moments: Iterable[int], *, relaxed: bool = False) -> PyomoModel:
    import pyomo.environ as pyo

    model = pyo.ConcreteModel()
    variables = _Variables(problem)
    costs, choices = variables.costs, variables.choices
    model.x = pyo.Var(range(len(costs)), domain=pyo.UnitInterval if relaxed else pyo.Binary)
    if relaxed:
        model.rc = pyo.Suffix(direction=pyo.Suffix.IMPORT)
    model.one_choice = pyo.Constraint(
        range(len(problem.nodes)), rule=lambda m, i: sum(m.x[v] for v in choices[i].values()) == 1
    )
    model.rows = pyo.ConstraintList()
    for left, right, equal in variables.rows:
        if left or right:
            ahead, behind = sum(model.x[v] for v in left), sum(model.x[v] for v in right)
            model.rows.add(ahead == behind if equal else ahead <= behind)
    unit = max(costs, default=0.0) / 1000 or 1.0
    model.objective = pyo.Objective(expr=sum(cost / unit * model.x[v] for v, cost in enumerate(costs) if cost))
    byte = limit / 1000 or 1.0
    model.memory = pyo.ConstraintList()
    for moment in moments:
        held = sum(total / byte * model.x[v] for v, total in enumerate(variables.held(moment)) if total)
        if not isinstance(held, int):
            model.memory.add(held <= limit / byte * (1 + 1e-9))
    return PyomoModel(model, unit, choices, len(model.one_choice) + len(model.rows) + len(model.memory))


class _Variables:
    """Variables, each with its cost and what it holds, and the rows between them."""

    def __init__(self, problem: Problem) -> None:
        self.costs: list[float] = []
        self.bytes: list[list[tuple[int, int, float]]] = []  # per variable: first, end, bytes
        self.rows: list[tuple[list[int], list[int], bool]] = []  # whose sum equals, or is at most, the sum of others
        self.choices = [
            {k: self._add(node, (k,)) for k in range(len(node.costs)) if math.isfinite(node.costs[k])}
            for node in problem.nodes
        ]
        for edge in problem.edges:
            self._edge(edge)
        for share in problem.shares:
            self._share(share)

    def held(self, moment: int) -> list[float]:
        return [sum(n for first, end, n in own if first <= moment < end) for own in self.bytes]

    def _add(self, part: Node | Edge | Share, at: tuple[int, ...]) -> int:
        self.costs.append(float(part.costs[at]))
        self.bytes.append([(h.first, h.end, float(h.usages[at])) for h in part.holdings if h.usages[at]])
        return len(self.costs) - 1

    def _pairs(self, part: Edge | Share, rows: list[list[int]], columns: list[list[int]]) -> dict[tuple[int, int], int]:
        every = (((a, b), (own[0], other[0])) for a, own in enumerate(rows) for b, other in enumerate(columns))
        return {pair: self._add(part, at) for pair, at in every if math.isfinite(part.costs[at])}

    def _sum(self, node: int, choices: list[int]) -> list[int]:
        return [self.choices[node][k] for k in choices if k in self.choices[node]]

    def _edge(self, edge: Edge) -> None:
        tables = [edge.costs, *(h.usages for h in edge.holdings)]
        rows, columns = _classes(tables), _classes([t.T for t in tables])
        pairs = self._pairs(edge, rows, columns)
        for end, (node, classes) in enumerate(((edge.first, rows), (edge.second, columns))):
            for number, members in enumerate(classes):
                own = [v for pair, v in pairs.items() if pair[end] == number]
                self.rows.append((own, self._sum(node, members), True))

    def _share(self, share: Share) -> None:
        forms = sorted({int(f) for reader in share.readers for f in reader.wants})
        rows = _classes([share.costs, *(h.usages for h in share.holdings)])
        pairs = self._pairs(share, rows, [[f] for f in forms])
        for (a, _), variable in pairs.items():
            self.rows.append(([variable], self._sum(share.maker, rows[a]), False))
        for number, form in enumerate(forms):
            made = [v for (_, b), v in pairs.items() if b == number]
            for reader in share.readers:
                if wanting := self._sum(reader.node, np.flatnonzero(reader.wants == form).tolist()):
                    self.rows.append((wanting, made, False))


def _classes(tables: list[Array]) -> list[list[int]]:
    """Rows that are equal in all tables, together."""
    groups: dict[bytes, list[int]] = {}
    for number, row in enumerate(np.concatenate(tables, axis=1)):
        groups.setdefault(row.tobytes(), []).append(number)
    return list(groups.values())
