"""Plans for meshes of several axes, drawn at random as those of `tests.plans` are."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from math import prod

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.plan import Plan, Prediction, Sharding
from shardwright.pipeline.sharding.lowering import with_paths
from tests import plans
from tests.graphs import graph_strategies, preset
from tests.meshes import mesh, random_layout
from tests.unpipelined import whole_plan

_graph_strategies = cache(lambda model, sizes: graph_strategies(plans.graph_of(model), sizes))


def stored(draw: random.Random, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Layout:
    """Whole or split on each axis, any factor of any dim."""
    layout = random_layout(draw, shape, sizes)
    while not all(state.kind in "RS" for state in layout.states):
        layout = random_layout(draw, shape, sizes)
    return layout


def random_plan(model: str, sizes: tuple[int, ...], seed: int) -> Plan:
    """Any strategy for any op; on each axis the plan likes some states more than others."""
    draw, graph, strategies = random.Random(seed), plans.graph_of(model), _graph_strategies(model, sizes)
    liking = [{kind: draw.choice([0.1, 1.0, 5.0]) for kind in "RBSP"} for _ in sizes]

    def weight(layout: Layout) -> float:
        return prod(like[state.kind] for like, state in zip(liking, layout.states, strict=True))

    picked = {
        name: draw.choices(options, [weight(s.outputs[0]) for s in options])[0] for name, options in strategies.items()
    }
    storage = plans.random_storage(graph, strategies, sizes, draw, lambda shape: stored(draw, shape, sizes))
    inputs = {v.name: stored(draw, v.type.shape, sizes) for v in graph.of_role(Role.INPUT)}
    regions = plans.random_regions(0, len(graph.chain) - 1, draw, draw.randint(0, 2))
    plan = plan_of(graph, plans.sharding_of(graph, picked, storage, inputs, sizes), regions, sizes)
    return plans.with_kept(graph, plan, draw)


def plan_of(graph: OpGraph, sharding: Sharding, regions, sizes: tuple[int, ...]) -> Plan:
    axes = mesh(*sizes)
    sharding = with_paths(graph, sharding, replace(preset(), axes=axes))
    named = tuple((axis.name, axis.size) for axis in axes)
    return whole_plan(named, "cpu", 0, sharding, regions, Prediction(*[0] * 7))
