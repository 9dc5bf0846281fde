"""Where to cut a chain, and which plan each partition takes: the dynamic program of Alpa, on plain numbers.

Partitions are numbered s = 0, 1.. from the end: the one at s has flight[s] micro-batches in flight, whatever comes
before it. For partitions that are no slower than `slowest` and have at most `most_once` to do once a step,

    V(s+1, d, i, p) = least over the next cut j, and the plan q after it, of
                      seconds(p, flight[s], i..j-1) - credit(p, i..j-1) + send(j, p, q) + V(s, d - devices(p), j, q)

is the least sum over s+1 partitions that hold links i.. on d devices (`cuts_kernels.sweep`). The step is estimated as

    weights.sum * sum + weights.peak * slowest + most once a step

so that V is needed for the right `slowest` and `most_once`. Alpa tries every value; here boxes of values are halved,
best first: within a box [low, high] of `slowest` the sum is at least V(high) and the rest at least what low gives.
A box whose bound is no better than the best plan known (less `gap`) is dropped: with a gap of 0 the answer is optimal.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import count

import numpy as np

from shardwright.pipeline.cost.pipelines.schedules import StepWeights
from shardwright.stages.checkpoint.pipelines.cuts_kernels import Bounds, Costs, ahead, sweep, trace

ROUNDING = 1e-12
NEARLY = 0.02  # worse by estimate than the best may be better as simulated: such are kept if met


@dataclass(frozen=True, eq=False)
class Field:
    """All that the search looks at."""

    costs: Costs
    total: int  # devices: all are used
    counts: tuple[int, ...]  # numbers of partitions that are wanted

    @property
    def links(self) -> int:
        return len(self.costs.starts)


@dataclass(frozen=True)
class Cuts:
    """A way to cut: for each partition its first link and its plan."""

    firsts: tuple[int, ...]
    plans: tuple[int, ...]
    estimate: float

    def spans(self, links: int) -> list[tuple[int, int, int]]:
        """First link, last link and plan of each partition."""
        return [(a, b - 1, p) for a, b, p in zip(self.firsts, (*self.firsts[1:], links), self.plans, strict=True)]


@dataclass(frozen=True)
class _Relaxed:
    """The least sum within a box, and how slow its partitions really are."""

    cuts: Cuts
    sum: float
    slowest: float
    once: float


def search(
    field: Field,
    weights: StepWeights,
    gap: float = 0.0,
    keep: int = 8,
    known: float = math.inf,
    slowest: float = math.inf,
) -> list[Cuts]:
    """Good ways to cut, best first: the first is optimal within the gap. Where nothing fits there is none.

    `known`: an estimate that some plan is known to have; worse ones, or with a partition slower than `slowest`, are not
    looked for.
    """
    one = _Search(field, weights, gap, known)
    ticket = count()
    boxes: list[tuple[float, int, _Box]] = []
    parts = [one.box(0.0, slowest, 0.0, math.inf)]
    while True:
        for box in parts:
            if box is not None and not one.too_costly(box.bound):
                heapq.heappush(boxes, (box.bound, next(ticket), box))
        if not boxes or one.too_costly(boxes[0][0]):
            return one.varied(keep)
        parts = one.halves(heapq.heappop(boxes)[2])


class _Search:
    def __init__(self, field: Field, weights: StepWeights, gap: float, known: float) -> None:
        self.field, self.costs, self.weights, self.gap = field, field.costs, weights, max(gap, ROUNDING)
        self.values = np.empty((len(self.costs.flight) + 1, field.total + 1, field.links, len(self.costs.devices)))
        self.least = np.ascontiguousarray(self.costs.seconds.min(axis=1))
        self.met: dict[tuple[tuple[int, ...], tuple[int, ...]], Cuts] = {}
        self.best = known * (1 + 1e-9) if known < math.inf else known

    def varied(self, keep: int) -> list[Cuts]:
        """The best of each number of partitions, as the estimate errs most between these; then the best others."""
        ways = sorted(self.met.values(), key=lambda cuts: (cuts.estimate, cuts.firsts, cuts.plans))
        first_of = {len(cuts.firsts): cuts for cuts in reversed(ways)}
        leaders = sorted(first_of.values(), key=lambda cuts: cuts.estimate)
        others = [cuts for cuts in ways if cuts not in leaders]
        few = leaders[: max(1, keep // 2)]
        return sorted([*few, *others[: keep - len(few)]], key=lambda cuts: cuts.estimate)

    def too_costly(self, bound: float) -> bool:
        return bound >= self.best - self.gap * abs(self.best)

    def box(self, low: float, high: float, low_once: float, high_once: float) -> _Box | None:
        """None where nothing in it can be better than what is known."""
        rest = self.weights.peak * low + low_once
        found = self.relaxed(high, high_once, (self.best * (1 + NEARLY) - rest) / self.weights.sum)
        if found is None:
            return None
        return _Box(low, high, low_once, high_once, found, self.weights.sum * found.sum + rest)

    def halves(self, box: _Box) -> list[_Box | None]:
        """Two boxes with all that may still be better; the upper one needs no new sweep."""
        found, weights = box.found, self.weights
        time, once = weights.peak * (found.slowest - box.low), found.once - box.low_once
        if time >= once:
            middle = (box.low + found.slowest) / 2
            lower = self.box(box.low, middle, box.low_once, box.high_once)
            bound = box.bound + weights.peak * (middle - box.low)
            return [lower, _Box(middle, box.high, box.low_once, box.high_once, found, bound)]
        middle = (box.low_once + found.once) / 2
        lower = self.box(box.low, box.high, box.low_once, middle)
        bound = box.bound + middle - box.low_once
        return [lower, _Box(box.low, box.high, middle, box.high_once, found, bound)]

    def relaxed(self, slowest: float, most_once: float, limit: float) -> _Relaxed | None:
        largest = float(np.finfo(np.float64).max)
        bounds = Bounds(min(slowest, largest), most_once, min(limit, largest))
        sweep(self.values, ahead(self.least, self.costs, self.field.total, bounds), self.costs, bounds)
        found = []
        for partitions in self.field.counts:
            ends = self.values[partitions, self.field.total, 0]
            plan = int(np.argmin(ends))
            if ends[plan] < math.inf:
                rows = trace(self.values, partitions, plan, self.costs, bounds)
                found.append(self.note(tuple(rows[:, 0].tolist()), tuple(rows[:, 1].tolist()), float(ends[plan])))
        return min(found, key=lambda one: one.sum, default=None)

    def note(self, firsts: tuple[int, ...], plans: tuple[int, ...], total: float) -> _Relaxed:
        slowest, once = measure(self.field, firsts, plans)
        estimate = self.weights.sum * total + self.weights.peak * slowest + once
        cuts = self.met.setdefault((firsts, plans), Cuts(firsts, plans, estimate))
        self.best = min(self.best, estimate)
        return _Relaxed(cuts, total, slowest, once)


@dataclass(frozen=True)
class _Box:
    """Bounds on the slowest partition and on what is done once a step; the least sum within, a bound on the step."""

    low: float
    high: float
    low_once: float
    high_once: float
    found: _Relaxed
    bound: float


def measure(field: Field, firsts: tuple[int, ...], plans: tuple[int, ...]) -> tuple[float, float]:
    """The slowest partition, with its transfers if they count, and the most that one does once a step."""
    costs, slowest, once = field.costs, 0.0, 0.0
    spans = Cuts(firsts, plans, 0.0).spans(field.links)
    for number, (first, last, p) in enumerate(spans):
        seconds = float(costs.seconds[p, costs.flight[len(spans) - 1 - number], last, first])
        if costs.send_in_peak and number + 1 < len(spans):
            seconds += float(costs.send[last + 1, p, plans[number + 1]])
        slowest = max(slowest, seconds)
        once = max(once, float(costs.once[p, last + 1] - costs.once[p, first]))
    return slowest, once
