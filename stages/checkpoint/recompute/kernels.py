"""The inner loops of Rotor, compiled by numba on first use and kept on disk. rotor.py has the recurrences.

Memory goes in blocks of `WIDTH` slots, and a table is [block, sub-chain, slot in the block]. What C(i,l,m) reads has at
most m slots: so the blocks are filled one after the other, and what the minimum over j reads of one stays in the cache.
Times are float64: float32 would halve the table, but not tell two schedules apart whose times differ by a millionth.
"""

# ruff: noqa: E741 - `l` is the last link of a sub-chain, as in C(i,l,m).
from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.base.kernel_cache import kernel

WIDTH = 8  # slots of a block: their minima fill the registers; `_least` spells them out
ROUNDING = 1e-12  # of all times together: more than sums in another order differ by
NO_NAN = {"nnan", "nsz"}  # fastmath: infinite times occur, and they stay exact


class LastOptions(NamedTuple):
    """The options that links have as the last of a sub-chain, in the same form."""

    starts: NDArray[np.int64]
    seconds: NDArray[np.float64]
    forward: NDArray[np.int64]
    backward: NDArray[np.int64]


class Links(NamedTuple):
    """A chain of whole sizes as arrays. Options of link i are starts[i]..starts[i+1]-1; the loss is the last link."""

    a: NDArray[np.int64]  # a_0..a_{L+1}
    waiting: NDArray[np.int64]  # [l]: what is there whenever links up to l run once those after it are done
    passing: NDArray[np.int64]  # [i, j]: what F_ck(i), F_none(i+1..j-1) hold beside the gradient that waits
    passed: NDArray[np.float64]  # seconds of the forwards that save nothing, summed up to each link
    starts: NDArray[np.int64]
    seconds: NDArray[np.float64]  # of an option: f + b
    saved: NDArray[np.int64]
    forward: NDArray[np.int64]  # what F_all holds beside the gradient that waits
    backward: NDArray[np.int64]  # what B holds
    ends: LastOptions


@kernel()
def passing(a: NDArray[np.int64], ft_none: NDArray[np.int64]) -> NDArray[np.int64]:
    """`Links.passing`."""
    n = len(ft_none) + 1
    held = np.zeros((n, n), dtype=np.int64)
    for i in range(n - 1):
        held[i, i + 1] = a[i + 1] + ft_none[i]
        for k in range(i + 1, n - 1):
            held[i, k + 1] = max(held[i, k], a[k] + a[k + 1] + ft_none[k])
    return held


@kernel()
def needs(links: Links) -> NDArray[np.int64]:
    """N(i,l) at [i, l]."""
    n = len(links.starts) - 1
    need = np.zeros((n + 1, n), dtype=np.int64)
    for i in range(n - 1, -1, -1):
        for l in range(i, n):
            waiting = links.waiting[l]
            least = np.int64(2**63 - 1)
            if i == l:
                for k in range(links.ends.starts[i], links.ends.starts[i + 1]):
                    least = min(least, max(waiting + links.ends.forward[k], links.ends.backward[k]))
            else:
                for k in range(links.starts[i], links.starts[i + 1]):
                    own = max(waiting + links.forward[k], links.backward[k])
                    least = min(least, max(own, links.saved[k] + need[i + 1, l]))
            for j in range(i + 1, l + 1):
                own = links.passing[i, j] + waiting
                if own >= least:  # it grows with j
                    break
                least = min(least, max(own, max(links.a[j] + need[j, l], need[i, j - 1])))
            need[i, l] = least
    return need


@kernel()
def first_of(i: int, n: int) -> int:
    """Of a chain of n links, where in a table sub-chain i..l is, less l."""
    return i * n - i * (i + 1) // 2


@kernel(fastmath=NO_NAN)
def fill(best: NDArray[np.float64], links: Links, need: NDArray[np.int64]) -> None:
    """best[block, first_of(i) + l, slot] = C(i,l,m) with m = block * WIDTH + slot, for all of them.

    Only those j are tried with which recompute may pay and fits: C(i,l,m) is at most keep(i,l,m) and C(i,l,m-1), and
    recompute(i,j,l,m) is at least the forwards of i..j-1 and every link once. Both ends of j move one way as m grows.
    """
    n = len(links.starts) - 1
    a, passed = links.a, links.passed
    once = _once(links)
    margin = ROUNDING * (once[0] + passed[n - 1])
    after = np.empty((n * (n + 1) // 2, WIDTH))  # C(j,l,m-a_j) + passed[j] of this block, j next to j for each l
    reach = np.empty((n, n), dtype=np.int32)  # from this j on recompute cannot pay
    allowed = np.empty((n, n), dtype=np.int32)  # from this j on the links passed over do not fit
    for i in range(n):
        reach[i], allowed[i] = np.arange(1, n + 1), i + 1
    row = np.empty(WIDTH)
    found = np.empty(WIDTH)
    for block in range(len(best)):
        low, table = block * WIDTH, best[block]
        for i in range(n - 1, -1, -1):
            first = first_of(i, n)
            for l in range(i, n):
                if i == l:
                    _end(links.ends, links.waiting[l], i, low, row)
                else:
                    _keep(best, links, need, i, l, low, row)
                column = l * (l + 1) // 2
                bound = row[0] if block == 0 else min(row[0], best[block - 1, first + l, WIDTH - 1])
                limit = bound + margin - (once[i] - once[l + 1]) + passed[i]
                end = reach[i, l]
                while end > i + 1 and passed[end - 1] > limit:
                    end -= 1
                reach[i, l] = end
                if end > i + 1:
                    fits, waiting = allowed[i, l], links.waiting[l]
                    while fits < end and links.passing[i, fits] + waiting <= low:
                        fits += 1
                    allowed[i, l] = fits
                    fits = min(fits, end)
                    _least(table[first + i : first + fits - 1], after[column + i + 1 : column + fits], found)
                    for j in range(fits, end):  # those that fit from a later slot of the block on
                        start = links.passing[i, j] + waiting - low
                        if start >= WIDTH:
                            break
                        for m in range(start, WIDTH):
                            found[m] = min(found[m], table[first + j - 1, m] + after[column + j, m])
                    for m in range(WIDTH):
                        row[m] = min(row[m], found[m] - passed[i])
                table[first + l] = row
                for m in range(WIDTH):
                    source = low + m - a[i]
                    if source < 0:
                        after[column + i, m] = np.inf
                    else:
                        after[column + i, m] = best[source // WIDTH, first + l, source % WIDTH] + passed[i]


@kernel()
def _once(links: Links) -> NDArray[np.float64]:
    """Seconds of every link once, forwards and backwards by its fastest option, summed from each link to the end."""
    n = len(links.starts) - 1
    once = np.zeros(n + 1)
    for i in range(n - 1, -1, -1):
        inside = links.seconds[links.starts[i] : links.starts[i + 1]].min()
        at_end = links.ends.seconds[links.ends.starts[i] : links.ends.starts[i + 1]].min()
        once[i] = once[i + 1] + min(inside, at_end)
    return once


@kernel(fastmath=NO_NAN)
def _keep(
    best: NDArray[np.float64],
    links: Links,
    need: NDArray[np.int64],
    i: int,
    l: int,
    low: int,
    row: NDArray[np.float64],
) -> None:
    """row[m] = keep(i,l,low+m) for i < l."""
    row[:] = np.inf
    at = first_of(i + 1, len(links.starts) - 1) + l
    for k in range(links.starts[i], links.starts[i + 1]):
        saved, seconds = links.saved[k], links.seconds[k]
        own = max(links.waiting[l] + links.forward[k], links.backward[k])
        start = max(own, saved + need[i + 1, l]) - low
        for m in range(max(start, 0), WIDTH):
            source = low + m - saved
            row[m] = min(row[m], seconds + best[source // WIDTH, at, source % WIDTH])


@kernel(fastmath=NO_NAN)
def _end(ends: LastOptions, waiting: int, i: int, low: int, row: NDArray[np.float64]) -> None:
    """row[m] = keep(i,i,low+m)."""
    row[:] = np.inf
    for k in range(ends.starts[i], ends.starts[i + 1]):
        start = max(waiting + ends.forward[k], ends.backward[k]) - low
        for m in range(max(start, 0), WIDTH):
            row[m] = min(row[m], ends.seconds[k])


@kernel(fastmath=NO_NAN)
def _least(left: NDArray[np.float64], right: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """out = (left + right).min(axis=0): nearly all of the time goes here, so the minima stay in registers."""
    m0 = m1 = m2 = m3 = m4 = m5 = m6 = m7 = np.inf
    for k in range(len(left)):
        m0 = min(m0, left[k, 0] + right[k, 0])
        m1 = min(m1, left[k, 1] + right[k, 1])
        m2 = min(m2, left[k, 2] + right[k, 2])
        m3 = min(m3, left[k, 3] + right[k, 3])
        m4 = min(m4, left[k, 4] + right[k, 4])
        m5 = min(m5, left[k, 5] + right[k, 5])
        m6 = min(m6, left[k, 6] + right[k, 6])
        m7 = min(m7, left[k, 7] + right[k, 7])
    out[0], out[1], out[2], out[3] = m0, m1, m2, m3
    out[4], out[5], out[6], out[7] = m4, m5, m6, m7
