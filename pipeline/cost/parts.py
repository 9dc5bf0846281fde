"""The partitions of a plan with their prices, each on the mesh that it was planned for."""

from __future__ import annotations

from shardwright.pipeline.cost.op_prices import OpPrices
from shardwright.pipeline.cost.step import Priced
from shardwright.pipeline.ir.cluster import Cluster, Mesh
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Frontier, Partition, Plan
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.sharding.partitions import sharded_parts


def priced_parts(
    plan: Plan, graph: OpGraph, profile: Profile, cluster: Cluster, frontier: Frontier
) -> tuple[Priced | None, ...]:
    """Of a graph and a profile of one micro-batch; None where neither frontier nor cluster has such a mesh."""
    meshes = (mesh_of(partition, cluster, frontier) for partition in plan.partitions)
    return tuple(
        None if mesh is None else Priced(own, OpPrices(graph, profile, cluster.part(mesh)), frontier.optimizer_copies)
        for mesh, own in zip(meshes, sharded_parts(plan, graph), strict=True)
    )


def mesh_of(partition: Partition, cluster: Cluster, frontier: Frontier) -> Mesh | None:
    """That of the frontier's plan which it is, or one with the same axes."""
    for point in (*frontier.points, *frontier.submesh_points):
        if point.sharding == partition.sharding:
            return frontier.meshes[point.mesh]
    of_splits = (mesh for split in cluster.splits for meshes in split.meshes.values() for mesh in meshes)
    known = (*frontier.meshes, *cluster.mesh_candidates(), *of_splits)
    return next((m for m in known if tuple((axis.name, axis.size) for axis in m.axes) == partition.axes), None)
