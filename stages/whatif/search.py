"""Searches over one number; what is tried costs seconds, so each value is tried once.

None of them trusts that what fits at n fits at n - 1 (a batch of 12 divides among more devices than one of 11): an
answer is a value that was tried and fits, beside the next one, which was tried and does not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise


@dataclass(frozen=True)
class FitLimit:
    """The last value that fits and the next that does not; None where the search met no such value."""

    fits: int | None
    fails: int | None


def largest(start: int, step: int, most: int, fits: Callable[[int], bool]) -> FitLimit:
    """Of the multiples of `step` up to `most`: from `start` doubled until one does not fit, then halved between."""
    tried = cache(fits)
    top = max(1, most // step)
    low, high = 0, None  # in steps; 0 counts as fitting
    at = min(top, max(1, start // step))
    while high is None and low < top:
        if tried(at * step):
            low, at = at, min(top, 2 * at)
        else:
            high = at
    while high is not None and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tried(middle * step) else (low, middle)
    return FitLimit(low * step or None, None if high is None else high * step)


def fewest(candidates: Iterable[int], fits: Callable[[int], bool]) -> FitLimit:
    """The first of ascending candidates that fits, and the one before it."""
    before = None
    for count in candidates:
        if fits(count):
            return FitLimit(count, before)
        before = count
    return FitLimit(None, before)


def least(low: int, high: int, near: float, fits: Callable[[int], bool]) -> FitLimit:
    """Between `low`, which does not fit, and `high`, which does: halved until they differ by the part `near`."""
    while high - low > max(1, near * high):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return FitLimit(high, low)


def changes(points: Sequence[int], near: float, at: Callable[[int], Hashable]) -> list[tuple[int, int]]:
    """Neighbours, as near as `near`, at which the value differs: between each two of the points that differ."""
    tried = cache(at)
    found: list[tuple[int, int]] = []

    def between(low: int, high: int) -> None:
        if tried(low) == tried(high):
            return
        if high - low <= max(1, near * high):
            found.append((low, high))
            return
        middle = (low + high) // 2
        between(low, middle)
        between(middle, high)

    for low, high in pairwise(sorted(set(points))):
        between(low, high)
    return found
