"""A chain as arrays, and the inner loops on it, compiled by numba on first use and kept on disk.

rotor.py and in_flight_dp.py have the recurrences; `fill` serves both, as C is T with nothing extra and no drop.

Memory goes in blocks of `WIDTH` slots, and a table is [block, kind of sub-chain, slot in the block]. What an entry
reads has at most as many slots: so the blocks are filled one after the other, and what the minimum over j reads of one
stays in the cache. Times are float64: float32 would halve the table, but not tell two schedules apart whose times
differ by a millionth.
"""

# ruff: noqa: E741 - `l` is the last link of a sub-chain, as in C(i,l,m).
from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.pipeline.base.kernel_cache import kernel
from shardwright.stages.checkpoint.recompute.chain import Chain, ChainError, Option

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Shorts = NDArray[np.int32]  # what `fill` reads for every entry is to stay in the cache

WIDTH = 8  # slots of a block: their minima fill the registers; `_least` spells them out
ROUNDING = 1e-12  # of all times together: more than sums in another order differ by
NO_NAN = {"nnan", "nsz"}  # fastmath: infinite times occur, and they stay exact
MAX_SIZE = 2**59  # so that the sum of a few is a whole number of 64 bits


class KeepOptions(NamedTuple):
    """The ways to keep each link: those of link i are starts[i]..starts[i+1]-1."""

    starts: Ints
    seconds: Floats  # f + b
    saved: Ints
    forward: Ints  # what F_all holds beside the gradient that waits
    backward: Ints  # what B holds


class Links(NamedTuple):
    """A chain of whole sizes as arrays; the loss is the last link."""

    a: Ints  # a_0..a_{L+1}
    waiting: Ints  # [l]: what is there whenever links up to l run once those after it are done
    passing: Ints  # [i, j]: what F_ck(i), F_none(i+1..j-1) hold beside the gradient that waits
    passed: Floats  # seconds of the forwards that save nothing, summed up to each link
    options: KeepOptions
    ends: KeepOptions  # that links have as the last of a sub-chain


class Kinds(NamedTuple):
    """The distinct sub-chains: `of[i, l]` is the kind of links i..l (-1: none, or too long), in the order of `fill`."""

    of: Shorts
    first: Shorts  # of each kind, the one of its sub-chains that begins last
    last: Shorts
    read: Shorts  # [number, 2]: i and l of these, and of the sub-chains that they are made of

    def up_to(self, length: int) -> Kinds:
        """Those of so many links at most."""
        short = self.last - self.first < length
        numbers = np.where(short, np.cumsum(short) - 1, -1)
        return _kinds(np.where(self.of < 0, -1, numbers[self.of]).astype(np.int32), self.first[short], self.last[short])


def _kinds(of: Shorts, first: Shorts, last: Shorts) -> Kinds:
    """A sub-chain is read by longer ones that begin or end with the same link."""
    n = of.shape[1]
    highest, lowest = np.full(n, -1), np.full(n, n)
    np.maximum.at(highest, first, last)
    np.minimum.at(lowest, last, first)
    i, l = np.nonzero(of[::-1] >= 0)
    i = n - i
    some = (l <= highest[i]) | (i > lowest[l])
    return Kinds(of, first, last, np.column_stack([i[some], l[some]]).astype(np.int32))


def links_of(chain: Chain) -> Links:
    a = _sizes([*chain.a, 0])
    grown = _sizes([chain.grown_after(i) for i in range(chain.length + 1)])
    around = a[:-1] + a[1:] + grown  # of each link: its gradients, and what links after it have left
    every = range(chain.length + 1)
    return Links(
        a=a,
        waiting=a[1:] + grown,
        passing=passing(a, _sizes(chain.ft_none)),
        passed=np.array([0.0, *np.cumsum(chain.f_none)]),
        options=_options([chain.options(i) for i in every], around),
        ends=_options([chain.ends(i) for i in every], around),
    )


def _options(options: list[tuple[Option, ...]], around: Ints) -> KeepOptions:
    starts = np.cumsum([0, *map(len, options)], dtype=np.int64)
    saved, ft, bt = _sizes([(o.saved, o.ft, o.bt) for link in options for o in link]).T.copy()
    seconds = np.array([o.f + o.b for link in options for o in link], dtype=np.float64)
    return KeepOptions(starts, seconds, saved, saved + ft, np.repeat(around, np.diff(starts)) + saved + bt)


def _sizes(sizes: Sequence[float] | Sequence[tuple[float, ...]]) -> Ints:
    found = np.array(sizes, dtype=np.float64)
    if found.max() >= MAX_SIZE:
        raise ChainError(f"a size of {found.max():.3g} is too large", where="chain", remedy="give more memory or less")
    return np.array(sizes, dtype=np.int64)


def kinds_of(contents: Sequence[Hashable], longest: int | None = None) -> Kinds:
    """Sub-chains are of one kind where their links have equal contents in equal order."""
    n, count = len(contents), 0
    numbers = {content: number for number, content in enumerate(contents)}
    own = np.array([numbers[content] for content in contents])
    of = np.full((n + 1, n), -1, dtype=np.int32)
    equal = np.zeros(n + 1, dtype=np.int64)  # [k]: so many links from i on are as those from k on
    firsts, lasts = [], []
    for i in reversed(range(n)):
        equal[i + 1 : n] = np.where(own[i + 1 :] == own[i], equal[i + 2 :] + 1, 0)
        k, stop = i + 1 + int(np.argmax(equal[i + 1 :])), min(n, i + (longest or n))
        known = min(int(equal[k]), stop - i)
        of[i, i : i + known] = of[k, k : k + known]
        of[i, i + known : stop] = np.arange(count, count + stop - i - known)
        firsts.append(np.full(stop - i - known, i, dtype=np.int32))
        lasts.append(np.arange(i + known, stop, dtype=np.int32))
        count += stop - i - known
    return _kinds(of, np.concatenate(firsts), np.concatenate(lasts))


def contents_of(chain: Chain) -> list[Hashable]:
    """All numbers of each link, the loss included; two links with the same are the same to every schedule."""
    grown = np.cumsum((*chain.grown, 0)[:0:-1])[::-1].tolist()  # by the links after each
    links = [
        (chain.a[i], chain.a[i + 1], chain.options(i), chain.ends(i), chain.f_none[i], chain.ft_none[i], grown[i])
        for i in range(chain.length)
    ]
    return [*links, ("loss", chain.a[-1], chain.b[-1], chain.bt[-1])]


@kernel()
def passing(a: NDArray[Any], ft_none: NDArray[Any]) -> NDArray[Any]:
    """`Links.passing`."""
    n = len(ft_none) + 1
    held = np.zeros((n, n), dtype=a.dtype)
    for i in range(n - 1):
        held[i, i + 1] = a[i + 1] + ft_none[i]
        for k in range(i + 1, n - 1):
            held[i, k + 1] = max(held[i, k], a[k] + a[k + 1] + ft_none[k])
    return held


@kernel()
def needs(links: Links) -> Ints:
    """N(i,l) at [i, l]."""
    n, options, ends = len(links.waiting), links.options, links.ends
    need = np.zeros((n + 1, n), dtype=np.int64)
    for i in range(n - 1, -1, -1):
        for l in range(i, n):
            waiting = links.waiting[l]
            least = _need_to_keep(options, i, waiting, need[i + 1, l]) if i < l else _need_to_keep(ends, i, waiting, 0)
            for j in range(i + 1, l + 1):
                own = links.passing[i, j] + waiting
                if own >= least:  # it grows with j
                    break
                least = min(least, max(own, max(links.a[j] + need[j, l], need[i, j - 1])))
            need[i, l] = least
    return need


@kernel()
def _need_to_keep(options: KeepOptions, i: int, waiting: int, rest: int) -> int:
    """By the option of link i that needs the least, beside which the links after it need `rest`."""
    least = 2**63 - 1
    for k in range(options.starts[i], options.starts[i + 1]):
        own = max(waiting + options.forward[k], options.backward[k])
        least = min(least, max(own, options.saved[k] + rest))
    return least


@kernel(fastmath=NO_NAN)
def fill(rows: Floats, inner: Floats, extra: int, drop: bool, kinds: Kinds, links: Links, need: Ints) -> None:
    """rows[block, u, slot] = T(i,l,h,h+extra) with h = block * WIDTH + slot, for every distinct sub-chain u = i..l.

    `inner` is C; with `rows` for it, nothing extra and no drop this is C(i,l,h). Only those j are tried with which
    recompute may pay and fits: T(i,l,h) is at most keep(i,l,h) and T(i,l,h-1), and recompute(i,j,l,h) is at least the
    forwards of i..j-1 and every link once. Both ends of j move one way as h grows.
    """
    a, passed, held = links.a, links.passed, links.passing  # what is taken out of a tuple in a loop costs time
    n, waits, options, ends, of, first = len(a) - 1, links.waiting, links.options, links.ends, kinds.of, kinds.first
    pairs, once = kinds.read, _once(links)
    margin = ROUNDING * (once[0] + passed[n - 1])
    again = np.empty((n, WIDTH))  # [l]: C(i,l,h+extra) of this block and i
    after = np.empty((n * (n + 1) // 2, WIDTH))  # T(j,l,h-a_j) + passed[j] of this block, j next to j for each l
    reach = kinds.last + np.int32(1)  # from this j on recompute cannot pay
    allowed = kinds.first + np.int32(1)  # from this j on the links passed over do not fit
    row, found = np.empty(WIDTH), np.empty(WIDTH)
    for block in range(len(rows)):
        low, table = block * WIDTH, rows[block]
        for number in range(len(pairs)):
            i, l = pairs[number, 0], pairs[number, 1]
            u, column = of[i, l], l * (l + 1) // 2
            if drop:
                for m in range(WIDTH):  # what lies past the end of a table belongs to no hold
                    source = min(low + m + extra, len(inner) * WIDTH - 1)
                    again[l, m] = inner[source // WIDTH, u, source % WIDTH]
            if first[u] == i:
                for m in range(WIDTH):  # numba takes seconds to compile an assignment of a whole array
                    row[m] = np.inf
                if low + WIDTH + extra > need[i, l]:
                    if i == l:
                        _keep(row, rows, ends, (i, -1), waits[l], low, extra)
                    else:
                        _keep(row, rows, options, (i, of[i + 1, l]), waits[l], low, extra)
                    bound = row[0] if block == 0 else min(row[0], rows[block - 1, u, WIDTH - 1])
                    limit = bound + margin - (once[i] - once[l + 1]) + passed[i]
                    end, fits, beside = reach[u], allowed[u], waits[l] - low - extra
                    while end > i + 1 and passed[end - 1] > limit:
                        end -= 1
                    while fits < end and held[i, fits] + beside <= 0:
                        fits += 1
                    reach[u], allowed[u], fits = end, fits, min(fits, end)
                    _least(again[i : fits - 1], after[column + i + 1 : column + fits], found)
                    for j in range(fits, end):  # those that fit from a later slot of the block on
                        if held[i, j] + beside >= WIDTH:
                            break
                        for m in range(max(held[i, j] + beside, 0), WIDTH):
                            found[m] = min(found[m], again[j - 1, m] + after[column + j, m])
                    for m in range(WIDTH):
                        row[m] = min(row[m], found[m] - passed[i])
                    if drop and l < n - 1:
                        for m in range(max(held[i, l + 1] + beside, 0), WIDTH):
                            row[m] = min(row[m], again[l, m] + passed[l + 1] - passed[i])
                for m in range(WIDTH):
                    table[u, m] = row[m]
            for m in range(WIDTH):
                if not drop:
                    again[l, m] = table[u, m]
                source = low + m - a[i]
                after[column + i, m] = np.inf if source < 0 else rows[source // WIDTH, u, source % WIDTH] + passed[i]


@kernel()
def _once(links: Links) -> Floats:
    """Seconds of every link once, forwards and backwards by its fastest option, summed from each link to the end."""
    n, inside, at_end = len(links.waiting), links.options, links.ends
    once = np.zeros(n + 1)
    for i in range(n - 1, -1, -1):
        least = inside.seconds[inside.starts[i] : inside.starts[i + 1]].min()
        once[i] = once[i + 1] + min(least, at_end.seconds[at_end.starts[i] : at_end.starts[i + 1]].min())
    return once


@kernel(fastmath=NO_NAN)
def _keep(
    row: Floats, rows: Floats, options: KeepOptions, place: tuple[int, int], waiting: int, low: int, extra: int
) -> None:
    """row[m] = keep(i,l,low+m); `place` is i and the kind of i+1..l, -1 where there is none."""
    i, after = place
    for k in range(options.starts[i], options.starts[i + 1]):
        seconds, saved = options.seconds[k], options.saved[k]
        start = max(saved, max(waiting + options.forward[k], options.backward[k]) - extra) - low
        for m in range(max(start, 0), WIDTH):
            source = low + m - saved
            rest = rows[source // WIDTH, after, source % WIDTH] if after >= 0 else 0.0
            row[m] = min(row[m], seconds + rest)


@kernel(fastmath=NO_NAN)
def _least(left: Floats, right: Floats, out: Floats) -> None:
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


@kernel()
def least_over_holds(
    inner: Floats, rooms: Ints, flights: Ints, extras: Ints, kinds: Kinds, links: Links, need: Ints
) -> tuple[Floats, Ints]:
    """For sub-chain u and flight k (at least 2): the least T over every hold, and the `extra` that attains it.

    Hold h with m = h + extra needs k (h + a_i) + extra slots; `rooms[u, n]` are there with `flights[n]` in flight.
    """
    best = np.full(rooms.shape, np.inf)
    where = np.zeros(rooms.shape, dtype=np.int64)
    most, fewest = rooms.max(), flights.min()
    table = np.empty((max(most, 0) // fewest // WIDTH + 1, len(rooms), WIDTH))
    for extra in extras:
        if extra > most:
            break
        rows = table[: (most - extra) // fewest // WIDTH + 1]
        fill(rows, inner, extra, True, kinds, links, need)
        for u in range(len(rooms)):
            for n in range(len(flights)):
                h = (rooms[u, n] - extra) // flights[n] - links.a[kinds.first[u]]
                if h >= 0 and rooms[u, n] >= extra and rows[h // WIDTH, u, h % WIDTH] < best[u, n]:
                    best[u, n] = rows[h // WIDTH, u, h % WIDTH]
                    where[u, n] = extra
    return best, where
