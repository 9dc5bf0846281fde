"""Schedules of partitions that nobody searches for: keep everything, drop everything, or drop what is marked.

Of each the seconds and bytes of all kinds of sub-chains at once; bytes are with the input.
"""

# ruff: noqa: E741 - `l` is the last link of a sub-chain.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.stages.checkpoint.recompute.chain import Chain
from shardwright.stages.checkpoint.recompute.in_flight import run_partition
from shardwright.stages.checkpoint.recompute.kernels import Floats, Ints, Kinds, passing
from shardwright.stages.checkpoint.recompute.schedule import Keep, Nesting


@dataclass(frozen=True, eq=False)
class FixedSchedule:
    time: Floats
    hold: Floats  # for each micro-batch that waits
    peak: Floats
    last: FixedSchedule | None = None  # of the last micro-batch of a step, where that is run otherwise

    def memory(self, flights: Ints) -> Floats:
        """[kind, flight]"""
        hold, peak, last = self.hold[:, None], self.peak[:, None], self.last
        each = np.asarray((flights - 1) * hold + peak)
        if last is None:
            return each
        runs = np.maximum(each, (flights - 1) * hold + last.peak[:, None])
        waits = (flights - 2) * hold + last.hold[:, None] + peak
        return np.where(flights > 1, np.maximum(runs, waits), runs)


def kept_schedule(chain: Chain, kinds: Kinds) -> FixedSchedule:
    """Nothing recomputed."""
    time, hold, peak = (np.zeros(len(kinds.first)) for _ in range(3))
    for u, (i, l) in enumerate(zip(kinds.first.tolist(), kinds.last.tolist(), strict=True)):
        link = chain.options(i)[0]
        backward = chain.size(i) + chain.size(i + 1) + link.saved + link.bt
        time[u], hold[u] = link.f + link.b, link.saved
        peak[u] = max(chain.size(l + 1) + link.saved + link.ft, backward)
        if i < l:
            rest = kinds.of[i + 1, l]
            time[u] += time[rest]
            hold[u] += hold[rest]
            peak[u] = max(peak[u], link.saved + peak[rest])
    given = np.array(chain.a)[kinds.first]
    return FixedSchedule(time, hold + given, peak + given)


def dropped_schedule(chain: Chain, kinds: Kinds, kept: FixedSchedule) -> FixedSchedule:
    """All recomputed from the input."""
    time, hold, peak = kept.time.copy(), kept.hold.copy(), kept.peak.copy()
    passed, loss = np.concatenate([[0.0], np.cumsum(chain.f_none)]), chain.length
    held = passing(np.array(chain.a, dtype=np.float64), np.array(chain.ft_none, dtype=np.float64))
    for u, (i, l) in enumerate(zip(kinds.first.tolist(), kinds.last.tolist(), strict=True)):
        if l < loss:
            time[u] += passed[l + 1] - passed[i]
            hold[u] = chain.a[i]
            peak[u] = max(chain.a[i] + held[i, l + 1] + chain.a[l + 1], kept.peak[u])
        elif i < l:
            inner = kinds.of[i, l - 1]
            time[u] = passed[l] - passed[i] + kept.time[inner] + chain.b[l]
            hold[u] = chain.a[i] + chain.a[l]
            own = max(held[i, l], 2 * chain.a[l] + chain.bt[l])
            peak[u] = max(chain.a[i] + own, kept.peak[inner])
    return FixedSchedule(time, hold, peak)


def marked_schedule(chain: Chain, kinds: Kinds, marks: Sequence[int]) -> FixedSchedule:
    """What is marked recomputed."""
    spans = zip(kinds.first.tolist(), kinds.last.tolist(), strict=True)
    ways = [run_partition(chain, marked_region(marks, i, l), i, l) for i, l in spans]
    time, hold, peak = np.array([(way.time, way.hold, way.peak) for way in ways]).T
    return FixedSchedule(time, hold, peak)


def marks_of(spans: Sequence[tuple[int, int]], chain: Chain) -> list[int]:
    """For each link its place in its span, -1 outside of all."""
    marks = [-1] * (chain.length + 1)
    for first, last in spans:
        for link in range(first, min(last, chain.length - 1) + 1):  # the loss follows its forward at once
            marks[link] = link - first
    return marks


def marked_region(marks: Sequence[int], i: int, l: int) -> Nesting:
    """Links i..l with what is marked of them in regions."""
    steps: list[Keep | Nesting] = []
    for link in range(i, l + 1):
        if marks[link] < 0:
            steps.append(Keep(link))
        elif marks[link] == 0 or link == i:
            steps.append(Nesting((Keep(link),)))
        else:
            begun = steps.pop()
            assert isinstance(begun, Nesting)
            steps.append(Nesting((*begun.steps, Keep(link))))
    return Nesting(tuple(steps))
