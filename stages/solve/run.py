"""Solve: sharding plans along the time/memory frontier, each with the solver's proof."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config import Config
from pipeline.cost.unsplit import card_of, step_seconds
from pipeline.errors import SolveError
from pipeline.ir.cluster import Cluster, Mesh
from pipeline.ir.plan import Frontier, FrontierPoint
from pipeline.ir.profile import as_run
from pipeline.log import progress
from pipeline.ops.discover import remember_in
from pipeline.stage import Inputs, Result
from stages.solve.meshes import meshes_of
from stages.solve.on_mesh import OnMesh, best_rows, most_promising
from stages.solve.optimizer import optimizer_copies


def run(inputs: Inputs, config: Config) -> Result:
    profile, cluster, settings = inputs["profile"], inputs["cluster"], config.solve
    graph = as_run(inputs["graph"], profile.types)
    where = f"conf/solve/{config.choices['solve']}.yaml"
    copies = optimizer_copies(config.train.optimizer, f"conf/train/{config.choices['train']}.yaml: optimizer")
    micro_batches = config.train.micro_batches
    budget = budget_bytes(settings.memory_budget_gb, cluster, where)
    remember_in(inputs.root / "runs" / "ops")
    tried = [
        OnMesh(graph, profile, cluster.on(mesh), copies, settings, where, inputs.log, micro_batches)
        for mesh in meshes_of(cluster, settings, where)
    ]
    kept = most_promising(tried, budget, settings.frontier_meshes)
    found: list[FrontierPoint] = []
    with progress(inputs.log, "frontier", len(kept) * settings.frontier_points) as advance:
        for number, mesh in enumerate(kept):
            before = number * settings.frontier_points
            points = mesh.points(budget, lambda done, note="", before=before: advance(before + done, note))
            found += [replace(point, mesh=number) for point in points]
    meshes = tuple(Mesh(mesh.cluster.axes) for mesh in kept)
    frontier = Frontier(budget, copies, meshes, _unbeaten(found), best_rows(kept), micro_batches)
    inputs.log.info(_table(frontier))
    _refuse_if_too_large(frontier, where)
    figures = _figures(frontier, config, kept)
    figures["meshes"] = len(tried)
    if cluster.device == "cuda" and profile.kernels:
        unsplit = step_seconds(graph, profile.kernels, card_of(cluster.compute))
        seconds = micro_batches * (unsplit.forward + unsplit.backward) + unsplit.optimizer
        figures["unsplit_step_ms"] = round(seconds * 1e3, 4)
    return Result(frontier, figures)


def _figures(frontier: Frontier, config: Config, kept: list[OnMesh]) -> dict[str, float | int | str]:
    points, best, problem = frontier.points, frontier.points[0], kept[frontier.points[0].mesh].problem
    seconds = {"build": sum(mesh.build_seconds for mesh in kept)}
    for mesh in kept:
        for phase, spent in mesh.sweep.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    return {
        "points": len(points),
        "fastest_step_ms": round(best.seconds * 1e3, 4),
        "fastest_peak_mb": round(best.peak_bytes / 1e6, 3),
        "smallest_peak_mb": round(min(p.peak_bytes for p in points) / 1e6, 3),
        "budget_mb": round(frontier.budget_bytes / 1e6, 3),
        "mesh": _shown(frontier.meshes[best.mesh]),
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


def _shown(mesh: Mesh) -> str:
    return " x ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)


def _table(frontier: Frontier) -> str:
    best = frontier.points[0]
    shown = [("fastest plan", best.seconds, best.peak_bytes, best.mesh)]
    shown += [(row.name, row.seconds, row.peak_bytes, row.mesh) for row in frontier.baselines]
    lines = [
        f"  {name:20}{seconds * 1e3:12.3f} ms{held / 1e6:12.3f} MB  on {_shown(frontier.meshes[mesh])}"
        for name, seconds, held, mesh in shown
    ]
    return "\n".join(["without recompute:", *lines])


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


def _refuse_if_too_large(frontier: Frontier, where: str) -> None:
    """Not even with every activation recomputed can a plan be smaller than what stays resident."""
    least = min(frontier.points, key=lambda point: point.resident_bytes)
    if least.resident_bytes > frontier.budget_bytes:
        raise SolveError(
            f"no plan fits {frontier.budget_bytes / 1e9:.4g} GB: parameters, gradients and optimizer state alone need "
            f"{least.resident_bytes / 1e9:.4g} GB on each device",
            where=f"{where}: memory_budget_gb",
            remedy="raise the budget above that, use more devices, or an optimizer that keeps less",
        )
