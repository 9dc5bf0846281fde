"""The problem as an integer linear program in Pyomo.

    minimise    sum_i,k cost_ik s_ik + sum_e,a,b cost_eab e_eab                          (objective)
    one         sum_k s_ik = 1                        for every node i                   one_choice
    flow        sum_b e_eab = sum_{k in a} s_ik       for every edge e = (i,j), class a  flow_first
                sum_a e_eab = sum_{k in b} s_jk       for every edge e = (i,j), class b  flow_second
    memory      sum_i,k usage_ik s_ik <= limit                                           memory
    s_ik, e_eab in {0, 1}; e_eab exists only where it is allowed.

Choices of a node that have equal rows in an edge's matrix form one class: an edge needs one variable per pair of
classes (layouts), not per pair of strategies. With the flow rows the relaxation of a tree is integral, and a sharding
graph is nearly a tree. Seconds and bytes are scaled so that the solver's tolerances mean something.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from stages.solve.problem import Edge, Problem


@dataclass(frozen=True)
class Built:
    """A Pyomo model, and the seconds or bytes that one unit of its objective stands for."""

    model: Any
    unit: float
    variables: int
    constraints: int


def build_model(problem: Problem, limit: float | None = None) -> Built:
    """Without a limit there is no memory row."""
    import pyomo.environ as pyo

    model = pyo.ConcreteModel()
    pairs = [(i, k) for i, node in enumerate(problem.nodes) for k in range(len(node.costs))]
    costs = {(i, k): problem.nodes[i].costs[k] for i, k in pairs}
    model.s = pyo.Var(pairs, domain=pyo.Binary)
    for pair in pairs:
        if not math.isfinite(costs[pair]):
            model.s[pair].fix(0)
    flows = [_Flow(n, edge) for n, edge in enumerate(problem.edges)]
    model.e = pyo.Var([key for flow in flows for key in flow.costs], domain=pyo.Binary)
    model.one_choice = pyo.Constraint(
        range(len(problem.nodes)),
        rule=lambda m, i: sum(m.s[i, k] for k in range(len(problem.nodes[i].costs))) == 1,
    )
    model.flow = pyo.ConstraintList()
    for flow in flows:
        for left, right in flow.rows(model):
            model.flow.add(left == right)
    unit = _unit([*costs.values(), *(cost for flow in flows for cost in flow.costs.values())])
    own = sum(cost / unit * model.s[pair] for pair, cost in costs.items() if cost and math.isfinite(cost))
    model.objective = pyo.Objective(
        expr=own + sum(cost / unit * model.e[key] for flow in flows for key, cost in flow.costs.items() if cost)
    )
    if limit is not None:
        byte = _unit([u for node in problem.nodes for u in node.usages])
        usage = sum(problem.nodes[i].usages[k] / byte * model.s[i, k] for i, k in pairs if problem.nodes[i].usages[k])
        model.memory = pyo.Constraint(expr=usage <= limit / byte * (1 + 1e-9))
    return Built(
        model, unit, len(model.s) + len(model.e), len(model.one_choice) + len(model.flow) + (limit is not None)
    )


def _unit(numbers: list[float]) -> float:
    """A thousandth of the largest."""
    return max((n for n in numbers if math.isfinite(n)), default=0.0) / 1000 or 1.0


class _Flow:
    """The variables and rows of one edge."""

    def __init__(self, number: int, edge: Edge) -> None:
        self.number, self.edge = number, edge
        self.first = _classes(edge.costs)
        self.second = _classes(tuple(zip(*edge.costs, strict=True)))
        self.costs = {
            (number, a, b): edge.costs[rows[0]][columns[0]]
            for a, rows in enumerate(self.first)
            for b, columns in enumerate(self.second)
            if math.isfinite(edge.costs[rows[0]][columns[0]])
        }

    def rows(self, model: Any) -> list[tuple[Any, Any]]:
        n, edge = self.number, self.edge
        sides = []
        for a, members in enumerate(self.first):
            flow = [model.e[n, a, b] for b in range(len(self.second)) if (n, a, b) in self.costs]
            sides.append((sum(flow) if flow else 0, sum(model.s[edge.first, k] for k in members)))
        for b, members in enumerate(self.second):
            flow = [model.e[n, a, b] for a in range(len(self.first)) if (n, a, b) in self.costs]
            sides.append((sum(flow) if flow else 0, sum(model.s[edge.second, k] for k in members)))
        return sides


def _classes(rows: tuple[tuple[float, ...], ...]) -> list[list[int]]:
    """Indices of equal rows, together."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row, []).append(index)
    return list(groups.values())


def read_choices(problem: Problem, model: Any) -> tuple[int, ...]:
    return tuple(
        max(range(len(node.costs)), key=lambda k, i=i: model.s[i, k].value or 0.0)
        for i, node in enumerate(problem.nodes)
    )
