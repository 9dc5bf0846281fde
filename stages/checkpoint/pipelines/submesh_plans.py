"""A plan on a piece of the cluster: what each run of links costs as a partition, with so many micro-batches in flight.

`Timer` gives the seconds of every partition at once for the search, and the schedule of one. Bytes a partition has:

    resident + everywhere + k held + (k-1) hold + peak + buffers + loss  <=  memory * share

`resident` belongs to its links (parameters, gradients, optimizer state), `everywhere` to any partition, `held` to each
micro-batch in flight (common values), hold and peak to its schedule (in_flight.py), and `share` is what one of several
partitions on a device may have. Buffers: what a partition sends, if asked (`Sent`). A micro-batch in flight keeps its
output, which `hold` may not have, and the gradient of an input is there until the next one is sent; in the schedules of
`torch.distributed.pipelining` that are run action by action, all that was sent is there until the step ends. The loss
may hold more than its input between forward and backward (`Piece.loss_held`), once for each that waits.
"""

# ruff: noqa: E741 - `l` is the last link of a sub-chain.
from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stages.checkpoint.recompute.chain import SLOTS, Chain, ChainError, Slots
from stages.checkpoint.recompute.in_flight import Passage, drop_all, keep_all, run_partition
from stages.checkpoint.recompute.in_flight_dp import HoldTable, contents_of, cut_chain, kinds_of, passing_of, up_to
from stages.checkpoint.recompute.in_flight_kernels import Kinds
from stages.checkpoint.recompute.schedule import Keep, Nesting

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FINE_SLOTS = 1000  # for a partition that has been chosen


class Recompute(Enum):
    """What a partition computes again: the best within the memory, or one of GPipe's three."""

    SOLVED = "solved"
    NEVER = "never"
    ALWAYS = "always"  # all of it, from its input
    EXCEPT_LAST = "except_last"  # the same, but for the last micro-batch
    MARKED = "marked"  # the spans of links that are given, as far as they lie in it


class Sent(Enum):
    """How long what a partition sends stays in its memory."""

    UNCOUNTED = "uncounted"
    UNTIL_THE_NEXT = "until the next"
    TO_THE_END = "to the end of the step"


@dataclass(frozen=True)
class Piece:
    """A plan of the whole model on a mesh of some devices, priced for one size of micro-batch.

    Link i of the chain, the loss included, has `resident[i]` bytes on each device and `once[i]` seconds once a step
    (gradient sums, optimizer); `weight[i]` seconds of its backward make weight gradients. It holds `held[i]` bytes
    beside the chain for each micro-batch in flight, and `put_off[i]` more while its weight gradients are put off
    (zero_bubble). `crosses[i]` bytes beside its input cross a cut before it. () is none.
    """

    name: str
    devices: int
    chain: Chain
    resident: tuple[float, ...]
    once: tuple[float, ...] = ()
    weight: tuple[float, ...] = ()
    mesh: str = ""  # partitions on the same devices (interleaved) have plans of one mesh
    loss_held: float = 0.0
    held: tuple[float, ...] = ()
    put_off: tuple[float, ...] = ()
    crosses: tuple[float, ...] = ()
    everywhere: float = 0.0  # bytes of any partition
    everywhere_held: float = 0.0  # and for each of its micro-batches in flight

    def __post_init__(self) -> None:
        links = self.chain.length + 1
        for name in ("resident", "once", "weight", "held", "put_off", "crosses"):
            values = tuple(getattr(self, name)) or (0.0,) * links
            object.__setattr__(self, name, values)
            if len(values) != links or not all(math.isfinite(x) and x >= 0 for x in values):
                raise ChainError(f"{name} needs {links} numbers that are not negative", where=f"piece {self.name}")
        if self.devices < 1:
            raise ChainError("a piece has at least one device", where=f"piece {self.name}")

    def putting_off(self) -> Piece:
        """As any micro-batch in flight may have put off its weight gradients."""
        held = tuple(a + b for a, b in zip(self.held, self.put_off, strict=True))
        return replace(self, held=held, put_off=())

    @property
    def links(self) -> int:
        """The loss included."""
        return self.chain.length + 1


@dataclass(frozen=True)
class Terms:
    """Under which a partition runs."""

    memory: int  # of a device
    micro_batches: int
    recompute: Recompute = Recompute.SOLVED
    share: float = 1.0  # of the memory
    sent: Sent = Sent.UNCOUNTED
    slots: Slots = SLOTS
    spans: tuple[tuple[int, int], ...] = ()  # first and last links of what MARKED recomputes


@dataclass(frozen=True, eq=False)
class FixedSchedule:
    """A fixed schedule of every kind of sub-chain: seconds, and bytes with the input."""

    time: Floats
    hold: Floats
    peak: Floats

    def memory(self, flights: Ints) -> Floats:
        """[kind, flight]"""
        return np.asarray((flights - 1) * self.hold[:, None] + self.peak[:, None])


class Timer:
    """The seconds and the schedules of a piece's partitions."""

    def __init__(self, piece: Piece, terms: Terms) -> None:
        self.piece, self.terms, self.chain = piece, terms, piece.chain
        self.owned, self.waiting = (np.concatenate([[0.0], np.cumsum(x)]) for x in (piece.resident, piece.held))
        self._tables: dict[int, HoldTable] = {}  # by the longest sub-chain
        self._solved: dict[tuple[int, ...], tuple[HoldTable, Floats, Ints]] = {}
        self._schedules: dict[tuple[int, int], tuple[int, Nesting, Passage]] = {}

    @cached_property
    def kinds(self) -> Kinds:
        """Of partitions whose parameters alone are not too much."""
        n = self.piece.links
        room = self.terms.memory * self.terms.share - self.piece.everywhere
        fitting = [np.searchsorted(self.owned, self.owned[i] + room, side="right") - 1 - i for i in range(n)]
        contents: list[Hashable] = [
            (link, self.piece.resident[i], self.piece.held[i], i == 0, self._marks[i])
            for i, link in enumerate(contents_of(self.chain))
        ]
        return kinds_of(contents, max(1, int(max(fitting))))

    # ------------------------------------------------------------------------------------------------------- memory

    def room(self, i: int, l: int, flight: int) -> float:
        """Bytes for the schedule of links i..l."""
        return float(self._rooms(np.array([i]), np.array([l]), (flight,))[0, 0])

    def _rooms(self, i: Ints, l: Ints, flights: tuple[int, ...]) -> Floats:
        """[sub-chain, flight]"""
        terms, loss, k = self.terms, self.chain.length, np.array(flights)
        sizes = np.array([*self.chain.a, 0.0])
        left = np.full((len(i), len(k)), float(math.floor(terms.memory * terms.share)))
        left -= self.piece.everywhere + (self.owned[l + 1] - self.owned[i])[:, None]
        left -= k * (self.piece.everywhere_held + self.waiting[l + 1] - self.waiting[i])[:, None]
        if terms.sent is not Sent.UNCOUNTED:
            every, before = terms.sent is Sent.TO_THE_END, terms.micro_batches - k
            left -= np.where(i > 0, sizes[i], 0.0)[:, None] * (before if every else np.minimum(before, 1))
            left -= np.where(l < loss, sizes[l + 1], 0.0)[:, None] * (terms.micro_batches - 1 if every else k - 1)
        return np.asarray(left - np.where(l == loss, self.piece.loss_held, 0.0)[:, None] * (k - 1))

    # --------------------------------------------------------------------------------------------------------- time

    def seconds(self, flights: tuple[int, ...], slowest: float = math.inf, roughly: bool = False) -> Floats:
        """[flight, last link, first link]: of a micro-batch, infinite where it does not fit.

        Roughly: recompute nothing or everything. Partitions that must be slower than `slowest` may be given as slower
        than they are.
        """
        of = self.kinds.of[:-1]
        best = self._best(flights, slowest, roughly)
        return np.where(of >= 0, best.T[:, of], math.inf).transpose(0, 2, 1)

    def _best(self, flights: tuple[int, ...], slowest: float, roughly: bool) -> Floats:
        rooms, ways = self._rooms(self.kinds.first, self.kinds.last, flights), np.array(flights)
        if self.terms.recompute is not Recompute.SOLVED:
            fits = self._fixed_memory(ways) <= rooms
            return np.where(fits, self._fixed.time[:, None], math.inf)
        fits = self.kept.memory(ways) <= rooms
        kept, dropped = (
            np.where(ok, form.time[:, None], math.inf)
            for ok, form in ((fits, self.kept), (self.dropped.memory(ways) <= rooms, self.dropped))
        )
        best = np.minimum(kept, dropped)
        rooms[fits] = -1  # nothing is faster
        table = self._table(slowest)
        some = slice(len(table.kinds.first))
        if not roughly and np.any(rooms[some] >= 0):
            found = table.least(flights, rooms[some])
            self._solved[flights] = table, *found
            best[some] = np.minimum(best[some], found[0])
        return best

    def _table(self, slowest: float) -> HoldTable:
        """Of the sub-chains that may be as fast as that."""
        least = np.cumsum([0.0, *(min(o.f + o.b for o in self.chain.options(i)) for i in range(self.piece.links))])
        fast = least[self.kinds.last + 1] - least[self.kinds.first] <= slowest * (1 + 1e-9)
        length = int((self.kinds.last - self.kinds.first + 1)[fast].max(initial=1))
        if length not in self._tables:
            slots = self.terms.slots.of(length)
            step = self.terms.slots.step_of(slots)
            self._tables[length] = HoldTable(self.chain, self.terms.memory, slots, up_to(self.kinds, length), step)
        return self._tables[length]

    @property
    def _fixed(self) -> FixedSchedule:
        if self.terms.recompute is Recompute.MARKED:
            return self.marked
        return self.kept if self._never else self.dropped

    @property
    def _never(self) -> bool:
        last_alone = self.terms.recompute is Recompute.EXCEPT_LAST and not self.keeps_last
        return last_alone or self.terms.recompute is Recompute.NEVER

    @property
    def keeps_last(self) -> bool:
        """Whether the last micro-batch of a step is run otherwise than those before it."""
        return self.terms.recompute is Recompute.EXCEPT_LAST and self.terms.micro_batches > 1

    def _fixed_memory(self, flights: Ints) -> Floats:
        if not self.keeps_last:
            return self._fixed.memory(flights)
        kept, dropped = self.kept, self.dropped
        runs = np.maximum(dropped.memory(flights), (flights - 1) * dropped.hold[:, None] + kept.peak[:, None])
        waits = (flights - 2) * dropped.hold[:, None] + (kept.hold + dropped.peak)[:, None]
        return np.where(flights > 1, np.maximum(runs, waits), runs)

    @cached_property
    def kept(self) -> FixedSchedule:
        """Nothing recomputed."""
        chain, kinds = self.chain, self.kinds
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

    @cached_property
    def dropped(self) -> FixedSchedule:
        """All recomputed from the input."""
        chain, kinds, kept, loss = self.chain, self.kinds, self.kept, self.chain.length
        time, hold, peak = kept.time.copy(), kept.hold.copy(), kept.peak.copy()
        passed, passing = np.concatenate([[0.0], np.cumsum(chain.f_none)]), passing_of(chain)
        for u, (i, l) in enumerate(zip(kinds.first.tolist(), kinds.last.tolist(), strict=True)):
            if l < loss:
                time[u] += passed[l + 1] - passed[i]
                hold[u] = chain.a[i]
                peak[u] = max(chain.a[i] + passing[i, l + 1] + chain.a[l + 1], kept.peak[u])
            elif i < l:
                inner = kinds.of[i, l - 1]
                time[u] = passed[l] - passed[i] + kept.time[inner] + chain.b[l]
                hold[u] = chain.a[i] + chain.a[l]
                own = max(passing[i, l], 2 * chain.a[l] + chain.bt[l])
                peak[u] = max(chain.a[i] + own, kept.peak[inner])
        return FixedSchedule(time, hold, peak)

    @cached_property
    def marked(self) -> FixedSchedule:
        """What is marked recomputed."""
        spans = zip(self.kinds.first.tolist(), self.kinds.last.tolist(), strict=True)
        ways = [run_partition(self.chain, self._marked_region(i, l), i, l) for i, l in spans]
        return FixedSchedule(
            *(np.array(column) for column in zip(*((w.time, w.hold, w.peak) for w in ways), strict=True))
        )

    @cached_property
    def _marks(self) -> list[int]:
        """For each link its place in its span, -1 outside of all."""
        marks = [-1] * self.piece.links
        for first, last in self.terms.spans:
            for link in range(first, min(last, self.chain.length - 1) + 1):  # the loss follows its forward at once
                marks[link] = link - first
        return marks

    def _marked_region(self, i: int, l: int) -> Nesting:
        steps: list[Keep | Nesting] = []
        for link in range(i, l + 1):
            if self._marks[link] < 0:
                steps.append(Keep(link))
            elif self._marks[link] == 0 or link == i:
                steps.append(Nesting((Keep(link),)))
            else:
                begun = steps.pop()
                assert isinstance(begun, Nesting)
                steps.append(Nesting((*begun.steps, Keep(link))))
        return Nesting(tuple(steps))

    # ----------------------------------------------------------------------------------------------------- schedules

    def schedule(self, i: int, l: int, flight: int) -> tuple[Nesting, Passage]:
        """How links i..l run: the fastest known schedule that fits, checked by running it."""
        key = int(self.kinds.of[i, l]), flight
        if key not in self._schedules:
            self._schedules[key] = i, *self._schedule(i, l, flight)
        first, region, passage = self._schedules[key]
        return _moved(region, i - first), passage

    def last_passage(self, i: int, l: int) -> Passage | None:
        """Links i..l as the last micro-batch runs them; None where it runs as those before it."""
        return run_partition(self.chain, keep_all(i, l), i, l) if self.keeps_last else None

    def _schedule(self, i: int, l: int, flight: int) -> tuple[Nesting, Passage]:
        if self.terms.recompute is not Recompute.SOLVED:
            if self.terms.recompute is Recompute.MARKED:
                region = self._marked_region(i, l)
            else:
                region = keep_all(i, l) if self._never else drop_all(i, l, self.chain.length)
            return region, run_partition(self.chain, region, i, l)
        room = self.room(i, l, flight)
        ways = [(region, run_partition(self.chain, region, i, l)) for region in self._regions(i, l, flight, room)]
        return min(
            (way for way in ways if way[1].memory(flight) <= room),
            key=lambda way: (way[1].time, way[1].memory(flight)),
        )

    def _regions(self, i: int, l: int, flight: int, room: float) -> list[Nesting]:
        kept = keep_all(i, l)
        if run_partition(self.chain, kept, i, l).memory(flight) <= room or i == self.chain.length:
            return [kept]
        found = [drop_all(i, l, self.chain.length)]
        kind = self.kinds.of[i, l]
        for flights, (table, best, extras) in self._solved.items():
            if flight in flights and kind < len(best) and best[kind, flights.index(flight)] < math.inf:
                extra = int(extras[kind, flights.index(flight)])
                found.append(table.region(i, l, flight, room, extra))
        finer = self.terms.slots.finer(FINE_SLOTS)
        slots = finer.of(l - i + 1)
        memory, step = max(1, math.floor(room)), finer.step_of(slots)
        fine = HoldTable(cut_chain(self.chain, i, l), memory, slots, step=step)
        best, extras = fine.least((flight,), np.full((len(fine.kinds.first), 1), room))
        if best[fine.kinds.of[0, l - i], 0] < math.inf:
            extra = int(extras[fine.kinds.of[0, l - i], 0])
            found.append(_moved(fine.region(0, l - i, flight, room, extra), i))
        return found


def _moved(region: Nesting, by: int) -> Nesting:
    """The same with every link's number so much higher."""
    return Nesting(
        tuple(
            Keep(step.link + by, step.option) if isinstance(step, Keep) else _moved(step, by) for step in region.steps
        )
    )
