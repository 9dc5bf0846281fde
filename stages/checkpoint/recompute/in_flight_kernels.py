"""The inner loops of `in_flight_dp.py`, compiled by numba on first use and kept on disk."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@njit(cache=True, nogil=True)
def fill(
    rows: Floats,
    inner: Floats,
    extra: int,
    drop: bool,
    first: Ints,
    last: Ints,
    kinds: Ints,
    a: Ints,
    starts: Ints,
    seconds: Floats,
    saved: Ints,
    forward: Ints,
    backward: Ints,
    passing: Ints,
    passed: Floats,
) -> None:
    """rows[u, h] = T(i,l,h,h+extra) for every distinct sub-chain u = i..l, shorter ones first.

    With `inner` the same table as `rows`, nothing extra and no drop, this is C(i,l,h).
    """
    width, loss = rows.shape[1], len(passed) - 1
    for u in range(len(first)):
        i, l = first[u], last[u]  # noqa: E741
        row = rows[u]
        for h in range(width):
            row[h] = np.inf
        for o in range(starts[i], starts[i + 1]):
            low = max(saved[o], max(a[l + 1] + forward[o], backward[o]) - extra)
            if i == l:
                for h in range(low, width):
                    row[h] = min(row[h], seconds[o])
            else:
                rest = rows[kinds[i + 1, l]]
                for h in range(low, width):
                    row[h] = min(row[h], seconds[o] + rest[h - saved[o]])
        for j in range(i + 1, l + 1):
            low = max(a[j], passing[i, j] + a[l + 1] - extra)
            if low < width:
                again, rest = inner[kinds[i, j - 1]], rows[kinds[j, l]]
                once, size = passed[j] - passed[i], a[j]
                for h in range(low, width):
                    row[h] = min(row[h], once + rest[h - size] + again[h + extra])
        if drop and l < loss:
            again, once = inner[u], passed[l + 1] - passed[i]
            for h in range(max(0, passing[i, l + 1] + a[l + 1] - extra), width):
                row[h] = min(row[h], once + again[h + extra])


@njit(cache=True, nogil=True)
def least_over_holds(
    inner: Floats,
    rooms: Ints,
    flights: Ints,
    extras: Ints,
    first: Ints,
    last: Ints,
    kinds: Ints,
    a: Ints,
    starts: Ints,
    seconds: Floats,
    saved: Ints,
    forward: Ints,
    backward: Ints,
    passing: Ints,
    passed: Floats,
) -> tuple[Floats, Ints]:
    """For sub-chain u and flight k (at least 2): the least T over every hold, and the `extra` that attains it.

    Hold h with m = h + extra needs k (h + a_i) + extra slots; `rooms[u, n]` are there with `flights[n]` in flight.
    """
    count, ways = rooms.shape
    best = np.full((count, ways), np.inf)
    where = np.zeros((count, ways), dtype=np.int64)
    most, fewest = -1, 1 << 60
    for n in range(ways):
        fewest = min(fewest, flights[n])
        for u in range(count):
            most = max(most, rooms[u, n])
    if most < 0:
        return best, where
    table = np.empty((count, most // fewest + 1))
    for extra in extras:
        if extra > most:
            break
        rows = table[:, : (most - extra) // fewest + 1]
        fill(
            rows,
            inner,
            extra,
            True,
            first,
            last,
            kinds,
            a,
            starts,
            seconds,
            saved,
            forward,
            backward,
            passing,
            passed,
        )
        for u in range(count):
            for n in range(ways):
                h = (rooms[u, n] - extra) // flights[n] - a[first[u]]
                if h >= 0 and rooms[u, n] >= extra and rows[u, h] < best[u, n]:
                    best[u, n] = rows[u, h]
                    where[u, n] = extra
    return best, where
