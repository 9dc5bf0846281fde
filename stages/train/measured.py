"""What was measured beside what was predicted, with the ratio of the two."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.ir.plan import Prediction
from pipeline.ir.report import Breakdown, Compared


def compare(
    prediction: Prediction,
    median_seconds: float,
    samples: int,
    peaks: Sequence[tuple[int, int]],
    breakdown: Breakdown | None,
) -> tuple[Compared, ...]:
    """The parts of the step are those of the profiled one, scaled to the median step: together they are that.

    `peaks` are bytes of each rank, measured and predicted.
    """
    predicted = prediction.step_seconds
    rows = [
        _compared("step_ms", median_seconds * 1e3, predicted * 1e3),
        _compared("samples_per_second", samples / median_seconds, samples / predicted if predicted else 0.0),
    ]
    if breakdown is not None:
        scale = median_seconds / breakdown.step_seconds * 1e3
        computing = prediction.compute_seconds + prediction.recompute_seconds + prediction.optimizer_seconds
        parts = {
            "compute_ms": (breakdown.compute_seconds, computing),
            "communication_ms": (breakdown.communication_seconds, prediction.communication_seconds),
            "bubble_ms": (breakdown.bubble_seconds, prediction.bubble_seconds),
            "other_ms": (breakdown.other_seconds, prediction.host_seconds),
        }
        if not any(parts["bubble_ms"]):  # no pipeline
            del parts["bubble_ms"]
        rows += [_compared(name, measured * scale, told * 1e3) for name, (measured, told) in parts.items()]
    highest = max(measured for measured, _ in peaks), prediction.peak_bytes
    named = {"peak_mb": highest, **{f"peak_mb_rank_{rank}": peak for rank, peak in enumerate(peaks)}}
    return (*rows, *(_compared(name, measured / 1e6, told / 1e6) for name, (measured, told) in named.items()))


def _compared(what: str, measured: float, predicted: float) -> Compared:
    return Compared(what, measured, predicted, measured / predicted if predicted else None)
