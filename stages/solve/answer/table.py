"""The plans of a frontier beside those that people know by name, as text: runs/solve/plans.md."""

from __future__ import annotations

from pipeline.ir.plan import Frontier, FrontierPoint

_HEAD = """\
# Plans

Predicted, without recompute; memory on one device. The gap is to the proven bound for plans of that memory.

| plan | mesh | step ms | peak MB | resident MB | gap | proven by |
|---|---|---:|---:|---:|---:|---|
"""


def beside(frontier: Frontier) -> str:
    """The fastest plan and those with names, for the log."""
    best = (frontier.points or frontier.pieces)[0]
    rows = [("fastest plan", best.seconds, best.peak_bytes, best.mesh)]
    rows += [(row.name, row.seconds, row.peak_bytes, row.mesh) for row in frontier.baselines]
    lines = [
        f"  {name:20}{seconds * 1e3:12.3f} ms{held / 1e6:12.3f} MB  on {frontier.meshes[mesh].label}"
        for name, seconds, held, mesh in rows
    ]
    return "\n".join(["without recompute:", *lines])


def table(frontier: Frontier) -> str:
    """Markdown: the frontier, then the plans with names, then those for the pieces of pipelines."""
    rows = [_point(f"frontier {n}", point, frontier) for n, point in enumerate(frontier.points)]
    rows += [
        (row.name, frontier.meshes[row.mesh].label, _ms(row.seconds), _mb(row.peak_bytes), "", "", "")
        for row in frontier.baselines
    ]
    rows += [_point("piece", point, frontier) for point in frontier.pieces]
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _point(name: str, point: FrontierPoint, frontier: Frontier) -> tuple[str, ...]:
    mesh, proof = frontier.meshes[point.mesh].label, point.proof
    figures = (_ms(point.seconds), _mb(point.peak_bytes), _mb(point.resident_bytes))
    return (name, mesh, *figures, f"{proof.gap:.3%}", proof.method)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3f}"
