"""The shares that a card reaches, from measured steps: six numbers, least squares of the logarithms of times.

What a few steps do not tell is kept near what such cards usually reach (`PRIOR`), by a weight on the distance from it.
Levenberg and Marquardt's method; a share never passes `TOP`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.cluster_model.machine import Machine
from pipeline.cluster_model.step import price
from pipeline.cluster_model.transformer import ParallelLayout, Transformer

FITTED = ("products", "unaligned", "memory", "kernel", "links", "collective")
PRIOR = np.log([0.85, 0.4, 0.7, 50e-6, 0.75, 60e-6])
TOP = np.log([0.9, 1.0, 0.95, 1.0, 1.0, 1.0])  # large half-precision products of no card pass nine tenths
WEIGHT = 0.05  # of a relative distance from the prior, against the same relative error of every step
STEP, ROUNDS, ENOUGH, DAMPEST = 1e-4, 40, 1e-5, 1e6


@dataclass(frozen=True)
class MeasuredStep:
    model: Transformer
    layout: ParallelLayout
    seconds: float


def calibrated(steps: Sequence[MeasuredStep], machine: Machine) -> Machine:
    """The machine with the shares that fit the steps best."""
    values, damping = PRIOR, 1e-2
    errors = _errors(values, steps, machine)
    for _ in range(ROUNDS):
        slopes = np.stack([(_errors(values + s, steps, machine) - errors) / STEP for s in STEP * np.eye(len(FITTED))])
        square = slopes @ slopes.T
        change = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -slopes @ errors)
        tried = np.minimum(values + change, TOP)
        there = _errors(tried, steps, machine)
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
    return replace(machine, reached=replace(machine.reached, **shares))


def _errors(values: np.ndarray, steps: Sequence[MeasuredStep], machine: Machine) -> np.ndarray:
    tried = with_shares(machine, values)
    off = [np.log(price(step.model, step.layout, tried).seconds / step.seconds) for step in steps]
    return np.array([*off, *((values - PRIOR) * WEIGHT * len(steps) ** 0.5)])
