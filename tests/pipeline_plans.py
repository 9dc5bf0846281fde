"""Frontiers with plans for the submeshes of pipelines, and the plans that the checkpoint stage makes of them."""

from __future__ import annotations

from dataclasses import replace

from shardwright.pipeline.config import Checkpoint, Pipeline, Recompute
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import Cluster, Mesh
from shardwright.pipeline.ir.plan import Frontier, FrontierPoint, Plan
from shardwright.pipeline.ir.profile import Compiled
from shardwright.stages.checkpoint.choose import choose
from shardwright.stages.checkpoint.pipelines.pipelined import Pipelines, find_pipelines
from shardwright.stages.checkpoint.unpipelined import find_alone
from shardwright.stages.solve.on_mesh import MeshProblem
from tests.graphs import GRAPHS, SILENT, preset, profile_of, solve_settings
from tests.made import made_once

FILE = "conf/checkpoint/test.yaml"
WHERE = "conf/solve/test.yaml: memory_budget_gb"


@made_once
def with_submeshes(name: str, devices: int = 4, micro_batches: int = 4) -> tuple[Cluster, Frontier]:
    """Two plans on all devices and on submeshes of each smaller number."""
    cluster = preset(devices)
    meshes = [Mesh(cluster.axes), *(split.meshes[size][0] for split in cluster.splits for size in split.meshes)]
    found = [_points(name, cluster, mesh, number, micro_batches) for number, mesh in enumerate(meshes)]
    submeshes = tuple(point for points in found[1:] for point in points)
    return cluster, Frontier(
        cluster.memory_bytes, 2.0, tuple(meshes), tuple(found[0]), (), submeshes, micro_batches=micro_batches
    )


def _points(name: str, cluster: Cluster, mesh: Mesh, number: int, micro_batches: int) -> list[FrontierPoint]:
    settings = solve_settings(frontier_points=2)
    workload = Workload(GRAPHS[name](), profile_of(name), cluster.part(mesh), 2.0, micro_batches)
    points = MeshProblem(workload, settings, "conf/solve/test.yaml", SILENT).points(1e12, lambda done, note="": None)
    return [replace(point, mesh=number) for point in points]


def settings_of(pipeline: str = "solve", recompute: str = "optimal", **more: object) -> Checkpoint:
    return Checkpoint(recompute=Recompute(recompute), pipeline=Pipeline(pipeline), **more)  # type: ignore[arg-type]


def pipelines_of(
    name: str,
    budget: int | None = None,
    devices: int = 4,
    passes: int = 4,
    compiled: Compiled | None = None,
    **asked: object,
) -> Pipelines:
    cluster, frontier = with_submeshes(name, devices, passes)
    frontier = replace(frontier, budget_bytes=budget or frontier.budget_bytes)
    profile = replace(profile_of(name), compiled=compiled)
    return find_pipelines(GRAPHS[name](), profile, cluster, frontier, settings_of(**asked), FILE)  # type: ignore[arg-type]


def plan_with_pipelines(
    name: str,
    budget: int | None = None,
    devices: int = 4,
    passes: int = 4,
    compiled: Compiled | None = None,
    **asked: object,
) -> Plan:
    """What the stage would choose."""
    cluster, frontier = with_submeshes(name, devices, passes)
    frontier = replace(frontier, budget_bytes=budget or frontier.budget_bytes)
    settings, graph = settings_of(**asked), GRAPHS[name]()  # type: ignore[arg-type]
    profile = replace(profile_of(name), compiled=compiled)
    candidates = find_alone(graph, profile, cluster, frontier, settings, FILE)
    pipelines = pipelines_of(name, budget, devices, passes, compiled, **asked)
    return choose(candidates, cluster, frontier, WHERE, graph, pipelines)
