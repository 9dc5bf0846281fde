"""Solve: sharding plans along the time/memory frontier, each with the solver's proof."""

from __future__ import annotations

import time
from dataclasses import replace

from pipeline.config import Config
from pipeline.cost.step import price_step
from pipeline.cost.unsplit import card_of, step_seconds
from pipeline.errors import SolveError
from pipeline.ir.cluster import Cluster
from pipeline.ir.graph import OpGraph
from pipeline.ir.plan import Baseline, Frontier, FrontierPoint, Sharding
from pipeline.ir.profile import Profile, as_run
from pipeline.log import progress
from pipeline.lowering import lower, with_paths
from pipeline.ops.discover import remember_in
from pipeline.stage import Inputs, Result
from stages.solve.baselines import baselines
from stages.solve.constraints import Hand
from stages.solve.exact import as_it_is, restrict
from stages.solve.frontier import Solution, Sweep
from stages.solve.optimizer import optimizer_copies
from stages.solve.problem import Given, build, to_sharding


def run(inputs: Inputs, config: Config) -> Result:
    profile, cluster = inputs["profile"], inputs["cluster"]
    graph = as_run(inputs["graph"], profile.types)
    where = f"conf/solve/{config.choices['solve']}.yaml"
    copies = optimizer_copies(config.train.optimizer, f"conf/train/{config.choices['train']}.yaml: optimizer")
    budget = budget_bytes(config.solve.memory_budget_gb, cluster, where)
    remember_in(inputs.root / "runs" / "ops")
    start = time.monotonic()
    problem, choices = build(graph, profile, Given(cluster.axes, cluster.compute, copies))
    hand = Hand(graph, tuple(axis.name for axis in cluster.axes), config.solve, where)
    left = restrict(problem, hand.kept(choices)) if hand.asks else as_it_is(problem)
    built = time.monotonic()
    sweep = Sweep(left.problem, config.solve, where, inputs.log)
    with progress(inputs.log, "frontier", config.solve.frontier_points) as advance:
        found = sweep.frontier(budget, advance)
    solutions = [replace(solution, picked=left.expand(solution.picked)) for solution in found]
    rows = baselines(graph, choices, problem)
    inputs.log.info(_table(solutions[0], rows))
    points = [_point(graph, profile, cluster, copies, to_sharding(graph, choices, s.picked), s) for s in solutions]
    frontier = Frontier(budget, copies, tuple(points), rows)
    _refuse_if_too_large(frontier, where)
    best = points[0]
    figures: dict[str, float | int | str] = {
        "points": len(points),
        "fastest_step_ms": round(best.seconds * 1e3, 4),
        "fastest_peak_mb": round(best.peak_bytes / 1e6, 3),
        "smallest_peak_mb": round(min(p.peak_bytes for p in points) / 1e6, 3),
        "budget_mb": round(budget / 1e6, 3),
        "nodes": len(problem.nodes),
        "choices": sum(len(node.costs) for node in problem.nodes),
        "variables": max(p.proof.variables for p in points),
        "constraints": max(p.proof.constraints for p in points),
        "worst_gap": max(p.proof.gap for p in points),
        "backend": config.solve.backend.value,
        "build_s": round(built - start, 3),
        **{f"{phase}_s": round(seconds, 3) for phase, seconds in sweep.seconds.items()},
    }
    if cluster.device == "cuda" and profile.kernels:
        unsplit = step_seconds(graph, profile.kernels, card_of(cluster.compute))
        figures["unsplit_step_ms"] = round(unsplit.step * 1e3, 4)
    return Result(frontier, figures)


def _table(fastest: Solution, rows: tuple[Baseline, ...]) -> str:
    shown = [("fastest plan", fastest.cost, fastest.peak), *((b.name, b.seconds, b.peak_bytes) for b in rows)]
    lines = [f"  {name:20}{seconds * 1e3:12.3f} ms{held / 1e6:12.3f} MB" for name, seconds, held in shown]
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


def _point(
    graph: OpGraph, profile: Profile, cluster: Cluster, copies: float, sharding: Sharding, solution: Solution
) -> FrontierPoint:
    sharding = with_paths(graph, sharding, cluster)
    program = lower(graph, sharding)
    price = price_step(graph, profile, cluster, sharding, program, copies)
    peak = price.fixed_bytes + sum(link.memory.kept for link in price.links)
    return FrontierPoint(sharding, price.seconds, price.resident_bytes, peak, solution.proof)


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
