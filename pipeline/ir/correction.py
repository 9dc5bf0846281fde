"""What runs measured of plans, and what that says of the predictions to come.

Of a run are kept the seconds of its step by part, and those that the planner gave them without any correction. Of the
same machine, figures and model:

    compute        geometric mean over the runs of measured / priced
    links          the same of collectives, of which the hidden part counts as it was priced: a run sees how long one
                   took beside computation, and not how much of that it waited for other ranks
    other_seconds  mean over the runs of measured - priced: what goes on beside both

Where runs measured nothing but their steps, both ratios are that of the steps. A plan that was itself measured on the
machine needs none of this: its step is known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

LEAST, MOST = 1e-3, 1e3  # of a ratio: beyond, what was measured is no slower machine


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step. They add up to it, but for `hidden`; where no part was measured, only the step is told."""

    step: float
    compute: float = 0.0  # with what is computed again and the optimizer
    communication: float = 0.0  # not hidden
    hidden: float = 0.0
    bubble: float = 0.0
    other: float = 0.0

    @property
    def parted(self) -> bool:
        return self.compute > 0


@dataclass(frozen=True)
class MeasuredPlan:
    """What a run took for a plan."""

    plan: str  # digest of all that it decides
    profile: str  # digest of the artifact, and so of the graph
    date: str
    seconds: StepParts


@dataclass(frozen=True)
class MeasuredRun:
    machine: str  # digest of the devices and hosts
    figures: str  # digest of what the cluster stage found there, or was told: `priced` rests on it
    model: str  # digest of the module and its precision, whatever the batch
    priced: StepParts
    found: MeasuredPlan


@dataclass(frozen=True)
class Correction:
    compute: float = 1.0  # times as long as the cluster's figures say
    links: float = 1.0
    other_seconds: float = 0.0  # of a step
    parted: bool = True  # False: only whole steps were measured, and both ratios are that of the step
    dates: tuple[str, ...] = ()  # of the runs that say so; none: figures count as they are
    plans: tuple[MeasuredPlan, ...] = ()  # measured on this machine

    def measured(self, plan: str) -> MeasuredPlan | None:
        return next((one for one in self.plans if one.plan == plan), None)

    def of_profile(self, profile: str) -> Correction:
        """With the plans of that model, batch and optimizer alone."""
        return replace(self, plans=tuple(one for one in self.plans if one.profile == profile))


def correction_of(runs: Iterable[MeasuredRun], machine: str, figures: str, model: str) -> Correction | None:
    """What they say of plans of this model there; None where they say nothing."""
    here = [run for run in runs if run.machine == machine and run.model == model]
    if not here:
        return None
    plans = tuple(run.found for run in here)
    comparable = [run for run in here if run.figures == figures]
    parted = [run for run in comparable if run.found.seconds.parted]
    dates = tuple(sorted(run.found.date for run in parted or comparable))
    if not parted:
        whole = _ratio([(run.found.seconds.step, run.priced.step) for run in comparable])
        return Correction(whole, whole, 0.0, False, dates, plans)
    pairs = [(run.found.seconds, run.priced) for run in parted]
    return Correction(
        compute=_ratio([(found.compute, priced.compute) for found, priced in pairs]),
        links=_ratio([(found.communication + p.hidden, p.communication + p.hidden) for found, p in pairs]),
        other_seconds=statistics.fmean(found.other - priced.other for found, priced in pairs),
        dates=dates,
        plans=plans,
    )


def with_run(runs: Sequence[MeasuredRun], new: MeasuredRun) -> tuple[MeasuredRun, ...]:
    """In place of an earlier one of the same plan there."""

    def key(run: MeasuredRun) -> tuple[str, ...]:
        return run.machine, run.model, run.found.plan, run.found.profile

    return (*(run for run in runs if key(run) != key(new)), new)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The geometric mean; of nothing, and of what is on one side alone, 1."""
    logs = [math.log(measured / priced) for measured, priced in pairs if measured > 0 and priced > 0]
    return min(MOST, max(LEAST, math.exp(statistics.fmean(logs)))) if logs else 1.0
