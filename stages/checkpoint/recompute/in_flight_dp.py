"""The fastest schedule of a partition with k micro-batches in flight: what waits for its backward counts k times.

A partition is links i..l of a chain (chain.py, rotor.py: a, A, f, b, ft, bt, C). A micro-batch runs forwards, waits,
and runs backwards; while it waits it holds its input a_i and h more. T(i,l,h,m) is the least time of one micro-batch,
where at most h is held beside a_i, and m beside a_i while it runs (the gradient of a_{l+1} inside m):

    T(i,l,h,m) = min(keep:  min over options of f_i + b_i + T(i+1,l,h-A_{i+1},m-A_{i+1})   if m >= keep_floor(i,l)
                     ck j:  sum f_none_i..f_none_{j-1} + T(j,l,h-a_j,m-a_j) + C(i,j-1,m)   if m >= pass_floor(i,j,l)
                     drop:  sum f_none_i..f_none_l + C(i,l,m)      if m >= pass_floor(i,l+1,l), and l is not the loss)
    T(l+1,l,h,m) = 0 if h >= 0

    memory     with k in flight    k (h + a_i) + (m - h) <= room
    answer     least over h of T(i,l,h,m): `HoldTable.least`; as a nested region: `HoldTable.region`

Every step takes as much from h as from m, so m - h ("extra") stays what it is: for each extra one table over h serves
all partitions and all k (`in_flight_kernels.fill`), and C is the same recursion with the extra 0 and no drop. Equal
sub-chains (equal links in equal order) share a row. In slots the answer is exact when every extra is tried; with
`step` > 1 only each step-th is, which wastes fewer than `step` slots. One in flight, h free: T is C.
"""

# ruff: noqa: E741 - `l` is the last link of a sub-chain, as in T(i,l,h,m) above.
from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.checkpoint.recompute.chain import Chain
from stages.checkpoint.recompute.in_flight_kernels import Kinds, Numbers, fill, least_over_holds
from stages.checkpoint.recompute.schedule import Keep, Nesting

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def up_to(kinds: Kinds, length: int) -> Kinds:
    """Those of so many links at most, with the numbers they have."""
    count = int(np.searchsorted(kinds.last - kinds.first, length))
    return Kinds(np.where(kinds.of < count, kinds.of, -1), kinds.first[:count], kinds.last[:count])


def kinds_of(contents: Sequence[Hashable], longest: int | None = None) -> Kinds:
    """Sub-chains are of one kind where their links have equal contents in equal order."""
    n = len(contents)
    of = np.full((n + 1, n), -1, dtype=np.int64)
    known: dict[tuple[Hashable, int], int] = {}
    ends: list[tuple[int, int]] = []
    for length in range(1, min(n, longest or n) + 1):
        for i in range(n - length + 1):
            l = i + length - 1
            number = known.setdefault((contents[i], int(of[i + 1, l])), len(ends))
            of[i, l] = number
            if number == len(ends):
                ends.append((i, l))
    first, last = np.array(ends, dtype=np.int64).T
    return Kinds(of, np.ascontiguousarray(first), np.ascontiguousarray(last))


def contents_of(chain: Chain) -> list[Hashable]:
    """All numbers of each link, the loss included; two links with the same are the same to every schedule."""
    links = [
        (chain.a[i], chain.a[i + 1], chain.options(i), chain.f_none[i], chain.ft_none[i]) for i in range(chain.length)
    ]
    return [*links, ("loss", chain.a[-1], chain.b[-1], chain.bt[-1])]


def numbers_of(chain: Chain) -> Numbers:
    options = [(i, option) for i in range(chain.length + 1) for option in chain.options(i)]
    sizes = [[o.saved, o.saved + o.ft, chain.size(i) + chain.size(i + 1) + o.saved + o.bt] for i, o in options]
    saved, forward, backward = np.array(sizes, dtype=np.int64).T
    counts = [len(chain.options(i)) for i in range(chain.length + 1)]
    return Numbers(
        np.array([*chain.a, 0], dtype=np.int64),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.array([option.f + option.b for _, option in options], dtype=np.float64),
        np.ascontiguousarray(saved),
        np.ascontiguousarray(forward),
        np.ascontiguousarray(backward),
        passing_of(chain).astype(np.int64),
        np.array([0.0, *np.cumsum(chain.f_none)]),
    )


def passing_of(chain: Chain) -> Floats:
    """[i, j]: the most that F_ck(i), F_none(i+1..j-1) hold beside the gradient that waits and a_i."""
    n = chain.length
    output = np.array(chain.a[1:]) + np.array(chain.ft_none)
    both = output + np.array(chain.a[:-1])
    held = np.zeros((n + 1, n + 1))
    for i in range(n):
        held[i, i + 1 :] = np.maximum.accumulate([output[i], *both[i + 1 :]])
    return held


class HoldTable:
    """T of every distinct sub-chain of a chain, with sizes in slots of memory/slots bytes, rounded up."""

    def __init__(self, chain: Chain, memory: int, slots: int, kinds: Kinds | None = None, step: int = 1) -> None:
        self.kinds = kinds or kinds_of(contents_of(chain))
        self.memory, self.slots, self.step = memory, slots, step
        self.numbers = numbers_of(chain.whole(slots, memory))

    def in_slots(self, room: Floats) -> Ints:
        """Whole slots in so many bytes; none where there are less than no bytes."""
        whole = np.maximum(np.floor(np.minimum(room, self.memory)), -1).astype(np.int64)
        return np.asarray(whole * self.slots // self.memory)

    @cached_property
    def inner(self) -> Floats:
        """C of every kind, by slots."""
        rows = np.empty((len(self.kinds.first), self.slots + 1))
        fill(rows, rows, 0, False, self.kinds, self.numbers)
        return rows

    def least(self, flights: Sequence[int], rooms: Floats) -> tuple[Floats, Ints]:
        """For each kind and number in flight: the least time in `rooms[kind, flight]` bytes, and the extra for it."""
        slots = self.in_slots(rooms)
        best = np.full(slots.shape, math.inf)
        extras = np.zeros(slots.shape, dtype=np.int64)
        several = [n for n, k in enumerate(flights) if k > 1]
        for n, k in enumerate(flights):
            if k == 1:
                m = slots[:, n] - self.numbers.a[self.kinds.first]
                best[:, n] = np.where(m >= 0, self.inner[np.arange(len(m)), np.maximum(m, 0)], math.inf)
        if several and slots[:, several].max() >= 0:
            tried = np.arange(0, self.slots + 1, self.step)
            ways = np.array(flights, dtype=np.int64)[several]
            own = np.ascontiguousarray(slots[:, several])
            found = least_over_holds(self.inner, own, ways, tried, self.kinds, self.numbers)
            best[:, several], extras[:, several] = found
        return best, extras

    def region(self, i: int, l: int, flight: int, room: float, extra: int) -> Nesting:
        """The steps that attain the least time of links i..l."""
        slots = int(self.in_slots(np.array(room)))
        if flight == 1:
            return Nesting(self._steps(self.inner, i, l, slots - int(self.numbers.a[i]), 0))
        h = (slots - extra) // flight - int(self.numbers.a[i])
        rows = np.empty((len(self.kinds.first), h + 1))
        fill(rows, self.inner, extra, True, self.kinds, self.numbers)
        return Nesting(self._steps(rows, i, l, h, extra))

    def _steps(self, rows: Floats, i: int, l: int, h: int, extra: int) -> tuple[Keep | Nesting, ...]:
        steps: list[Keep | Nesting] = []
        while i <= l:
            seconds, step, j, cost = min(self._choices(rows, i, l, h, extra), key=lambda choice: choice[0])
            assert seconds < math.inf, "a finite entry of the table has a step that attains it"
            steps.append(step or Nesting(self._steps(self.inner, i, j - 1, h + extra, 0)))
            i, h = j, h - cost
        return tuple(steps)

    def _choices(self, rows: Floats, i: int, l: int, h: int, extra: int) -> list[tuple[float, Keep | None, int, int]]:
        """Every first step of links i..l: seconds with all that follows, what is kept, the link after, slots gone."""
        n, of, m = self.numbers, self.kinds.of, h + extra
        found: list[tuple[float, Keep | None, int, int]] = []
        for number, o in enumerate(range(n.starts[i], n.starts[i + 1])):
            if h >= n.saved[o] and m >= max(n.a[l + 1] + n.forward[o], n.backward[o]):
                rest = rows[of[i + 1, l], h - n.saved[o]] if i < l else 0.0
                found.append((n.seconds[o] + rest, Keep(i, number), i + 1, int(n.saved[o])))
        for j in range(i + 1, l + 1):
            if h >= n.a[j] and m >= n.passing[i, j] + n.a[l + 1]:
                after, again = rows[of[j, l], h - n.a[j]], self.inner[of[i, j - 1], m]
                found.append((n.passed[j] - n.passed[i] + after + again, None, j, int(n.a[j])))
        dropped = rows is not self.inner and l < len(n.passed) - 1
        if dropped and m >= n.passing[i, l + 1] + n.a[l + 1]:
            found.append((n.passed[l + 1] - n.passed[i] + self.inner[of[i, l], m], None, l + 1, 0))
        return found


def cut_chain(chain: Chain, first: int, last: int) -> Chain:
    """Links first..last as a chain of their own; unless the last is the loss, a loss that costs nothing is added.

    As links 0..last-first of the new chain they have the schedules they had; the loss alone is not a chain.
    """
    end = min(last + 1, chain.length)
    loss = last == chain.length

    def both(values: tuple[float, ...]) -> tuple[float, ...]:
        return (*values[first:end], values[end] if loss else 0.0)

    parts = {name: getattr(chain, name)[first:end] for name in ("saved", "f", "ft", "f_none", "ft_none", "more")}
    ends: dict[str, Any] = {name: both(getattr(chain, name)) for name in ("b", "bt", "grown")}
    return replace(chain, a=chain.a[first : end + 1], last=chain.last[first:end], **ends, **parts)
