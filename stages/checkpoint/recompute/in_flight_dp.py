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
all partitions and all k (`kernels.fill`), and C is the same recursion with the extra 0 and no drop. Equal
sub-chains (equal links in equal order) share a row. In slots the answer is exact when every extra is tried; with
`step` > 1 only each step-th is, which wastes fewer than `step` slots. One in flight, h free: T is C.
"""

# ruff: noqa: E741 - `l` is the last link of a sub-chain, as in T(i,l,h,m) above.
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardwright.stages.checkpoint.recompute import rotor
from shardwright.stages.checkpoint.recompute.chain import Chain, discretise
from shardwright.stages.checkpoint.recompute.kernels import WIDTH, Floats, Ints, Kinds, least_over_holds
from shardwright.stages.checkpoint.recompute.schedule import Nesting


class HoldTable:
    """T of every distinct sub-chain of a chain, with sizes in slots of memory/slots bytes, rounded up."""

    def __init__(self, chain: Chain, memory: int, slots: int, kinds: Kinds | None = None, step: int = 1) -> None:
        self.memory, self.slots, self.step = memory, slots, step
        self.inner = rotor.solve(discretise(chain, memory, slots), kinds=kinds)
        self.kinds, self.links = self.inner.kinds, self.inner.floors.links

    def in_slots(self, room: Floats) -> Ints:
        """Whole slots in so many bytes; none where there are less than no bytes."""
        whole = np.maximum(np.floor(np.minimum(room, self.memory)), -1).astype(np.int64)
        return np.asarray(whole * self.slots // self.memory)

    def least(self, flights: Sequence[int], rooms: Floats) -> tuple[Floats, Ints]:
        """For each kind and number in flight: the least time in `rooms[kind, flight]` bytes, and the extra for it."""
        slots = self.in_slots(rooms)
        best = np.full(slots.shape, math.inf)
        extras = np.zeros(slots.shape, dtype=np.int64)
        several = [n for n, k in enumerate(flights) if k > 1]
        for n, k in enumerate(flights):
            if k == 1:
                m = slots[:, n] - self.links.a[self.kinds.first]
                some = np.flatnonzero(m >= 0)
                best[some, n] = self.inner.best[m[some] // WIDTH, some, m[some] % WIDTH]
        if several:
            tried = np.arange(0, self.slots + 1, self.step)
            ways = np.array(flights, dtype=np.int64)[several]
            own = np.ascontiguousarray(slots[:, several])
            need = self.inner.floors.need
            found = least_over_holds(self.inner.best, own, ways, tried, self.kinds, self.links, need)
            best[:, several], extras[:, several] = found
        return best, extras

    def region(self, i: int, l: int, flight: int, room: float, extra: int) -> Nesting:
        """The steps that attain the least time of links i..l."""
        slots = int(self.in_slots(np.array(room)))
        return self.inner.region(i, l, (slots - extra) // flight - int(self.links.a[i]), extra)


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
