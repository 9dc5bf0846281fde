"""The inner loops of `in_flight_dp.py`, compiled by numba on first use and kept on disk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.base.kernel_cache import kernel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Kinds(NamedTuple):
    """The distinct sub-chains: `of[i, l]` is the kind of links i..l (-1: none, or too long), shorter ones first."""

    of: Ints
    first: Ints  # of each kind, one that is such
    last: Ints


class Numbers(NamedTuple):
    """A chain of whole sizes as arrays."""

    a: Ints
    starts: Ints  # of the options of each link in the arrays that follow
    seconds: Floats
    saved: Ints
    forward: Ints  # what F_all holds beside the gradient that waits
    backward: Ints
    passing: Ints  # [i, j]: the most that passing over i..j-1 holds beside the gradient that waits
    passed: Floats


@kernel()
def fill(rows: Floats, inner: Floats, extra: int, drop: bool, kinds: Kinds, chain: Numbers) -> None:
    """rows[u, h] = T(i,l,h,h+extra) for every distinct sub-chain u = i..l, shorter ones first.

    With `inner` the same table as `rows`, nothing extra and no drop, this is C(i,l,h).
    """
    width, loss, a, of = rows.shape[1], len(chain.passed) - 1, chain.a, kinds.of
    for u in range(len(kinds.first)):
        i, l = kinds.first[u], kinds.last[u]  # noqa: E741
        row = rows[u]
        for h in range(width):
            row[h] = np.inf
        for o in range(chain.starts[i], chain.starts[i + 1]):
            seconds, saved = chain.seconds[o], chain.saved[o]
            low = max(saved, max(a[l + 1] + chain.forward[o], chain.backward[o]) - extra)
            if i == l:
                for h in range(low, width):
                    row[h] = min(row[h], seconds)
            else:
                rest = rows[of[i + 1, l]]
                for h in range(low, width):
                    row[h] = min(row[h], seconds + rest[h - saved])
        for j in range(i + 1, l + 1):
            low = max(a[j], chain.passing[i, j] + a[l + 1] - extra)
            if low < width:
                again, rest = inner[of[i, j - 1]], rows[of[j, l]]
                once, size = chain.passed[j] - chain.passed[i], a[j]
                for h in range(low, width):
                    row[h] = min(row[h], once + rest[h - size] + again[h + extra])
        if drop and l < loss:
            again, once = inner[u], chain.passed[l + 1] - chain.passed[i]
            for h in range(max(0, chain.passing[i, l + 1] + a[l + 1] - extra), width):
                row[h] = min(row[h], once + again[h + extra])


@kernel()
def least_over_holds(
    inner: Floats, rooms: Ints, flights: Ints, extras: Ints, kinds: Kinds, chain: Numbers
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
        fill(rows, inner, extra, True, kinds, chain)
        for u in range(count):
            for n in range(ways):
                h = (rooms[u, n] - extra) // flights[n] - chain.a[kinds.first[u]]
                if h >= 0 and rooms[u, n] >= extra and rows[u, h] < best[u, n]:
                    best[u, n] = rows[u, h]
                    where[u, n] = extra
    return best, where
