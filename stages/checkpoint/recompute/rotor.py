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
    keep_parts    keep_floor(i,l)    = max(w_l + A_{i+1} + ft_i, a_i + a_{i+1} + A_{i+1} + bt_i + G_i)
    pass_floor    pass_floor(i,j,l)  = w_l + max(a_{i+1} + ft_none_i,
                                                 max over i < k < j of a_k + a_{k+1} + ft_none_k)
    Floors        N(i,l)             = least m with C(i,l,m) finite
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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.base.errors import ShardwrightError
from stages.checkpoint.recompute import kernels
from stages.checkpoint.recompute.chain import LAST, Chain, ChainError, Option, SlotChain, as_slots, default_slots
from stages.checkpoint.recompute.kernels import WIDTH
from stages.checkpoint.recompute.schedule import Keep, Nesting, OpKind, Schedule, ScheduledOp, scheduled

MAX_TABLE_BYTES = 8 * 2**30
MAX_SIZE = 2**59  # so that the sum of a few is a whole number of 64 bits


class InfeasibleBudget(ShardwrightError):
    """No schedule fits: carries the budget asked for, the tightest feasible one, and the op that sets it."""

    def __init__(self, memory: int, floor: Floor) -> None:
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
class Floor:
    """The tightest feasible budget, a_0 included, and the op that needs all of it."""

    memory: int
    op: ScheduledOp


class Floors:
    """N(i,l) of every sub-chain of a chain of whole sizes: `need[i, l]`."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.links = _links(chain)
        self.need = kernels.needs(self.links)

    def keep_parts(self, i: int, l: int, option: int) -> tuple[int, int]:
        """What keeping link i needs: for its own ops (keep_floor), and for the links after it."""
        k = self.links.starts[i] + option
        own = max(self.links.waiting[l] + self.links.forward[k], self.links.backward[k])
        return int(own), int(self.links.saved[k] + self.need[i + 1, l])

    def end_floor(self, i: int, option: int) -> int:
        """What link i needs as the last of a sub-chain."""
        ends = self.links.ends
        k = ends.starts[i] + option
        return int(max(self.links.waiting[i] + ends.forward[k], ends.backward[k]))

    def pass_floor(self, i: int, l: int) -> NDArray[np.int64]:
        """For j = i+1..l: what F_ck(i) and F_none(i+1..j-1) need, as part of links i..l."""
        return np.asarray(self.links.passing[i, i + 1 : l + 1] + self.links.waiting[l])

    def recompute_floors(self, i: int, l: int) -> NDArray[np.int64]:
        """For j = i+1..l: the least m with which links i..j-1 can be recomputed."""
        after = self.links.a[i + 1 : l + 1] + self.need[i + 1 : l + 1, l]
        return np.asarray(np.maximum(self.pass_floor(i, l), np.maximum(after, self.need[i, i:l])))

    def binding(self, i: int, l: int) -> ScheduledOp:
        """The op that holds N(i,l): follow the part of the recurrence that attains it."""
        found: ScheduledOp | tuple[int, int] = (i, l)
        while isinstance(found, tuple):
            found = self._binding(*found)
        return found

    def _binding(self, i: int, l: int) -> ScheduledOp | tuple[int, int]:
        """The op, or the smaller sub-chain that needs as much."""
        links, value = self.links, self.need[i, l]
        if i == l:
            ends = self.chain.ends(i)
            k = min(range(len(ends)), key=lambda k: self.end_floor(i, k))
            forward = links.waiting[l] + links.ends.forward[links.ends.starts[i] + k]
            number = LAST if self.chain.last and i < self.chain.length else k
            return ScheduledOp(OpKind.F_ALL if forward == value and i < self.chain.length else OpKind.B, i, number)
        for k in range(len(self.chain.options(i))):
            own, rest = self.keep_parts(i, l, k)
            if own == value and rest <= value:
                forward = links.waiting[l] + links.forward[links.starts[i] + k]
                return ScheduledOp(OpKind.F_ALL if forward == value else OpKind.B, i, k)
            if rest == value and own <= value:
                return i + 1, l
        j = i + 1 + int(np.argmin(self.recompute_floors(i, l)))
        if self.pass_floor(i, l)[j - i - 1] == value:
            k = next(k for k in range(i, j) if links.passing[i, k + 1] == links.passing[i, j])
            return ScheduledOp(OpKind.F_CK if k == i else OpKind.F_NONE, k)
        return (j, l) if links.a[j] + self.need[j, l] == value else (i, j - 1)


def _links(chain: Chain) -> kernels.Links:
    a = _sizes([*chain.a, 0])
    grown = _sizes([chain.grown_after(i) for i in range(chain.length + 1)])
    around = a[:-1] + a[1:] + grown  # of each link: its gradients, and what links after it have left
    starts, seconds, saved, forward, backward = _arrays([chain.options(i) for i in range(chain.length + 1)], around)
    ends = _arrays([chain.ends(i) for i in range(chain.length + 1)], around)
    return kernels.Links(
        a=a,
        waiting=a[1:] + grown,
        passing=kernels.passing(a, _sizes(chain.ft_none)),
        passed=np.array([0.0, *np.cumsum(chain.f_none)]),
        starts=starts,
        seconds=seconds,
        saved=saved,
        forward=forward,
        backward=backward,
        ends=kernels.LastOptions(ends[0], ends[1], ends[3], ends[4]),
    )


Arrays = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def _arrays(options: list[tuple[Option, ...]], around: NDArray[np.int64]) -> Arrays:
    """Where the options of each link begin, their seconds, and what they save, hold in forward and in backward."""
    starts = np.cumsum([0, *map(len, options)], dtype=np.int64)
    saved, ft, bt = _sizes([(o.saved, o.ft, o.bt) for link in options for o in link]).T.copy()
    seconds = np.array([o.f + o.b for link in options for o in link], dtype=np.float64)
    return starts, seconds, saved, saved + ft, np.repeat(around, np.diff(starts)) + saved + bt


def _sizes(sizes: Sequence[float] | Sequence[tuple[float, ...]]) -> NDArray[np.int64]:
    found = np.array(sizes, dtype=np.float64)
    if found.max() >= MAX_SIZE:
        raise ChainError(f"a size of {found.max():.3g} is too large", where="chain", remedy="give more memory or less")
    return np.array(sizes, dtype=np.int64)


def tightest(chain: Chain, slots: int | None = None, first: int = 0, last: int | None = None) -> Floor:
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
    return Floor(high, _floor(chain.whole(slots, high), first, last).op)


def _floor(whole: Chain, first: int, last: int) -> Floor:
    floors = Floors(whole)
    return Floor(int(floors.need[first, last] + whole.a[first]), floors.binding(first, last))


def fits(chain: Chain, slots: int, memory: int, first: int = 0, last: int | None = None) -> bool:
    """Whether links first..last have a schedule in that many bytes, cut into slots."""
    last = chain.length if last is None else last
    floors = Floors(chain.whole(slots, memory))
    return bool(floors.need[first, last] + floors.links.a[first] <= slots)


# ------------------------------------------------------------------------------------------------------ the program


@dataclass(frozen=True, eq=False)
class Table:
    """C(i,l,m) for every sub-chain i..l and every m up to `memory` slots; `best` lies as kernels.py says."""

    slot_chain: SlotChain
    memory: int
    best: NDArray[np.float64]
    floors: Floors

    @property
    def chain(self) -> Chain:
        """The chain in slots."""
        return self.slot_chain.sizes

    def row(self, i: int, l: int) -> NDArray[np.float64]:
        """C(i,l,m) for m = 0..memory."""
        return self.best[:, self._at(i, l)].reshape(-1)[: self.memory + 1]

    def time(self, i: int, l: int, m: int) -> float:
        """C(i,l,m): infinite where links i..l cannot be run; a_i is not in m, the gradient of a_{l+1} is."""
        if not 0 <= i <= l <= self.chain.length or m > self.memory:
            raise ChainError(f"links {i}..{l} with {m} of {self.memory} slots are not in the table")
        return float(self.best[m // WIDTH, self._at(i, l), m % WIDTH]) if m >= 0 else math.inf

    def _at(self, i: int, l: int) -> int:
        n = self.chain.length + 1
        return i * n - i * (i + 1) // 2 + l


def solve(chain: SlotChain | Chain, memory: int | None = None) -> Table:
    """Fill the table up to `memory` slots (of a plain chain: units); by default all the slots of a SlotChain."""
    if isinstance(chain, Chain):
        if memory is None:
            raise ChainError("a chain without slots has no budget of its own", remedy="give the memory")
        chain = as_slots(chain, memory)
    memory = chain.slots if memory is None else memory
    n = chain.sizes.length + 1
    shape = (memory // WIDTH + 1, n * (n + 1) // 2, WIDTH)
    if memory < 0 or 8 * math.prod(shape) > MAX_TABLE_BYTES:
        raise ChainError(f"a table of {n} links and {memory} slots cannot be held", remedy="discretise to fewer slots")
    table = Table(chain, memory, np.empty(shape), Floors(chain.sizes))
    kernels.fill(table.best, table.floors.links, table.floors.need)
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
    return scheduled(_regions(table, first, last, m), table.chain, time)


def _regions(table: Table, i: int, l: int, m: int) -> Nesting:
    steps: list[Keep | Nesting] = []
    while i <= l:
        step, j, cost = _choose(table, i, l, m)
        steps.append(step if isinstance(step, Keep) else _regions(table, i, j - 1, m))
        i, m = j, m - cost
    return Nesting(tuple(steps))


def _choose(table: Table, i: int, l: int, m: int) -> tuple[Keep | None, int, int]:
    """The step that attains C(i,l,m): what it keeps if anything, the link after it, the slots gone from m."""
    found: tuple[Keep | None, int, int] = (None, i, 0)
    best, passed = math.inf, table.floors.links.passed
    if i == l:
        fitting = [k for k in range(len(table.chain.ends(i))) if m >= table.floors.end_floor(i, k)]
        ends = table.chain.ends(i)
        return Keep(i, min(fitting, key=lambda k: ends[k].f + ends[k].b)), i + 1, 0
    for k, option in enumerate(table.chain.options(i)):
        if m >= max(table.floors.keep_parts(i, l, k)):
            rest = table.time(i + 1, l, m - int(option.saved))
            if option.f + option.b + rest < best:
                best, found = option.f + option.b + rest, (Keep(i, k), i + 1, int(option.saved))
    for j, low in enumerate(table.floors.recompute_floors(i, l), start=i + 1):
        if m >= low:
            size = int(table.chain.a[j])
            after, inner = table.time(j, l, m - size), table.time(i, j - 1, m)
            seconds = float(passed[j] - passed[i]) + after + inner
            if seconds < best:
                best, found = seconds, (None, j, size)
    assert found[1] > i, "a finite entry of the table has a step that attains it"
    return found


def _infeasible(table: Table, memory: int, first: int, last: int) -> InfeasibleBudget:
    """What would do: more of this table's slots if it has them, else the least budget cut into as many slots."""
    slots = table.slot_chain
    need = int(table.floors.need[first, last] + table.chain.a[first])
    if need <= slots.slots or slots.source is slots.sizes:
        floor = Floor(-(-need * slots.memory // slots.slots), table.floors.binding(first, last))
    else:
        floor = tightest(slots.source, slots.slots, first, last)
    return InfeasibleBudget(slots.bytes_of(memory), floor)
