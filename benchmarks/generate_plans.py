"""The plan of a deep model from that of a shallow one: each further layer is stored and computed as the last one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.ir.cluster import Cluster, Mesh
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.plan import Region, Sharding
from shardwright.pipeline.ir.verify import verify_sharding
from shardwright.pipeline.ops.uneven import uneven_in
from shardwright.pipeline.sharding.lowering import with_paths
from tests.unpipelined import whole_plan

LAYER = re.compile(r"(?<=\blayers\.)\d+")


def save_deep_plan(shallow: Path, deep: Path, layers: int) -> None:
    """Writes plan.json of the project `deep` from that of `shallow`, which has this many layers."""
    graph, plan = artifacts.load("graph", deep), artifacts.load("plan", shallow).body
    cluster: Cluster = artifacts.load("cluster", shallow).body
    sharding = deepened(plan.sharding, artifacts.load("graph", shallow).body, graph.body, layers - 1)
    mesh = next(mesh for mesh in cluster.mesh_candidates() if mesh.sizes == plan.sizes)
    named = Mesh(tuple(replace(axis, name=name) for axis, (name, _) in zip(mesh.axes, plan.axes, strict=True)))
    sharding = with_paths(graph.body, sharding, cluster.part(named))
    verify_sharding(graph.body, sharding, plan.sizes, uneven_in(graph.body).spots)
    regions = in_pairs(len(graph.body.chain))
    body = whole_plan(plan.axes, plan.device, plan.budget_bytes, sharding, regions, plan.prediction)
    artifacts.save(artifacts.make("plan", body, [graph], {}), deep)


def deepened(known: Sharding, shallow: OpGraph, deep: OpGraph, last: int) -> Sharding:
    """`last` is the number of the last layer of the shallow model."""
    same = {place: name for name, place in _places(shallow, last).items()}
    strategies = {name: known.strategies[same[place]] for name, place in _places(deep, last).items()}
    origins = {value.origin: _capped(value.origin, last) for value in deep.of_role(Role.PARAMETER)}
    return Sharding(
        strategies,
        {origin: known.storage[own] for origin, own in origins.items()},
        known.inputs,
        state={origin: known.state[own] for origin, own in origins.items() if own in known.state},
        regathered=tuple(origin for origin, own in origins.items() if own in known.regathered),
    )


def _places(graph: OpGraph, last: int) -> dict[str, tuple[str, int, str]]:
    """Op -> its layer, its number among the layer's ops, and what it does."""
    counts: dict[str, int] = {}
    found = {}
    for op in graph.ops:
        layer = LAYER.search(op.module)
        own = layer[0] if layer else ""
        counts[own] = counts.get(own, -1) + 1
        found[op.name] = (str(min(int(own), last)) if own else "", counts[own], op.target)
    return found


def _capped(name: str, last: int) -> str:
    return LAYER.sub(lambda layer: str(min(int(layer[0]), last)), name, count=1)


def in_pairs(links: int) -> tuple[Region, ...]:
    """Two links and two links are recomputed together; the last ones are not."""
    single = [Region(i, i, False, ()) for i in range(links)]
    pairs = [Region(i, i + 1, True, (single[i], single[i + 1])) for i in range(0, links - 2, 2)]
    return (*pairs, *single[2 * len(pairs) :])
