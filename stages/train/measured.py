"""The report: what was measured beside what was predicted, with the ratio of the two."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import astuple, replace
from datetime import UTC, datetime
from typing import Any

from shardwright.pipeline.base.stage import Rows
from shardwright.pipeline.ir.plan import Plan, Prediction
from shardwright.pipeline.ir.report import Breakdown, Compared, Evaluation, Report

WARM_UP = 3  # steps that are left out of the median: allocators and caches fill up
MOST_DRAWN = 2000  # steps: a page of several runs must not become large


def compare(
    prediction: Prediction,
    median_seconds: float,
    samples: int,
    peaks: Sequence[tuple[int, int]],
    breakdown: Breakdown | None,
    on_gpu: bool = False,
) -> tuple[Compared, ...]:
    """The parts of the step are those of the profiled one, brought to the median step: together they are that.

    `peaks` are bytes of each rank, measured and predicted.
    """
    predicted = prediction.step_seconds
    rows = [
        _compared("step_ms", median_seconds * 1e3, predicted * 1e3),
        _compared("samples_per_second", samples / median_seconds, samples / predicted if predicted else 0.0),
    ]
    if breakdown is not None:
        of_median = _of_median(breakdown, median_seconds, on_gpu)
        computing = prediction.compute_seconds + prediction.recompute_seconds + prediction.optimizer_seconds
        parts = {
            "compute_ms": (of_median.compute_seconds, computing),
            "optimizer_ms": (of_median.optimizer_seconds, prediction.optimizer_seconds),  # which is in it
            "communication_ms": (of_median.communication_seconds, prediction.communication_seconds),
            "bubble_ms": (of_median.bubble_seconds, prediction.bubble_seconds),
            "other_ms": (of_median.other_seconds, prediction.host_seconds),
        }
        optional = {"bubble_ms", "optimizer_ms"}  # not of every step
        shown = {name: both for name, both in parts.items() if any(both) or name not in optional}
        rows += [_compared(name, measured * 1e3, told * 1e3) for name, (measured, told) in shown.items()]
    highest = max(measured for measured, _ in peaks), prediction.peak_bytes
    named = {"peak_mb": highest, **{f"peak_mb_rank_{rank}": peak for rank, peak in enumerate(peaks)}}
    return (*rows, *(_compared(name, measured / 1e6, told / 1e6) for name, (measured, told) in named.items()))


def _of_median(found: Breakdown, seconds: float, on_gpu: bool) -> Breakdown:
    """A GPU works as long under the profiler as without: it slows the host, so that what it adds is waiting."""
    waiting = found.other_seconds + seconds - found.step_seconds
    if on_gpu and waiting >= 0:
        return replace(found, step_seconds=seconds, other_seconds=waiting)
    return Breakdown(*(part * seconds / found.step_seconds for part in astuple(found)))


def _compared(what: str, measured: float, predicted: float) -> Compared:
    return Compared(what, measured, predicted, measured / predicted if predicted else None)


def make_report(measured: dict[str, Any], plan: Plan, edited: bool) -> Report:
    seconds = tuple(measured["seconds"])
    median = median_seconds(seconds, measured["profiled_at"])
    breakdown = Breakdown(**measured["breakdown"]) if measured["breakdown"] else None
    peaks = measured["peak_bytes"]
    predicted = plan.rank_peak_bytes if len(peaks) == plan.ranks else [plan.prediction.peak_bytes] * len(peaks)
    both = list(zip(peaks, predicted, strict=True))
    return Report(
        steps=len(measured["losses"]),
        ranks=measured["ranks"],
        losses=tuple(measured["losses"]),
        step_seconds=seconds,
        median_step_seconds=median,
        samples_per_second=measured["samples"] / median,
        peak_bytes=tuple(peaks),
        predicted_step_seconds=plan.prediction.step_seconds,
        predicted_peak_bytes=plan.prediction.peak_bytes,
        module_edited=edited,
        evaluations=tuple(Evaluation(step, loss) for step, loss in measured["evaluated"]),
        breakdown=breakdown,
        compared=compare(plan.prediction, median, measured["samples"], both, breakdown, plan.device == "cuda"),
        engine=measured["engine"],
        date=datetime.now(UTC).isoformat(" ", "minutes").removesuffix("+00:00"),
    )


def median_seconds(seconds: tuple[float, ...], profiled: int) -> float:
    """Of the steps that are as all others; of the last one where there are so few."""
    plain = [(step, second) for step, second in enumerate(seconds) if step != profiled]
    usual = [second for step, second in plain if step >= WARM_UP]
    return statistics.median(usual or [plain[-1][1] if plain else seconds[-1]])


def figures(report: Report) -> dict[str, float | int | str]:
    """None has the name of a series of `Follower`: in the tracked run they would be one metric."""
    found: dict[str, float | int | str] = {
        "final_loss": report.losses[-1],
        "first_loss": report.losses[0],
        "ranks": report.ranks,
        "engine": report.engine,
    }
    if report.evaluations:
        found["final_eval_loss"] = report.evaluations[-1].loss
    highest = {row.predicted for row in report.compared if row.what == "peak_mb"}
    for row in report.compared:
        own = {"step_ms": "median_step_ms", "samples_per_second": "median_samples_per_second"}.get(row.what, row.what)
        name = row.what.removesuffix("_ms").replace("_mb", "")
        found[own] = round(row.measured, 4)
        if row.ratio is not None:
            found[f"{name}_ratio"] = round(row.ratio, 4)
        if row.ratio is not None and ("_rank_" not in row.what or row.predicted not in highest):
            found[f"predicted_{row.what}"] = round(row.predicted, 4)
    return found


def step_curve(report: Report) -> Rows:
    """What `dvc plots` draws: of a long run every so many-th step. Steps of an older snapshot may have no seconds."""
    missing = [None] * (len(report.losses) - len(report.step_seconds))
    taken = list(enumerate(zip(report.losses, (*missing, *report.step_seconds), strict=True)))
    return [
        {
            "step": step,
            "loss": loss,
            "step_ms": None if seconds is None else seconds * 1e3,
            "predicted_ms": report.predicted_step_seconds * 1e3,
        }
        for step, (loss, seconds) in taken[:: -(-len(taken) // MOST_DRAWN)]
    ]
