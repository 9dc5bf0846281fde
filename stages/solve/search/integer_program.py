"""The problem as an integer linear program in Pyomo.

    minimise    sum_i,k cost_ik s_ik + sum_e,a,b cost_eab e_eab + sum_g,a,f cost_gaf m_gaf   (objective)
    one         sum_k s_ik = 1                        for every node i                       one_choice
    flow        sum_b e_eab = sum_{k in a} s_ik       for every edge e = (i,j), class a      flow
                sum_a e_eab = sum_{k in b} s_jk       for every edge e = (i,j), class b      flow
    made        m_gaf <= sum_{k in a} s_ik            for every share g of maker i, class a, form f
                sum_{k wants f} s_jk <= sum_a m_gaf   for every reader j of share g, form f  made
    memory      sum of the bytes that the taken entries hold at moment t <= limit            memory[t]
    s, e, m in {0, 1}; e and m exist only where they are allowed.

Choices of a node that have equal rows in an edge's matrices (costs and bytes) form one class: an edge needs one
variable per pair of classes (layouts), not per pair of strategies. With the flow rows the relaxation of a tree is
integral, and a sharding graph is nearly a tree. Rows of memory are there for the moments that are asked for: few of
them ever bind.
Seconds and bytes are scaled so that the solver's tolerances mean something.

Relaxed, s, e and m lie anywhere between 0 and 1; the reduced cost of s_ik is then what a plan with that choice costs
beyond the relaxation's optimum, at least.

The prices of bytes for the bound (stages/solve/search/memory_price.py) come from a linear program over the plans seen
so far:

    maximise    h                                                                            (objective)
    below       h <= cost_p + sum_t price_t over_pt      for every plan p                    below
    0 <= price_t <= most
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.solve.problem.data import Array, Edge, Problem, Share


@dataclass(frozen=True)
class Built:
    """A Pyomo model, and the seconds that one unit of its objective stands for."""

    model: Any
    unit: float
    variables: int
    constraints: int


@dataclass(frozen=True)
class Plane:
    """What a plan costs and by how much it is over the limit at each moment that has a price."""

    cost: float
    over: tuple[float, ...]


def build_prices(planes: list[Plane], most: float) -> Built:
    """The program for the best prices, in units of `most` per thousand; it minimises -h."""
    import pyomo.environ as pyo

    model = pyo.ConcreteModel()
    unit = max(plane.cost for plane in planes) / 1000 or 1.0
    model.h = pyo.Var()
    model.price = pyo.Var(range(len(planes[0].over)), bounds=(0, 1000))
    model.below = pyo.ConstraintList()
    for plane in planes:
        paid = sum(over * most / 1000 / unit * model.price[t] for t, over in enumerate(plane.over))
        model.below.add(model.h - paid <= plane.cost / unit)
    model.objective = pyo.Objective(expr=-model.h)
    return Built(model, unit, 1 + len(planes[0].over), len(planes))


def read_prices(built: Built, most: float) -> tuple[float, list[float]]:
    """How high the lowest plane is at the best prices, and these."""
    model = built.model
    return float(model.h.value) * built.unit, [
        max(0.0, float(p.value or 0.0)) * most / 1000 for p in model.price.values()
    ]


def build_model(
    problem: Problem, limit: float | None = None, moments: Iterable[int] = (), *, relaxed: bool = False
) -> Built:
    import pyomo.environ as pyo

    model = pyo.ConcreteModel()
    parts = _Parts(problem)
    model.x = pyo.Var(range(len(parts.costs)), domain=pyo.UnitInterval if relaxed else pyo.Binary)
    if relaxed:
        model.rc = pyo.Suffix(direction=pyo.Suffix.IMPORT)
    model.one_choice = pyo.Constraint(
        range(len(problem.nodes)), rule=lambda m, i: sum(m.x[v] for v in parts.choices[i].values()) == 1
    )
    model.rows = pyo.ConstraintList()
    for left, right, equal in parts.rows:
        if not left and not right:
            continue
        ahead, behind = sum(model.x[v] for v in left), sum(model.x[v] for v in right)
        model.rows.add(ahead == behind if equal else ahead <= behind)
    unit = _unit(parts.costs)
    model.objective = pyo.Objective(expr=sum(cost / unit * model.x[v] for v, cost in enumerate(parts.costs) if cost))
    if limit is not None:
        byte = limit / 1000 or 1.0
        model.memory = pyo.ConstraintList()
        for moment in moments:
            held = sum(bytes_ / byte * model.x[v] for v, bytes_ in parts.held(moment))
            if not isinstance(held, int):
                model.memory.add(held <= limit / byte * (1 + 1e-9))
    rows = len(model.one_choice) + len(model.rows) + (len(model.memory) if limit is not None else 0)
    return Built(model, unit, len(parts.costs), rows)


def read_choices(problem: Problem, built: Built) -> tuple[int, ...]:
    """The choice of every node in a model that was solved."""
    taken = _Parts(problem).choices
    return tuple(max(own, key=lambda k: built.model.x[own[k]].value or 0.0) for own in taken)


def read_reduced_costs(problem: Problem, built: Built) -> list[dict[int, float]]:
    """Per node and choice, in a relaxed model that was solved: seconds."""
    costs, x = built.model.rc, built.model.x
    return [{k: costs.get(x[v], 0.0) * built.unit for k, v in own.items()} for own in _Parts(problem).choices]


def _unit(numbers: list[float]) -> float:
    """A thousandth of the largest."""
    return max(numbers, default=0.0) / 1000 or 1.0


Row = tuple[list[int], list[int], bool]  # variables whose sum equals, or is at most, the sum of others


class _Parts:
    """Variables, each with its cost and what it holds, and the rows between them."""

    def __init__(self, problem: Problem) -> None:
        self.costs: list[float] = []
        self.bytes: list[list[tuple[int, int, float]]] = []  # per variable: first, end, bytes
        self.rows: list[Row] = []
        self.choices: list[dict[int, int]] = []  # per node: choice -> variable
        for node in problem.nodes:
            own = {}
            for k in range(len(node.costs)):
                if math.isfinite(node.costs[k]):
                    own[k] = self._add(node.costs[k], ((h.first, h.end, h.usages[k]) for h in node.holdings))
            self.choices.append(own)
        for edge in problem.edges:
            self._edge(edge)
        for share in problem.shares:
            self._share(share)

    def held(self, moment: int) -> Iterator[tuple[int, float]]:
        for variable, stretches in enumerate(self.bytes):
            total = sum(n for first, end, n in stretches if first <= moment < end)
            if total:
                yield variable, total

    def _add(self, cost: float, stretches: Iterable[tuple[int, int, float]]) -> int:
        self.costs.append(float(cost))
        self.bytes.append([(first, end, float(n)) for first, end, n in stretches if n])
        return len(self.costs) - 1

    def _pairs(self, part: Edge | Share, rows: list[list[int]], columns: list[list[int]]) -> dict[tuple[int, int], int]:
        found = {}
        for a, first in enumerate(rows):
            for b, second in enumerate(columns):
                at = (first[0], second[0])
                if math.isfinite(part.costs[at]):
                    found[a, b] = self._add(part.costs[at], ((h.first, h.end, h.usages[at]) for h in part.holdings))
        return found

    def _sum(self, node: int, choices: list[int]) -> list[int]:
        return [self.choices[node][k] for k in choices if k in self.choices[node]]

    def _edge(self, edge: Edge) -> None:
        tables = [edge.costs, *(h.usages for h in edge.holdings)]
        rows, columns = _classes(tables), _classes([t.T for t in tables])
        pairs = self._pairs(edge, rows, columns)
        for a, members in enumerate(rows):
            self.rows.append(([v for (x, _), v in pairs.items() if x == a], self._sum(edge.first, members), True))
        for b, members in enumerate(columns):
            self.rows.append(([v for (_, y), v in pairs.items() if y == b], self._sum(edge.second, members), True))

    def _share(self, share: Share) -> None:
        forms = sorted({int(f) for reader in share.readers for f in reader.wants})
        rows = _classes([share.costs, *(h.usages for h in share.holdings)])
        pairs = self._pairs(share, rows, [[f] for f in forms])
        for (a, _), variable in pairs.items():
            self.rows.append(([variable], self._sum(share.maker, rows[a]), False))
        for number, form in enumerate(forms):
            made = [v for (_, b), v in pairs.items() if b == number]
            for reader in share.readers:
                want = [k for k in range(len(reader.wants)) if reader.wants[k] == form]
                if wanting := self._sum(reader.node, want):
                    self.rows.append((wanting, made, False))


def _classes(tables: list[Array]) -> list[list[int]]:
    """Rows that are equal in all tables, together."""
    groups: dict[bytes, list[int]] = {}
    joined = np.concatenate([np.ascontiguousarray(t) for t in tables], axis=1)
    for number, row in enumerate(joined):
        groups.setdefault(row.tobytes(), []).append(number)
    return list(groups.values())
