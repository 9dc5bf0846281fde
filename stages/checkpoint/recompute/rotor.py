"""Rotor: the fastest way to run a chain forwards and backwards within a memory budget, as a dynamic program on numbers.

Links 0..L-1 are the model, link L is the loss. Link i reads the activation a_i and writes a_{i+1}; the gradient of a_i
has the size of a_i. To go backwards through link i one needs a_i and what the link keeps, A_{i+1}, which includes
a_{i+1}. A link is run forwards in one of three ways (`Kind`): F_all keeps A_{i+1}; F_ck keeps only a_{i+1} and leaves
a_i where it is; F_none keeps only a_{i+1} and drops a_i. A link may offer several options (f, b, A, ft, bt) for F_all.
The loss is a link with a_{L+1} = A_{L+1} = f_L = ft_L = 0 whose one op is B(L).

C(i,l,m) is the least time to run forwards i..l and backwards l..i, where a_i lies outside of m and the gradient of
a_{l+1} inside. C(i+1,i,m) = 0. An empty minimum, and whatever is below its floor, is infinite
(the inner loops are in kernels.py):

    fill          C(i,l,m)           = min(keep(i,l,m), min over i < j <= l of recompute(i,j,l,m))
    _keep         keep(i,l,m)        = min over options of f_i + b_i + C(i+1,l,m-A_{i+1})
                                       if m >= keep_floor(i,l); for i = l over `Chain.ends`
    _least        recompute(i,j,l,m) = sum f_none_i..f_none_{j-1} + C(j,l,m-a_j) + C(i,j-1,m)
                                       if m >= pass_floor(i,j,l)
    links_of      keep_floor(i,l)    = max(w_l + A_{i+1} + ft_i, a_i + a_{i+1} + A_{i+1} + bt_i + G_i)
    passing       pass_floor(i,j,l)  = w_l + max(a_{i+1} + ft_none_i,
                                                 max over i < k < j of a_k + a_{k+1} + ft_none_k)
    needs         N(i,l)             = least m with C(i,l,m) finite
                                     = min(min over options of max(keep_floor(i,l), A_{i+1} + N(i+1,l)),
                                           min over i < j <= l of max(pass_floor(i,j,l), a_j + N(j,l), N(i,j-1)))
    schedule      answer             = C(0,L,M-a_0)

Gradients of parameters appear as backward goes on: G_i is what the links after i have left (`Chain.grown`), and m
counts the room for it too. So w_l = a_{l+1} + G_l is there whenever links up to l run as a sub-chain.

The one-link case of the literature is keep(i,i,m). `pass_floor` looks at the links passed over, up to j: with the
temporaries of F_all and F_none equal this is the same as looking at all links up to l, and otherwise it is exact.
N is a threshold, so the tightest feasible budget is found exactly, in bytes, without a table. Among schedules that keep
a kept activation until its backward (persistent ones), and run a link again when backward has come to it, the result is
optimal: the tests search all of them.
"""

# ruff: noqa: E741 - `l` is the last link of a sub-chain, as in C(i,l,m) above.
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.stages.checkpoint.recompute import kernels
from shardwright.stages.checkpoint.recompute.chain import (
    LAST,
    Chain,
    ChainError,
    SlotChain,
    as_slots,
    default_slots,
    discretise,
)
from shardwright.stages.checkpoint.recompute.kernels import WIDTH, Floats, Kinds
from shardwright.stages.checkpoint.recompute.schedule import Keep, Nesting, OpKind, Schedule, ScheduledOp, scheduled
from shardwright.stages.checkpoint.recompute.simulate import simulate

MAX_TABLE_BYTES = 8 * 2**30
BEYOND = 1.08  # of a room: more than rounding loses with the default number of slots


class InfeasibleBudget(ShardwrightError):
    """No schedule fits: carries the budget asked for, the tightest feasible one, and the op that sets it."""

    def __init__(self, memory: int, floor: LeastMemory) -> None:
        self.memory = memory
        self.tightest = floor.memory
        self.link = floor.op.link
        self.op = floor.op
        super().__init__(
            f"no recompute schedule fits in {memory} bytes: {floor.op} needs more",
            remedy=f"the tightest feasible budget is {floor.memory} bytes",
        )


# ----------------------------------------------------------------------------------------------------------- floors


@dataclass(frozen=True)
class LeastMemory:
    """The tightest feasible budget, a_0 included, and the op that needs all of it."""

    memory: int
    op: ScheduledOp


class LeastMemoryTable:
    """N(i,l) of every sub-chain of a chain of whole sizes: `need[i, l]`."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.links = kernels.links_of(chain)
        self.need = kernels.needs(self.links)

    def binding(self, i: int, l: int) -> ScheduledOp:
        """The op that holds N(i,l): follow the part of the recurrence that attains it."""
        found: ScheduledOp | tuple[int, int] = (i, l)
        while isinstance(found, tuple):
            found = self._binding(*found)
        return found

    def _binding(self, i: int, l: int) -> ScheduledOp | tuple[int, int]:
        """The op, or the smaller sub-chain that needs as much."""
        links, need, value, loss = self.links, self.need, self.need[i, l], self.chain.length
        options = links.ends if i == l else links.options
        for number, k in enumerate(range(options.starts[i], options.starts[i + 1])):
            forward, backward = links.waiting[l] + options.forward[k], options.backward[k]
            own, rest = max(forward, backward), options.saved[k] + need[i + 1, l]
            if own == value and rest <= value:
                early = i == l < loss and self.chain.last
                kind = OpKind.F_ALL if forward == value and i < loss else OpKind.B
                return ScheduledOp(kind, i, LAST if early else number)
            if rest == value and own <= value:
                return i + 1, l
        passing = links.passing[i, i + 1 : l + 1]
        after = links.a[i + 1 : l + 1] + need[i + 1 : l + 1, l]
        floors = np.maximum(np.maximum(passing + links.waiting[l], after), need[i, i:l])
        at = int(np.argmin(floors))
        if passing[at] + links.waiting[l] == value:
            k = i + int(np.argmax(passing == passing[at]))
            return ScheduledOp(OpKind.F_CK if k == i else OpKind.F_NONE, k)
        return (i + 1 + at, l) if after[at] == value else (i, i + at)


def tightest(chain: Chain, slots: int | None = None, first: int = 0, last: int | None = None) -> LeastMemory:
    """The least budget in bytes for which links first..last have a schedule; with `slots`, after discretising to them.

    Sizes in slots fall as the budget grows, so feasibility is monotone and the second form is a bisection.
    """
    last = chain.length if last is None else last
    exact = _floor(chain.whole(), first, last)
    if slots is None:
        return exact
    low, high = max(exact.memory - 1, 0), max(exact.memory, 1)
    while not fits(chain, slots, high, first, last):
        low, high = high, 2 * high
        if high > 2**62:
            remedy = f"give at least {default_slots(chain.length)} slots"
            raise ChainError(f"{slots} slots are too few for a chain of {chain.length} links", remedy=remedy)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(chain, slots, middle, first, last) else (middle, high)
    return LeastMemory(high, _floor(chain.whole(slots, high), first, last).op)


def _floor(whole: Chain, first: int, last: int) -> LeastMemory:
    floors = LeastMemoryTable(whole)
    return LeastMemory(int(floors.need[first, last] + whole.a[first]), floors.binding(first, last))


def fits(chain: Chain, slots: int, memory: int, first: int = 0, last: int | None = None) -> bool:
    """Whether links first..last have a schedule in that many bytes, cut into slots."""
    last = chain.length if last is None else last
    floors = LeastMemoryTable(chain.whole(slots, memory))
    return bool(floors.need[first, last] + floors.links.a[first] <= slots)


# ------------------------------------------------------------------------------------------------------ the program


@dataclass(frozen=True, eq=False)
class Table:
    """C(i,l,m) for every sub-chain i..l and every m up to `memory` slots; `best` lies as kernels.py says."""

    slot_chain: SlotChain
    memory: int
    best: Floats
    floors: LeastMemoryTable
    kinds: Kinds

    @property
    def chain(self) -> Chain:
        """The chain in slots."""
        return self.slot_chain.sizes

    def row(self, i: int, l: int) -> Floats:
        """C(i,l,m) for m = 0..memory."""
        return self.best[:, self.kinds.of[i, l]].reshape(-1)[: self.memory + 1]

    def time(self, i: int, l: int, m: int) -> float:
        """C(i,l,m): infinite where links i..l cannot be run; a_i is not in m, the gradient of a_{l+1} is."""
        if not 0 <= i <= l <= self.chain.length or m > self.memory:
            raise ChainError(f"links {i}..{l} with {m} of {self.memory} slots are not in the table")
        return float(self.best[m // WIDTH, self.kinds.of[i, l], m % WIDTH]) if m >= 0 else math.inf

    def rows(self, extra: int, most: int) -> Floats:
        """T(i,l,h,h+extra) for h up to `most` slots (in_flight_dp.py), which lie as `best` does."""
        found = np.empty((most // WIDTH + 1, *self.best.shape[1:]))
        kernels.fill(found, self.best, extra, True, self.kinds, self.floors.links, self.floors.need)
        return found

    def region(self, i: int, l: int, h: int, extra: int = 0) -> Nesting:
        """The steps that attain C(i,l,h), or T(i,l,h,h+extra) where something is extra."""
        rows = self.rows(extra, h) if extra else self.best
        return Nesting(tuple(self._steps(rows, i, l, h, extra)))

    def _steps(self, rows: Floats, i: int, l: int, h: int, extra: int) -> Iterator[Keep | Nesting]:
        while i <= l:
            seconds, step, j, cost = min(self._choices(rows, i, l, h, extra), key=lambda choice: choice[0])
            assert seconds < math.inf, "a finite entry of the table has a step that attains it"
            yield step or self.region(i, j - 1, h + extra)
            i, h = j, h - cost

    def _choices(
        self, rows: Floats, i: int, l: int, h: int, extra: int
    ) -> Iterator[tuple[float, Keep | None, int, int]]:
        """Every first step of links i..l: seconds with all that follows, what is kept, the link after, slots gone."""
        links, of, m = self.floors.links, self.kinds.of, h + extra
        options, waiting = (links.ends if i == l else links.options), links.waiting[l]
        for number, k in enumerate(range(options.starts[i], options.starts[i + 1])):
            cost = int(options.saved[k])
            if h >= cost and m >= max(waiting + options.forward[k], options.backward[k]):
                rest = rows[(h - cost) // WIDTH, of[i + 1, l], (h - cost) % WIDTH] if i < l else 0.0
                yield options.seconds[k] + rest, Keep(i, number), i + 1, cost
        again = self.best[m // WIDTH, :, m % WIDTH]
        dropped = rows is not self.best and l < self.chain.length  # all of i..l may be
        for j in range(i + 1, l + 2 if dropped else l + 1):
            if m < links.passing[i, j] + waiting:  # it grows with j
                break
            cost = int(links.a[j]) if j <= l else 0
            if h >= cost:
                after = rows[(h - cost) // WIDTH, of[j, l], (h - cost) % WIDTH] if j <= l else 0.0
                yield links.passed[j] - links.passed[i] + after + again[of[i, j - 1]], None, j, cost


def solve(chain: SlotChain | Chain, memory: int | None = None, kinds: Kinds | None = None) -> Table:
    """Fill the table up to `memory` slots (of a plain chain: units); by default all the slots of a SlotChain.

    `kinds` are the sub-chains that are asked for, by default all.
    """
    if isinstance(chain, Chain):
        if memory is None:
            raise ChainError("a chain without slots has no budget of its own", remedy="give the memory")
        chain = as_slots(chain, memory)
    memory = chain.slots if memory is None else memory
    kinds = kinds or kernels.kinds_of(kernels.contents_of(chain.sizes))
    shape = (memory // WIDTH + 1, len(kinds.first), WIDTH)
    if memory < 0 or 8 * math.prod(shape) > MAX_TABLE_BYTES:
        what = f"a table of {chain.sizes.length + 1} links and {memory} slots cannot be held"
        raise ChainError(what, remedy="discretise to fewer slots")
    table = Table(chain, memory, np.empty(shape), LeastMemoryTable(chain.sizes), kinds)
    kernels.fill(table.best, table.best, 0, False, kinds, table.floors.links, table.floors.need)
    return table


@dataclass(frozen=True)
class Point:
    """From this many slots on, a_first included, links first..last take this many seconds."""

    memory: int
    time: float


def curve(table: Table, first: int = 0, last: int | None = None) -> tuple[Point, ...]:
    """Where the time of links first..last falls as memory grows, from the tightest on: every budget of one table."""
    last = table.chain.length if last is None else last
    size = int(table.floors.links.a[first])
    row = table.row(first, last)[: max(0, table.memory + 1 - size)]
    falls = row < np.concatenate([[math.inf], row[:-1]])[: len(row)]
    return tuple(Point(int(m) + size, float(row[m])) for m in np.flatnonzero(falls))


def schedule(table: Table, memory: int | None = None, first: int = 0, last: int | None = None) -> Schedule:
    """The optimal schedule of links first..last within `memory` slots, a_first included."""
    memory = table.memory if memory is None else memory
    last = table.chain.length if last is None else last
    m = memory - int(table.chain.a[first])
    time = table.time(first, last, m)
    if time == math.inf:
        raise _infeasible(table, memory, first, last)
    return scheduled(table.region(first, last, m), table.chain, time)


def _infeasible(table: Table, memory: int, first: int, last: int) -> InfeasibleBudget:
    """What would do: more of this table's slots if it has them, else the least budget cut into as many slots."""
    slots = table.slot_chain
    need = int(table.floors.need[first, last] + table.chain.a[first])
    if need <= slots.slots or slots.source is slots.sizes:
        floor = LeastMemory(-(-need * slots.memory // slots.slots), table.floors.binding(first, last))
    else:
        floor = tightest(slots.source, slots.slots, first, last)
    return InfeasibleBudget(slots.bytes_of(memory), floor)


def fastest_within(chain: Chain, room: int, slots: int) -> Schedule:
    """The fastest schedule that the simulator, in bytes, lets into a room in which the chain fits in slots (`fits`).

    Slots are rounded up for every tensor that is held, so a schedule takes less than its slots say. One table for
    somewhat more than the room has the schedules that do not fit by their slots, but do in bytes.
    """
    table = solve(discretise(chain, int(room * BEYOND), slots))
    for point in reversed(curve(table)):
        found = schedule(table, point.memory)
        if simulate(chain, found.sequence).peak <= room:
            return found
    return schedule(solve(discretise(chain, room, slots)))
