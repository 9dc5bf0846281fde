"""Solve: sharding plans along the time/memory frontier, each with the solver's proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.base.log import Log, progress
from shardwright.pipeline.base.stage import Inputs, Result
from shardwright.pipeline.config import Config, PlanUse, Solve
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.cost.unsplit import card_of, step_seconds
from shardwright.pipeline.cost.whole_ops import LACK, figures_of, in_words, whole_ops
from shardwright.pipeline.ir.cluster import Cluster, Mesh
from shardwright.pipeline.ir.plan import Frontier, FrontierPoint
from shardwright.pipeline.ir.profile import as_run
from shardwright.pipeline.ops.discovery.remembered import remember_in
from shardwright.stages.solve.answer.refusal import refusal, refusal_of_saved
from shardwright.stages.solve.answer.saved import mesh_for, read_saved
from shardwright.stages.solve.answer.table import beside, table
from shardwright.stages.solve.on_mesh import MeshProblem, best_rows, most_promising
from shardwright.stages.solve.problem.meshes import asks_for_pipeline, meshes_of, submeshes_of

PAGE = "runs/solve/plans.md"

Make = Callable[[Mesh], MeshProblem]


def run(inputs: Inputs, config: Config, compared: bool = True) -> Result:
    """`compared`: with the plans that people know by name beside ours, of which no plan depends."""
    profile, cluster, settings = inputs["profile"], inputs["cluster"], config.solve
    graph = as_run(inputs["graph"], profile.types)
    where = f"conf/solve/{config.choices['solve']}.yaml"
    copies, micro_batches = profile.optimizer_copies, config.train.gradient_accumulation
    budget = budget_bytes(settings.memory_budget_gb, cluster, where)
    memory = float(budget * cluster.devices)
    remember_in(inputs.root / "runs" / "ops")

    def on(mesh: Mesh) -> MeshProblem:
        load = Workload(graph, profile, cluster.part(mesh), copies, micro_batches)
        return MeshProblem(load, settings, where, inputs.log)

    saved = read_saved(settings.plan, inputs.root, graph)
    as_is = bool(saved) and settings.plan_use is PlanUse.as_is
    known = meshes_of(cluster, settings, where)
    homes = [mesh_for(plan, known, cluster, settings) for plan in saved]
    tried = _possible(on, homes if as_is else [*known, *homes], homes, inputs.log)
    for plan, home in zip(saved, homes, strict=True):
        next(mesh for mesh in tried if mesh.cluster.axes == home.axes).start_from(plan)
    kept = tried if as_is else most_promising(tried, budget, settings.frontier_meshes)
    found = _judged(kept, budget) if as_is else _searched(kept, memory, settings, inputs.log)
    alone = not asks_for_pipeline(settings)
    if alone and all(point.resident_bytes > budget for point in found):
        found.append(_small_enough(found, tried, kept, budget))
    submeshes: list[MeshProblem] = []
    for size, meshes in ({} if as_is else submeshes_of(cluster, settings, where)).items():
        if alone:
            submeshes += most_promising(_with_plans(on, meshes, inputs.log), memory / size, settings.submeshes)
        else:
            submeshes += _possible(on, meshes, meshes, inputs.log)
    parts = _searched(submeshes, memory, settings, inputs.log)
    planned = [*kept, *submeshes]
    frontier = Frontier(
        budget,
        copies,
        tuple(Mesh(mesh.cluster.axes) for mesh in planned),
        _unbeaten(found),
        best_rows(kept) if compared else (),
        tuple(replace(point, mesh=len(kept) + point.mesh) for point in parts),
        micro_batches,
        cluster.correction,
    )
    inputs.log.info(beside(frontier))
    figures = _figures(frontier, config, planned, [*tried, *submeshes])
    best = (frontier.points or frontier.submesh_points)[0]
    whole = whole_ops(planned[best.mesh].workload.priced(best.sharding), best.seconds)
    if whole:  # what no setting makes faster, and the user's own rule does
        inputs.log.warning("%s: %s; a rule splits it (`shardwright docs how-to-add-an-op`)", LACK, in_words(whole))
    figures |= figures_of(whole) | {"meshes": len(tried), "submesh_plans": len(frontier.submesh_points)}
    if cluster.device == "cuda" and profile.kernels:
        unsplit = step_seconds(graph, profile.kernels, card_of(cluster.compute))
        seconds = micro_batches * (unsplit.forward + unsplit.backward) + unsplit.optimizer
        figures["unsplit_step_ms"] = round(seconds * 1e3, 4)
    page = inputs.root / PAGE
    write_atomic(page, table(frontier).encode())
    return Result(frontier, figures, (page,))


def _possible(on: Make, meshes: Sequence[Mesh], needed: Sequence[Mesh], log: Log) -> list[MeshProblem]:
    """The meshes that the user's constraints allow, each once: these may speak of axes that not every candidate has.

    What is said against all of them, or against one that is needed, is said to the user.
    """
    found: list[MeshProblem] = []
    refusals: list[SolveError] = []
    for number, mesh in enumerate(meshes):
        if mesh in meshes[:number]:
            continue
        try:
            found.append(on(mesh))
        except SolveError as refused:
            if mesh in needed:
                raise
            refusals.append(refused)
            log.debug("no plans on %s: %s", mesh.label, refused)
    if not found and refusals:
        raise refusals[0]
    return found


def _with_plans(on: Make, meshes: Sequence[Mesh], log: Log) -> list[MeshProblem]:
    """The submeshes on which the constraints leave a plan; a pipeline can do without."""
    with suppress(SolveError):
        return [own for own in _possible(on, meshes, (), log) if math.isfinite(own.promise(math.inf))]
    return []


def _judged(kept: list[MeshProblem], budget: int) -> list[FrontierPoint]:
    """The saved plans and no others, each with its distance from the best."""
    found = [replace(point, mesh=n) for n, mesh in enumerate(kept) for point in mesh.judged_points(budget)]
    least = min(found, key=lambda point: point.resident_bytes)
    if least.resident_bytes > budget:
        raise refusal_of_saved(kept[least.mesh], least, budget)
    return found


def _searched(kept: list[MeshProblem], memory: float, settings: Solve, log: Log) -> list[FrontierPoint]:
    """The frontier of every mesh, and the plans that the search was given. `memory` is that of all devices together.

    A submesh of a pipeline has its part of the model, so its devices may hold as much more as they are fewer.
    """
    found: list[FrontierPoint] = []
    with progress(log, "frontier", len(kept) * settings.frontier_points) as advance:
        for number, mesh in enumerate(kept):
            mesh.settle(log)
            before = number * settings.frontier_points
            points = mesh.points(
                memory / mesh.cluster.devices, lambda done, note="", before=before: advance(before + done, note)
            )
            found += [replace(point, mesh=number) for point in (*points, *mesh.given_points())]
    return found


def _figures(
    frontier: Frontier, config: Config, planned: list[MeshProblem], every: list[MeshProblem]
) -> dict[str, float | int | str]:
    """Sizes are those of the fastest plan's problem, seconds those of every mesh that was looked at.

    Where a pipeline is asked for, plans are those of its submeshes.
    """
    points = frontier.points or frontier.submesh_points
    best, problem = points[0], planned[points[0].mesh].problem
    seconds = {"build": sum(mesh.build_seconds for mesh in every)}
    for mesh in every:
        for phase, spent in mesh.sweep.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    return {
        "points": len(points),
        "fastest_step_ms": round(best.seconds * 1e3, 4),
        "fastest_peak_mb": round(best.peak_bytes / 1e6, 3),
        "smallest_peak_mb": round(min(p.peak_bytes for p in points) / 1e6, 3),
        "budget_mb": round(frontier.budget_bytes / 1e6, 3),
        "mesh": frontier.meshes[best.mesh].label,
        "nodes": len(problem.nodes),
        "choices": sum(len(node.costs) for node in problem.nodes),
        "variables": max(p.proof.variables for p in points),
        "constraints": max(p.proof.constraints for p in points),
        "worst_gap": max(p.proof.gap for p in points),
        "backend": config.solve.backend.value,
        **{f"{phase}_s": round(spent, 3) for phase, spent in seconds.items()},
    }


def _unbeaten(points: list[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Fastest first; what another plan beats in time, in memory at the peak and in what stays resident is left out."""
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.peak_bytes)):
        if not any(p.peak_bytes <= point.peak_bytes and p.resident_bytes <= point.resident_bytes for p in kept):
            kept.append(point)
    return tuple(kept)


def budget_bytes(gigabytes: float | None, cluster: Cluster, where: str) -> int:
    """The user's budget, which the device must have."""
    if gigabytes is None:
        return cluster.memory_bytes
    if gigabytes * 1e9 > cluster.memory_bytes:
        raise SolveError(
            f"memory_budget_gb is {gigabytes:g}, a device has {cluster.memory_bytes / 1e9:.3g} GB",
            where=where,
            remedy="lower the budget, or set null to use what the device has",
        )
    return round(gigabytes * 1e9)


def _small_enough(
    found: list[FrontierPoint], tried: list[MeshProblem], kept: list[MeshProblem], budget: int
) -> FrontierPoint:
    """The plan that keeps least for good, on whatever mesh, where the search was after other plans; or a refusal.

    Not even with every activation recomputed can a plan be smaller than what stays resident.
    """
    points = [(point, mesh) for mesh in tried if (point := mesh.least_point())]
    points += [(point, kept[point.mesh]) for point in found]
    least, mesh = min(points, key=lambda pair: (pair[0].resident_bytes, pair[0].seconds))
    if least.resident_bytes > budget:
        raise refusal(mesh, least, min(point.peak_bytes for point, _ in points), budget)
    if mesh not in kept:
        kept.append(mesh)
    return replace(least, mesh=kept.index(mesh))
