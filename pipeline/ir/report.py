"""What a training run measured, beside what was predicted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    steps: int
    ranks: int
    losses: tuple[float, ...]  # of the global batch, one a step
    step_seconds: tuple[float, ...]
    median_step_seconds: float  # without the first steps, which warm up
    samples_per_second: float
    peak_bytes: tuple[int, ...]  # of each rank: parameters, gradients, optimizer state, activations, temporaries
    predicted_step_seconds: float
    predicted_peak_bytes: int
    module_edited: bool
    engine: str = "planned"  # what took the steps; the predictions are the plan's, whatever it was
