"""Rotor: the fastest way to run a chain forwards and backwards within a memory budget, as a dynamic program on numbers.

Links 0..L-1 are the model, link L is the loss. Link i reads the activation a_i and writes a_{i+1}; the gradient of a_i
has the size of a_i. To go backwards through link i one needs a_i and what the link keeps, A_{i+1}, which includes
a_{i+1}. A link is run forwards in one of three ways (`Kind`): F_all keeps A_{i+1}; F_ck keeps only a_{i+1} and leaves
a_i where it is; F_none keeps only a_{i+1} and drops a_i. A link may offer several options (f, b, A, ft, bt) for F_all.
The loss is a link with a_{L+1} = A_{L+1} = f_L = ft_L = 0 whose one op is B(L).

C(i,l,m) is the least time to run forwards i..l and backwards l..i, where a_i lies outside of m and the gradient of
a_{l+1} inside. C(i+1,i,m) = 0. An empty minimum, and whatever is below its floor, is infinite:

    solve         C(i,l,m)           = min(keep(i,l,m), min over i < j <= l of recompute(i,j,l,m))
    _keep         keep(i,l,m)        = min over options of f_i + b_i + C(i+1,l,m-A_{i+1})
                                       if m >= keep_floor(i,l)
    _recompute    recompute(i,j,l,m) = sum f_none_i..f_none_{j-1} + C(j,l,m-a_j) + C(i,j-1,m)
                                       if m >= pass_floor(i,j,l)
    keep_floor    keep_floor(i,l)    = max(a_{l+1} + A_{i+1} + ft_i, a_i + a_{i+1} + A_{i+1} + bt_i)
    pass_floor    pass_floor(i,j,l)  = a_{l+1} + max(a_{i+1} + ft_none_i,
                                                     max over i < k < j of a_k + a_{k+1} + ft_none_k)
    Floors        N(i,l)             = least m with C(i,l,m) finite
                                     = min(min over options of max(keep_floor(i,l), A_{i+1} + N(i+1,l)),
                                           min over i < j <= l of max(pass_floor(i,j,l), a_j + N(j,l), N(i,j-1)))
    schedule      answer             = C(0,L,M-a_0)

The one-link case of the literature is keep(i,i,m). `pass_floor` looks at the links passed over, up to j: with the
temporaries of F_all and F_none equal this is the same as looking at all links up to l, and otherwise it is exact.
N is a threshold, so the tightest feasible budget is found exactly, in bytes, without a table. Among schedules that keep
a kept activation until its backward (persistent ones) the result is optimal: the tests search all of them.
"""

# ruff: noqa: E741 - `l` is the last link of a sub-chain, as in C(i,l,m) above.
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ShardwrightError
from stages.checkpoint.chain import Chain, ChainError, Option, SlotChain, as_slots, default_slots
from stages.checkpoint.schedule import Keep, Kind, Op, Region, Schedule, flatten

MAX_TABLE_BYTES = 8 * 2**30


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
    op: Op


def keep_floor(chain: Chain, i: int, l: int, option: Option) -> float:
    """The most that F_all(i) and B(i) themselves hold, as part of links i..l."""
    forward = chain.size(l + 1) + option.saved + option.ft
    return max(forward, chain.size(i) + chain.size(i + 1) + option.saved + option.bt)


class Floors:
    """N(i,l) of every sub-chain of a chain of whole sizes: `need[i, l]`."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        n = chain.length + 1
        self.a = np.array([*chain.a, 0], dtype=np.int64)
        self.passing = _passing(chain)
        self.need = np.zeros((n + 1, n), dtype=np.int64)
        for l in range(n):
            for i in range(l, -1, -1):
                keep = min(max(self.keep_parts(i, l, option)) for option in chain.options(i))
                self.need[i, l] = min([keep, *self.recompute_floors(i, l)])

    def keep_parts(self, i: int, l: int, option: Option) -> tuple[int, int]:
        """What keeping link i needs: for its own ops, and for the links after it."""
        return int(keep_floor(self.chain, i, l, option)), int(option.saved + self.need[i + 1, l])

    def pass_floor(self, i: int, l: int) -> NDArray[np.int64]:
        """For j = i+1..l: what F_ck(i) and F_none(i+1..j-1) need, as part of links i..l."""
        return np.asarray(self.passing[i, i + 1 : l + 1] + self.a[l + 1])

    def inner_floor(self, i: int, l: int) -> NDArray[np.int64]:
        """For j = i+1..l: what the two sub-chains j..l and i..j-1 need."""
        after = self.a[i + 1 : l + 1] + self.need[i + 1 : l + 1, l]
        return np.asarray(np.maximum(after, self.need[i, i:l]))

    def recompute_floors(self, i: int, l: int) -> NDArray[np.int64]:
        """For j = i+1..l: the least m with which links i..j-1 can be recomputed."""
        return np.maximum(self.pass_floor(i, l), self.inner_floor(i, l))

    def binding(self, i: int, l: int) -> Op:
        """The op that holds N(i,l): follow the part of the recurrence that attains it."""
        value = self.need[i, l]
        for k, option in enumerate(self.chain.options(i)):
            own, rest = self.keep_parts(i, l, option)
            if own == value and rest <= value:
                forward = self.chain.size(l + 1) + option.saved + option.ft
                return Op(Kind.F_ALL if forward == value and i < self.chain.length else Kind.B, i, k)
            if rest == value and own <= value:
                return self.binding(i + 1, l)
        j = i + 1 + int(np.argmin(self.recompute_floors(i, l)))
        if self.pass_floor(i, l)[j - i - 1] == value:
            k = next(k for k in range(i, j) if self.passing[i, k + 1] == self.passing[i, j])
            return Op(Kind.F_CK if k == i else Kind.F_NONE, k)
        return self.binding(j, l) if self.a[j] + self.need[j, l] == value else self.binding(i, j - 1)


def _passing(chain: Chain) -> NDArray[np.int64]:
    """[i, j]: the most that F_ck(i), F_none(i+1..j-1) hold beside the gradient that waits."""
    n = chain.length
    output = np.array(chain.a[1:], dtype=np.int64) + np.array(chain.ft_none, dtype=np.int64)
    both = output + np.array(chain.a[:-1], dtype=np.int64)
    held = np.zeros((n + 1, n + 1), dtype=np.int64)
    for i in range(n):
        held[i, i + 1 :] = np.maximum.accumulate([output[i], *both[i + 1 :]])
    return held


def tightest(chain: Chain, slots: int | None = None, first: int = 0, last: int | None = None) -> Floor:
    """The least budget in bytes for which links first..last have a schedule; with `slots`, after discretising to them.

    Sizes in slots fall as the budget grows, so feasibility is monotone and the second form is a bisection.
    """
    last = chain.length if last is None else last
    exact = _floor(chain.whole(), first, last)
    if slots is None:
        return exact
    low, high = exact.memory - 1, max(exact.memory, 1)
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
    return _floor(chain.whole(slots, memory), first, last).memory <= slots


# ------------------------------------------------------------------------------------------------------ the program


@dataclass(frozen=True, eq=False)
class Table:
    """C(i,l,m) for every sub-chain i..l and every m up to `memory` slots: `best[i, l, m]`, for i <= l."""

    slot_chain: SlotChain
    memory: int
    best: NDArray[np.float64]
    floors: Floors

    @property
    def chain(self) -> Chain:
        """The chain in slots."""
        return self.slot_chain.sizes

    @cached_property
    def passed(self) -> NDArray[np.float64]:
        """Seconds of the forwards that save nothing, summed up to each link."""
        return np.array([0.0, *np.cumsum(self.chain.f_none)])

    def row(self, i: int, l: int) -> NDArray[np.float64]:
        """C(i,l,m) for m = 0..memory."""
        return np.asarray(self.best[i, l])

    def time(self, i: int, l: int, m: int) -> float:
        """C(i,l,m): infinite where links i..l cannot be run; a_i is not in m, the gradient of a_{l+1} is."""
        if not 0 <= i <= l <= self.chain.length or m > self.memory:
            raise ChainError(f"links {i}..{l} with {m} of {self.memory} slots are not in the table")
        return float(self.best[i, l, m]) if m >= 0 else math.inf


def solve(chain: SlotChain | Chain, memory: int | None = None) -> Table:
    """Fill the table up to `memory` slots (of a plain chain: units); by default all the slots of a SlotChain."""
    if isinstance(chain, Chain):
        if memory is None:
            raise ChainError("a chain without slots has no budget of its own", remedy="give the memory")
        chain = as_slots(chain, memory)
    memory = chain.slots if memory is None else memory
    table = _empty_table(chain, memory)
    shifted = np.empty((chain.sizes.length + 1, memory + 1))
    for l in range(chain.sizes.length + 1):
        for i in range(l, -1, -1):
            row = table.best[i, l]
            row.fill(math.inf)
            _keep(table, i, l, row)
            _recompute(table, i, l, shifted, row)
            _shift(table, i, row, shifted[i])
    return table


def _empty_table(chain: SlotChain, memory: int) -> Table:
    n = chain.sizes.length + 1
    if memory < 0 or n * n * (memory + 1) * 4 > MAX_TABLE_BYTES:
        raise ChainError(f"a table of {n} links and {memory} slots cannot be held", remedy="discretise to fewer slots")
    return Table(chain, memory, np.empty((n, n, memory + 1)), Floors(chain.sizes))


def _keep(table: Table, i: int, l: int, row: NDArray[np.float64]) -> None:
    """row[m] = min(row[m], keep(i,l,m))."""
    for option in table.chain.options(i):
        low = max(table.floors.keep_parts(i, l, option))
        if low > table.memory:
            continue
        seconds, saved = option.f + option.b, int(option.saved)
        rest = table.best[i + 1, l, low - saved : table.memory + 1 - saved] if i < l else 0.0
        np.minimum(row[low:], seconds + rest, out=row[low:])


def _recompute(table: Table, i: int, l: int, shifted: NDArray[np.float64], row: NDArray[np.float64]) -> None:
    """row[m] = min(row[m], recompute(i,j,l,m) for i < j <= l), every j and m at once."""
    floors = table.floors
    if i == l or (low := int(floors.recompute_floors(i, l).min())) > table.memory:
        return
    candidates = table.best[i, i:l, low:] + shifted[i + 1 : l + 1, low:]
    passing = floors.pass_floor(i, l)
    for k in np.flatnonzero(passing > floors.inner_floor(i, l)):
        candidates[k, : max(0, passing[k] - low)] = math.inf
    np.minimum(row[low:], candidates.min(axis=0) - table.passed[i], out=row[low:])


def _shift(table: Table, j: int, row: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """out[m] = C(j,l,m-a_j) + the forwards before j: what `_recompute` reads of links j..l."""
    size = min(int(table.chain.a[j]), table.memory + 1)
    out[:size] = math.inf
    np.add(row[: table.memory + 1 - size], table.passed[j], out=out[size:])


def schedule(table: Table, memory: int | None = None, first: int = 0, last: int | None = None) -> Schedule:
    """The optimal schedule of links first..last within `memory` slots, a_first included."""
    memory = table.memory if memory is None else memory
    last = table.chain.length if last is None else last
    m = memory - int(table.chain.a[first])
    time = table.time(first, last, m)
    if time == math.inf:
        raise _infeasible(table, memory, first, last)
    regions = _regions(table, first, last, m)
    return Schedule(regions, flatten(regions, table.chain.length), time)


def _regions(table: Table, i: int, l: int, m: int) -> Region:
    steps: list[Keep | Region] = []
    while i <= l:
        step, j, cost = _choose(table, i, l, m)
        steps.append(step if isinstance(step, Keep) else _regions(table, i, j - 1, m))
        i, m = j, m - cost
    return Region(tuple(steps))


def _choose(table: Table, i: int, l: int, m: int) -> tuple[Keep | None, int, int]:
    """The step that attains C(i,l,m): what it keeps if anything, the link after it, the slots gone from m."""
    found: tuple[Keep | None, int, int] = (None, i, 0)
    best = math.inf
    for k, option in enumerate(table.chain.options(i)):
        if m >= max(table.floors.keep_parts(i, l, option)):
            rest = table.time(i + 1, l, m - int(option.saved)) if i < l else 0.0
            if option.f + option.b + rest < best:
                best, found = option.f + option.b + rest, (Keep(i, k), i + 1, int(option.saved))
    for j, low in enumerate(table.floors.recompute_floors(i, l), start=i + 1):
        if m >= low:
            size = int(table.chain.a[j])
            after, inner = table.time(j, l, m - size), table.time(i, j - 1, m)
            seconds = float(table.passed[j] - table.passed[i]) + after + inner
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
