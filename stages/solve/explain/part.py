"""The plan with all that prices it: its partitions, each with graph, mesh and sharding of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.base.artifacts import Artifact
from pipeline.base.errors import ShardwrightError
from pipeline.cost.step import Priced
from pipeline.ir.cluster import Cluster, Mesh
from pipeline.ir.graph import OpGraph
from pipeline.ir.plan import Frontier, Partition, Plan, Sharding
from pipeline.ir.profile import Profile, as_run
from pipeline.sharding.partitions import sharded_parts
from pipeline.sharding.slices import sliced
from stages.solve.explain.items import Item, items_of

KINDS = ("graph", "profile", "cluster", "frontier", "plan")


class ExplainError(ShardwrightError):
    """Something that cannot be explained: a name that is not known, a run that is not whole."""


@dataclass(frozen=True)
class Part:
    """A partition; the whole model where there is no pipeline."""

    number: int
    priced: Priced

    @property
    def graph(self) -> OpGraph:
        return self.priced.graph

    @property
    def cluster(self) -> Cluster:
        """On its mesh."""
        return self.priced.cluster

    @property
    def sharding(self) -> Sharding:
        return self.priced.sharding

    def items(self) -> tuple[Item, ...]:
        return items_of(self.priced)


@dataclass(frozen=True)
class Planned:
    graph: OpGraph
    profile: Profile
    cluster: Cluster
    frontier: Frontier
    plan: Plan
    parts: tuple[Part, ...]
    config: dict[str, str]  # group or key of the configuration -> digest

    def busiest(self) -> Part:
        """The partition whose devices have most to do in a step: those that the step waits for."""
        if len(self.parts) == 1:
            return self.parts[0]
        return max(self.parts, key=lambda part: part.priced.step.seconds)


def planned(found: Mapping[str, Artifact]) -> Planned:
    """Of artifacts that belong together."""
    profile, cluster, frontier, plan = (found[kind].body for kind in KINDS[1:])
    graph = as_run(found["graph"].body, profile.types)
    copies = frontier.optimizer_copies
    config = dict(found["plan"].config)
    cut, costs = sliced(graph, profile, plan.slices)
    parts = tuple(
        Part(number, Priced(own, costs, cluster.part(mesh_of(one, frontier, cluster)), copies))
        for number, (one, own) in enumerate(zip(plan.partitions, sharded_parts(plan, cut), strict=True))
    )
    if plan.pipelined:
        return Planned(graph, profile, cluster, frontier, plan, parts, config)
    return Planned(cut, costs, cluster, replace(frontier, micro_batches=plan.micro_batches), plan, parts, config)


def mesh_of(partition: Partition, frontier: Frontier, cluster: Cluster) -> Mesh:
    """The mesh of the frontier's plan that it is, or one with the same axes."""
    for point in (*frontier.points, *frontier.pieces):
        if point.sharding == partition.sharding:
            return frontier.meshes[point.mesh]
    for mesh in (*frontier.meshes, *cluster.mesh_candidates()):
        if tuple((axis.name, axis.size) for axis in mesh.axes) == partition.axes:
            return mesh
    axes = " x ".join(f"{name}={size}" for name, size in partition.axes)
    raise ExplainError(f"the frontier has no mesh {axes}", where="runs/solve", remedy="run `dvc repro checkpoint`")
