"""The plans of a frontier beside those that people know by name, as text: runs/solve/plans.md."""

from __future__ import annotations

from shardwright.pipeline.ir.plan import Baseline, Frontier, FrontierPoint

_HEAD = """\
# Plans

Predicted, without recompute; memory on one device. The gap is to the proven bound for plans of that memory.

| plan | mesh | step ms | peak MB | resident MB | gap | proven by |
|---|---|---:|---:|---:|---:|---|
"""


def beside(frontier: Frontier) -> str:
    """The fastest plan and those with names, for the log."""
    best = (frontier.points or frontier.submesh_points)[0]
    rows = [("fastest plan", best.seconds, best.peak_bytes, best.mesh)]
    rows += [(row.name, row.seconds, row.peak_bytes, row.mesh) for row in frontier.baselines]
    lines = [
        f"  {name:20}{seconds * 1e3:12.3f} ms{held / 1e6:12.3f} MB  on {frontier.meshes[mesh].label}"
        for name, seconds, held, mesh in rows
    ]
    return "\n".join(["without recompute:", *lines])


def table(frontier: Frontier) -> str:
    """Markdown: the frontier, then the plans with names, then those for the submeshes of pipelines."""
    rows: list[tuple[str, FrontierPoint | Baseline, str, str, str]]
    rows = [(f"frontier {n}", point, *_proven(point)) for n, point in enumerate(frontier.points)]
    rows += [(row.name, row, "", "", "") for row in frontier.baselines]
    rows += [("submesh", point, *_proven(point)) for point in frontier.submesh_points]
    lines = (
        (name, frontier.meshes[plan.mesh].label, f"{plan.seconds * 1e3:.3f}", f"{plan.peak_bytes / 1e6:.3f}", *more)
        for name, plan, *more in rows
    )
    return _HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _proven(point: FrontierPoint) -> tuple[str, str, str]:
    return f"{point.resident_bytes / 1e6:.3f}", f"{point.proof.gap:.3%}", point.proof.method
