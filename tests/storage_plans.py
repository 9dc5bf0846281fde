"""Plans that have a name: data and tensor parallel steps with every way to store parameters, on meshes of any axes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import B, Layout, R, S, State
from shardwright.pipeline.ir.plan import Plan, Region, Strategy
from shardwright.pipeline.ir.profile import Profile
from shardwright.stages.profile.run import make_profile
from shardwright.stages.solve.problem.storage import Stored, Way, storage_choices
from tests import mesh_plans, plans
from tests.graphs import SILENT, graph_strategies, preset
from tests.meshes import mesh


@dataclass(frozen=True)
class Named:
    """Which axes split the batch, which split the weights, and which the shards of ZeRO, stored in what way."""

    sizes: tuple[int, ...]
    data: tuple[int, ...]
    tensor: tuple[int, ...] = ()
    shards: tuple[int, ...] = ()
    way: Way = Way.as_it_lies


WAYS = {"zero1": Way.zero1, "zero2": Way.gathered, "zero3": Way.regathered}
NAMED: dict[str, Named] = {
    "ddp": Named((2,), (0,)),
    **{name: Named((2,), (0,), shards=(0,), way=way) for name, way in WAYS.items()},
    "tp": Named((2,), (), (0,)),
    "ddp_ddp": Named((2, 2), (0, 1)),
    **{f"{name}_on_both": Named((2, 2), (0, 1), shards=(0, 1), way=way) for name, way in WAYS.items()},
    **{f"ddp_{name}": Named((2, 2), (0, 1), shards=(1,), way=way) for name, way in WAYS.items()},
    "ddp_tp": Named((2, 2), (0,), (1,)),
    **{f"{name}_tp": Named((2, 2), (0,), (1,), shards=(0,), way=way) for name, way in WAYS.items()},
    **{f"{name}_also_on_tp": Named((2, 2), (0,), (1,), shards=(0, 1), way=way) for name, way in WAYS.items()},
    **{f"ddp_{name}_tp": Named((2, 2, 2), (0, 1), (2,), shards=(1,), way=way) for name, way in WAYS.items()},
}
COLUMNS, ROWS = ("query", "key", "value", "up", "hidden.0"), ("layers.attention.out", "down", "hidden.1")

_options = cache(lambda model, sizes: graph_strategies(plans.graph_of(model), sizes))


@cache
def profile_of(model: str) -> Profile:
    return make_profile(plans.graph_of(model), "cpu", "fp32", torch.optim.AdamW, SILENT)[0]


def cluster(sizes: tuple[int, ...]) -> Cluster:
    return replace(preset(), axes=mesh(*sizes))


def plan_named(model: str, name: str, regions: tuple[Region, ...] = ()) -> Plan:
    named, graph = NAMED[name], plans.graph_of(model)
    read = {v.origin: _read(named, v.origin) for v in graph.of_role(Role.PARAMETER)}
    inputs = {v.name: Layout(_states(named, S(0), R)) for v in graph.of_role(Role.INPUT)}
    picked = follow(graph, _options(model, named.sizes), read, inputs)
    stored = {v.origin: _stored(named, v.type.shape, read[v.origin]) for v in graph.of_role(Role.PARAMETER)}
    sharding = plans.sharding_of(graph, picked, stored, inputs, named.sizes)
    links = tuple(Region(i, i, False, ()) for i in range(len(graph.chain)))
    return mesh_plans.plan_of(graph, sharding, regions or links, named.sizes)


def _states(named: Named, on_data: State, on_tensor: State) -> tuple[State, ...]:
    return tuple(on_data if axis in named.data else on_tensor for axis in range(len(named.sizes)))


def _read(named: Named, origin: str) -> Layout:
    """As Megatron splits weights on the axes of tensor parallelism; whole, with a gradient to be summed, elsewhere."""
    module, _, kind = origin.rpartition(".")
    plain = ".".join(part for part in module.split(".") if not part.isdigit() or "hidden" in module)
    if plain.endswith(COLUMNS):
        return Layout(_states(named, B, S(0)))
    return Layout(_states(named, B, S(1) if plain.endswith(ROWS) and kind == "weight" else R))


def _stored(named: Named, shape: tuple[int, ...], read: Layout) -> Stored:
    """As its ops read it, with shards on the axes that are left where the shape divides."""
    choices = storage_choices(shape, {read}, named.sizes, shards=True)
    own = [axis for axis, state in enumerate(read.states) if state.kind == "S"]
    plain = next(c for c in choices if c.way is Way.as_it_lies and _split(c.layout) == set(own))
    own_places, wanted = plain.layout.places(named.sizes).items(), {*own, *named.shards}
    return next(
        (
            choice
            for choice in choices
            if choice.way is named.way
            and _split(choice.state) == wanted
            and own_places <= choice.state.places(named.sizes).items()
        ),
        plain,
    )


def _split(layout: Layout) -> set[int]:
    return {axis for axis, state in enumerate(layout.states) if state.kind == "S"}


def follow(
    graph: OpGraph, options: dict[str, tuple[Strategy, ...]], read: dict[str, Layout], inputs: dict[str, Layout]
) -> dict[str, Strategy]:
    """Each op in the strategy that takes most of its inputs as they come, on most axes."""
    axes = len(next(iter(read.values())).states)
    comes = {**inputs, **{v.name: Layout((R,) * axes) for v in graph.of_role(Role.BUFFER)}}
    comes |= {v.name: read[v.origin] for v in graph.of_role(Role.PARAMETER)}
    picked = {}
    for op in graph.ops:
        fits = [_alike([comes[name] for name in op.inputs], s.inputs) for s in options[op.name]]
        picked[op.name] = options[op.name][fits.index(max(fits))]
        comes |= dict(zip(op.outputs, picked[op.name].outputs, strict=True))
    return picked


def _alike(have: list[Layout], want: tuple[Layout, ...]) -> int:
    return sum(a == b for h, w in zip(have, want, strict=True) for a, b in zip(h.states, w.states, strict=True))
