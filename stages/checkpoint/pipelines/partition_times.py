"""What each run of links of a submesh's plan takes as a partition, with so many micro-batches in flight.

`PartitionTimes` gives the seconds of every partition at once for the search, and the schedule of one: searched for, or
as the user wants it (`fixed`). Bytes a partition has:

    resident + everywhere + k held + (k-1) hold + peak + buffers + loss  <=  memory * share

`resident` belongs to its links (parameters, gradients, optimizer state), `everywhere` to any partition, `held` to each
micro-batch in flight (common values), hold and peak to its schedule (in_flight.py), and `share` is what one of several
partitions on a device may have. Buffers: what a partition sends, if asked (`Sent`). A micro-batch in flight keeps its
output, which `hold` may not have, and the gradient of an input is there until the next one is sent; in the schedules of
`torch.distributed.pipelining` that are run action by action, all that was sent is there until the step ends. The loss
may hold more than its input between forward and backward (`SubmeshPlan.loss_held`), once for each that waits.
"""

# ruff: noqa: E741 - `l` is the last link of a sub-chain.
from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property

import numpy as np

from shardwright.stages.checkpoint.pipelines.fixed_schedules import (
    FixedSchedule,
    dropped_schedule,
    kept_schedule,
    marked_region,
    marked_schedule,
    marks_of,
)
from shardwright.stages.checkpoint.pipelines.submesh_plans import Recompute, Sent, SubmeshPlan, Terms
from shardwright.stages.checkpoint.recompute.in_flight import PartitionRun, drop_all, keep_all, run_partition
from shardwright.stages.checkpoint.recompute.in_flight_dp import HoldTable, cut_chain
from shardwright.stages.checkpoint.recompute.kernels import Floats, Ints, Kinds, Shorts, contents_of, kinds_of
from shardwright.stages.checkpoint.recompute.schedule import Keep, Nesting

FINE_SLOTS = 1000  # for a partition that has been chosen


class PartitionTimes:
    def __init__(self, submesh: SubmeshPlan, terms: Terms) -> None:
        self.submesh, self.terms, self.chain = submesh, terms, submesh.chain
        self.marks = marks_of(terms.spans, submesh.chain)
        self.owned, self.waiting = (np.concatenate([[0.0], np.cumsum(x)]) for x in (submesh.resident, submesh.held))
        self._schedules: dict[tuple[int, int], tuple[int, Nesting, PartitionRun]] = {}
        self._tables: dict[int, HoldTable] = {}  # by the longest sub-chain
        self._solved: dict[tuple[int, ...], tuple[HoldTable, Floats, Ints]] = {}

    @cached_property
    def kinds(self) -> Kinds:
        """Of partitions whose parameters alone are not too much."""
        n = self.submesh.links
        room = self.terms.memory * self.terms.share - self.submesh.everywhere
        fitting = [np.searchsorted(self.owned, self.owned[i] + room, side="right") - 1 - i for i in range(n)]
        contents: list[Hashable] = [
            (link, self.submesh.resident[i], self.submesh.held[i], i == 0, self.marks[i])
            for i, link in enumerate(contents_of(self.chain))
        ]
        return kinds_of(contents, max(1, int(max(fitting))))

    @cached_property
    def kept(self) -> FixedSchedule:
        return kept_schedule(self.chain, self.kinds)

    @cached_property
    def dropped(self) -> FixedSchedule:
        return dropped_schedule(self.chain, self.kinds, self.kept)

    @cached_property
    def fixed(self) -> FixedSchedule | None:
        """The schedule of all partitions, whether it fits or not; None where the fastest of each is searched for."""
        recompute = self.terms.recompute
        if recompute is Recompute.MARKED:
            return marked_schedule(self.chain, self.kinds, self.marks)
        if recompute is Recompute.EXCEPT_LAST and self.terms.micro_batches > 1:
            return replace(self.dropped, last=self.kept)
        if recompute is Recompute.SOLVED:
            return None
        return self.dropped if recompute is Recompute.ALWAYS else self.kept

    def room(self, i: int, l: int, flight: int) -> float:
        """Bytes for the schedule of links i..l."""
        return float(self.rooms(np.array([i]), np.array([l]), (flight,))[0, 0])

    def rooms(self, i: Ints | Shorts, l: Ints | Shorts, flights: tuple[int, ...]) -> Floats:
        """[sub-chain, flight]"""
        terms, loss, k = self.terms, self.chain.length, np.array(flights)
        sizes = np.array([*self.chain.a, 0.0])
        left = np.full((len(i), len(k)), float(math.floor(terms.memory * terms.share)))
        left -= self.submesh.everywhere + (self.owned[l + 1] - self.owned[i])[:, None]
        left -= k * (self.submesh.everywhere_held + self.waiting[l + 1] - self.waiting[i])[:, None]
        if terms.sent is not Sent.UNCOUNTED:
            every, before = terms.sent is Sent.TO_THE_END, terms.micro_batches - k
            left -= np.where(i > 0, sizes[i], 0.0)[:, None] * (before if every else np.minimum(before, 1))
            left -= np.where(l < loss, sizes[l + 1], 0.0)[:, None] * (terms.micro_batches - 1 if every else k - 1)
        return np.asarray(left - np.where(l == loss, self.submesh.loss_held, 0.0)[:, None] * (k - 1))

    def seconds(self, flights: tuple[int, ...], slowest: float = math.inf, roughly: bool = False) -> Floats:
        """[flight, last link, first link]: of a micro-batch, infinite where it does not fit.

        Roughly: recompute nothing or everything. Partitions that must be slower than `slowest` may be given as slower
        than they are.
        """
        of = self.kinds.of[:-1]
        best = self._best(flights, slowest, roughly)
        return np.where(of >= 0, best.T[:, of], math.inf).transpose(0, 2, 1)

    def _best(self, flights: tuple[int, ...], slowest: float, roughly: bool) -> Floats:
        """[kind, flight]"""
        rooms, ways = self.rooms(self.kinds.first, self.kinds.last, flights), np.array(flights)
        if self.fixed is not None:
            return np.where(self.fixed.memory(ways) <= rooms, self.fixed.time[:, None], math.inf)
        fits = self.kept.memory(ways) <= rooms
        dropped = np.where(self.dropped.memory(ways) <= rooms, self.dropped.time[:, None], math.inf)
        best = np.minimum(np.where(fits, self.kept.time[:, None], math.inf), dropped)
        rooms[fits] = -1  # nothing is faster
        length = self._longest(slowest)
        some = self.kinds.last - self.kinds.first < length
        if not roughly and np.any(rooms[some] >= 0):
            if length not in self._tables:
                slots = self.terms.slots.of(length)
                kinds, step = self.kinds.up_to(length), self.terms.slots.step_of(slots)
                self._tables[length] = HoldTable(self.chain, self.terms.memory, slots, kinds, step)
            table = self._tables[length]
            found = table.least(flights, rooms[some])
            self._solved[flights] = table, *found
            best[some] = np.minimum(best[some], found[0])
        return best

    def _longest(self, slowest: float) -> int:
        """Links of the longest sub-chain that may be as fast as that."""
        least = np.cumsum([0.0, *(min(o.f + o.b for o in self.chain.options(i)) for i in range(self.submesh.links))])
        fast = least[self.kinds.last + 1] - least[self.kinds.first] <= slowest * (1 + 1e-9)
        return int((self.kinds.last - self.kinds.first + 1)[fast].max(initial=1))

    def schedule(self, i: int, l: int, flight: int) -> tuple[Nesting, PartitionRun]:
        """How links i..l run: as it is fixed, else the fastest known schedule that fits, checked by running it."""
        key = int(self.kinds.of[i, l]), flight
        if key not in self._schedules:
            room = math.inf if self.fixed else self.room(i, l, flight)
            ways = [(region, run_partition(self.chain, region, i, l)) for region in self._regions(i, l, flight, room)]
            fitting = (way for way in ways if way[1].memory(flight) <= room)
            self._schedules[key] = i, *min(fitting, key=lambda way: (way[1].time, way[1].memory(flight)))
        first, region, passage = self._schedules[key]
        return _moved(region, i - first), passage

    def last_passage(self, i: int, l: int) -> PartitionRun | None:
        """Links i..l as the last micro-batch runs them; None where it runs as those before it."""
        keeps_last = self.fixed is not None and self.fixed.last is not None
        return run_partition(self.chain, keep_all(i, l), i, l) if keeps_last else None

    def _regions(self, i: int, l: int, flight: int, room: float) -> list[Nesting]:
        """The one that is fixed; else all kept if that fits, or all dropped and what tables say."""
        kept, dropped = keep_all(i, l), drop_all(i, l, self.chain.length)
        if self.terms.recompute is Recompute.MARKED:
            return [marked_region(self.marks, i, l)]
        if self.fixed is not None:
            return [kept if self.fixed is self.kept else dropped]
        if run_partition(self.chain, kept, i, l).memory(flight) <= room or i == self.chain.length:
            return [kept]
        found = [dropped]
        for flights, (table, best, extras) in self._solved.items():  # those that the search has used
            kind = table.kinds.of[i, l]
            if flight in flights and kind >= 0 and best[kind, flights.index(flight)] < math.inf:
                extra = int(extras[kind, flights.index(flight)])
                found.append(table.region(i, l, flight, room, extra))
        return [*found, *self._finer(i, l, flight, room)]

    def _finer(self, i: int, l: int, flight: int, room: float) -> list[Nesting]:
        """By a table for this partition alone."""
        slots = self.terms.slots.finer(FINE_SLOTS)
        count = slots.of(l - i + 1)
        table = HoldTable(cut_chain(self.chain, i, l), max(1, math.floor(room)), count, step=slots.step_of(count))
        best, extras = table.least((flight,), np.full((len(table.kinds.first), 1), room))
        kind = table.kinds.of[0, l - i]
        if best[kind, 0] == math.inf:
            return []
        return [_moved(table.region(0, l - i, flight, room, int(extras[kind, 0])), i)]


def _moved(region: Nesting, by: int) -> Nesting:
    """The same with every link's number so much higher."""
    return Nesting(
        tuple(
            Keep(step.link + by, step.option) if isinstance(step, Keep) else _moved(step, by) for step in region.steps
        )
    )
