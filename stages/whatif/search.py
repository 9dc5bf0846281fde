"""Searches over one number; what is tried costs seconds, so each value is tried once.

They tell what is known after every try, coarse first, so that whoever asks may stop at any moment. None of them trusts
that what fits at n fits at n - 1 (a batch of 12 divides among more devices than one of 11): an answer is a value that
was tried and fits, beside the next one, which was tried and does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

ROOM = 0.9  # of what there is, at which a larger number is tried first
BOLDEST = 64.0  # times the number that fits


@dataclass(frozen=True)
class FitLimit:
    """The last value that fits and the next that does not; None where the search met no such value."""

    fits: int | None
    fails: int | None


def largest(start: int, step: int, most: int, needs: Callable[[int], float]) -> Iterator[FitLimit]:
    """Of the multiples of `step` up to `most`. What a number needs is a part of what there is: it fits up to 1, and
    infinity says just that it does not.

    From `start` as far up as what fits promises; then between two, where the needs of those that fail point to.
    """
    top = max(1, most // step)
    low, high, part = 0, None, 0.0  # in steps; 0 counts as fitting
    over: list[tuple[int, float]] = []
    at = min(top, max(1, start // step))
    while True:
        need = needs(at * step)
        if need <= 1:
            low, part = at, need
        else:
            high, over = at, [*over, (at, need)]
        yield FitLimit(low * step or None, None if high is None else high * step)
        if low == top or (high is not None and high - low <= 1):
            return
        further = min(BOLDEST, max(2.0, ROOM / part)) if high is None else 1.0
        at = min(top, int(low * further)) if high is None else _between(low, high, over)


def _between(low: int, high: int, over: Sequence[tuple[int, float]]) -> int:
    """By the line through the last two that fail; every third time, and without one, in the middle."""
    middle = (low + high) // 2
    (before, more), (at, need) = over[-2] if len(over) > 1 else (0, 0.0), over[-1]
    if len(over) % 3 == 0 or not more < math.inf > need or before == at or (need - more) / (at - before) <= 0:
        return middle
    return max(low + 1, min(high - 1, int(at + (1 - need) * (at - before) / (need - more))))


def fewest(candidates: Iterable[int], fits: Callable[[int], bool]) -> Iterator[FitLimit]:
    """The first of ascending candidates that fits, and the one before it."""
    before = None
    for count in candidates:
        if fits(count):
            yield FitLimit(count, before)
            return
        before = count
        yield FitLimit(None, before)


def least(low: int, high: int, near: float, fits: Callable[[int], bool]) -> Iterator[FitLimit]:
    """Between `low`, which does not fit, and `high`, which does: halved until they differ by the part `near`."""
    yield FitLimit(high, low)
    while high - low > max(1, near * high):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
        yield FitLimit(high, low)


def changes(points: Sequence[int], near: float, at: Callable[[int], Hashable]) -> Iterator[list[tuple[int, int]]]:
    """Neighbours at which the value differs: first all points are looked at, then the widest gap between two that
    differ is halved, until they are all as near as `near`."""
    known: dict[int, Hashable] = {}
    found: list[tuple[int, int]] = []
    left = sorted(set(points))
    while True:
        if left:
            point = left.pop(0)
        elif wide := [pair for pair in found if pair[1] - pair[0] > max(1, near * pair[1])]:
            low, high = max(wide, key=lambda pair: pair[1] / max(1, pair[0]))
            point = (low + high) // 2
        else:
            return
        known[point] = at(point)
        found = [(low, high) for low, high in pairwise(sorted(known)) if known[low] != known[high]]
        yield found
