"""What a training run measured, beside what was predicted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Breakdown:
    """Where the time of one step went, as the profiler saw it: a little longer than a step without it."""

    step_seconds: float
    compute_seconds: float
    communication_seconds: float  # while nothing was computed; of a pipeline, within partitions
    hidden_seconds: float  # of communication while something was computed, and in `compute_seconds`
    other_seconds: float
    bubble_seconds: float = 0.0  # of a pipeline: while nothing was computed and a partition waited for another
    optimizer_seconds: float = 0.0  # of the computing


@dataclass(frozen=True)
class Compared:
    what: str  # step_ms, compute_ms, peak_mb_rank_0, ...
    measured: float
    predicted: float
    ratio: float | None  # measured over predicted; None where nothing is predicted


@dataclass(frozen=True)
class Evaluation:
    step: int  # after which it was made
    loss: float  # on the held-out data


@dataclass(frozen=True)
class Report:
    steps: int
    ranks: int
    losses: tuple[float, ...]  # of the global batch, one a step
    step_seconds: tuple[float, ...]
    median_step_seconds: float  # without the first steps, which warm up, and without one that is profiled
    samples_per_second: float
    peak_bytes: tuple[int, ...]  # of each rank: parameters, gradients, optimizer state, activations, temporaries
    predicted_step_seconds: float
    predicted_peak_bytes: int
    module_edited: bool
    evaluations: tuple[Evaluation, ...] = ()
    breakdown: Breakdown | None = None  # of the ranks (stages/train/breakdown.py); None where too few steps were taken
    compared: tuple[Compared, ...] = ()
    engine: str = "planned"  # what took the steps; the predictions are the plan's, whatever it was
    date: str = ""  # on which they were taken, UTC
