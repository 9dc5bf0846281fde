"""What a card and its links reach, from measured steps: six numbers, least squares of the logarithms of times.

What a few steps do not tell is kept near what such cards usually reach (`PRIOR`), by a weight on the distance from it.
Levenberg and Marquardt's method; a share never passes `TOP`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.pipeline.layouts.machine import Machine
from shardwright.pipeline.layouts.sizes import ParallelLayout, Transformer
from shardwright.pipeline.layouts.step import LayoutPrices, PassSeconds
from shardwright.pipeline.layouts.traced import Works
from shardwright.pipeline.layouts.work import Pass

FITTED = ("products", "unaligned", "memory", "kernel_us", "links", "collective_us")
PRIOR = np.log([0.8, 0.35, 0.8, 17.0, 0.75, 30.0])
TOP = np.log([0.95, 1.0, 0.95, 1e3, 1.0, 1e4])  # large products and copies of no card pass 19 of 20
WEIGHT = 0.05  # of a relative distance from the prior, against the same relative error of every step
STEP, ROUNDS, ENOUGH, DAMPEST = 1e-4, 40, 1e-5, 1e6

WorksOf = Callable[[Transformer], Works]


@dataclass(frozen=True)
class MeasuredStep:
    model: Transformer
    layout: ParallelLayout
    seconds: float


def predicted(steps: Sequence[MeasuredStep], machine: Machine, works_of: WorksOf) -> list[float]:
    """On as many hosts as a step needs, where the machine has fewer."""
    passes: dict[int, dict[Pass, PassSeconds]] = {}
    sizes = {max(machine.devices, step.layout.devices) for step in steps}
    machines = {size: machine if size == machine.devices else machine.sized(size) for size in sizes}
    found = []
    for step in steps:
        size = max(machine.devices, step.layout.devices)
        own = LayoutPrices(step.model, works_of(step.model), machines[size], passes.setdefault(size, {}))
        found.append(own.seconds(step.layout))
    return found


def calibrated(steps: Sequence[MeasuredStep], machine: Machine, works_of: WorksOf) -> Machine:
    """The machine with the shares that fit the steps best."""

    def errors_at(values: np.ndarray) -> np.ndarray:
        times = predicted(steps, with_shares(machine, values), works_of)
        off = [np.log(time / step.seconds) for time, step in zip(times, steps, strict=True)]
        return np.array([*off, *((values - PRIOR) * WEIGHT * len(steps) ** 0.5)])

    values, damping = PRIOR, 1e-2
    errors = errors_at(values)
    for _ in range(ROUNDS):
        slopes = np.stack([(errors_at(values + step) - errors) / STEP for step in STEP * np.eye(len(FITTED))])
        square = slopes @ slopes.T
        change = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -slopes @ errors)
        tried = np.minimum(values + change, TOP)
        there = errors_at(tried)
        gain = errors @ errors - there @ there
        if gain <= 0:
            damping *= 4
            if damping > DAMPEST:
                break
            continue
        close = gain < ENOUGH * (errors @ errors)
        values, errors, damping = tried, there, damping / 3
        if close:
            break
    return with_shares(machine, values)


def with_shares(machine: Machine, values: np.ndarray) -> Machine:
    """Logarithms of what is fitted, in the order of FITTED."""
    shares = dict(zip(FITTED, np.exp(np.minimum(values, TOP)).tolist(), strict=True))
    preset = machine.settings.preset
    preset = replace(preset, reached=replace(preset.reached, **shares))
    return machine.with_settings(replace(machine.settings, preset=preset))
