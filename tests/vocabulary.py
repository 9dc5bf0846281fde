"""A plan that splits a vocabulary which does not divide."""

from __future__ import annotations

from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.layout import Layout, R, S
from shardwright.pipeline.ir.plan import Plan, Region
from shardwright.stages.solve.problem.storage import Stored, Way
from tests import mesh_plans, plans
from tests.graphs import graph_strategies
from tests.storage_plans import follow

MODEL = "uneven"


def vocabulary_plan() -> Plan:
    """The tied table is split on its 17 words, all else is whole."""
    graph, sizes, whole = plans.graph_of(MODEL), (2,), Layout((R,))
    read = {v.origin: whole for v in graph.of_role(Role.PARAMETER)} | {"token.weight": Layout((S(0),))}
    inputs = {v.name: whole for v in graph.of_role(Role.INPUT)}
    options = graph_strategies(graph, sizes)
    (table,) = (v.name for v in graph.of_role(Role.PARAMETER) if v.origin == "token.weight")
    for op in graph.consumers()[table]:
        place = op.inputs.index(table)
        options[op.name] = tuple(s for s in options[op.name] if s.inputs[place] == read["token.weight"])
    picked = follow(graph, options, read, inputs)
    stored = {name: Stored(layout, layout, Way.as_it_lies) for name, layout in read.items()}
    links = tuple(Region(i, i, False, ()) for i in range(len(graph.chain)))
    return mesh_plans.plan_of(graph, plans.sharding_of(graph, picked, stored, inputs, sizes), links, sizes)
