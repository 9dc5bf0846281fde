"""What `dvc plots` draws of a plan: its memory over the step, and the plan among all that were looked at."""

from __future__ import annotations

from shardwright.pipeline.base.stage import Rows
from shardwright.pipeline.ir.plan import Frontier, Plan

KINDS = ("plan", "frontier", "baseline", "alternative")


def memory_curve(plan: Plan) -> Rows:
    """What a device holds when each event of the step begins; of a pipeline only the peak is known."""
    held = [(event.start, event.held_bytes) for event in plan.timeline.events if event.held_bytes is not None]
    peak = plan.prediction.peak_bytes
    points = held or [(0.0, peak), (plan.prediction.step_seconds, peak)]
    return [{"ms": start * 1e3, "held_mb": nbytes / 1e6} for start, nbytes in points]


def plan_points(plan: Plan, frontier: Frontier) -> Rows:
    """Seconds of a step over the peak; each kind has a column, as DVC tells columns apart."""
    predicted = plan.prediction
    points = [("plan", predicted.step_seconds, predicted.peak_bytes)]
    points += [("frontier", point.seconds, point.peak_bytes) for point in frontier.points]
    points += [("baseline", base.seconds, base.peak_bytes) for base in frontier.baselines]
    points += [("alternative", one.seconds, one.peak_bytes) for one in plan.alternatives if one.seconds is not None]
    return [
        {"peak_mb": peak / 1e6, **{each: seconds * 1e3 if each == kind else None for each in KINDS}}
        for kind, seconds, peak in points
    ]
