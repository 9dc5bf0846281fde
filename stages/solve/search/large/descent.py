"""Better choices within a memory limit, region by region, at prices of memory that a bound has.

The problem: choices x of least cost c(x) with held(x, t) <= limit at every moment t. With a price p(t) >= 0 on memory,

    bound(p) = min over x of [c(x) + sum over t of p(t) held(x, t)] - limit * sum over t of p(t)   <= the optimum

and message passing (loops.py) bounds the minimum from below in turn. The messages stay valid when prices change.

`repair`   choices that hold too much somewhere: higher prices there, and partial_elimination.py
`improve`  from the best solution: a random region at a random fraction of the prices, solved by elimination; prices go
           up where the answer holds too much. Kept if feasible and no dearer. By turns among all choices, and among few
           of each node, whose tables span more nodes; more turns to what has gained lately (`Turns`). Tables may grow
           while nothing gets better

All is anytime: `Searcher.best` is always feasible. A first solution and prices come from whoever asks: the frontier's
bounds (priced.py), or benchmarks/contest_search.py, which finds its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardwright.stages.solve.search.large.arrays import Arrays, Floats, Ints, candidates, narrowed, offsets
from shardwright.stages.solve.search.large.loops import (
    add_prices,
    beliefs,
    held_after,
    pass_messages,
    reverse_arcs,
    total_cost,
)
from shardwright.stages.solve.search.large.partial_elimination import EliminationPlan, grow_ball, make_plan, solve_plan

MOST_WORK = 30_000_000  # table entries of one plan
MOST_LOOKS = 300_000_000  # entries that one plan looks at to fill them
TABLES, MOST_TABLES = 4.5, 7.0  # powers of ten: entries of a region's tables, at first and once nothing gets better
IDLE_REGIONS = 60  # without a better solution: then tables may be three times as large
FRACTIONS = (0.0, 0.3, 0.7, 1.0, 1.3)  # of the best prices, to begin a region with
TURN = 20  # regions, before the other process is asked and other choices are taken
SETTLING = 20  # passes of messages at the best prices, to tell which choices are promising
CANDIDATES = (0.4, 1.5)  # powers of ten: choices of a node in a turn among few
FADING = 0.5  # what was gained before the last turn counts this much less with each
LEAST = 0.15  # share of the turns that either kind gets: what gives nothing now may give something later
Marks = NDArray[np.uint8]


class Turns:
    """Which kind of turn is next, among all choices or among few: by what each has gained lately for its work.

    Work is counted and not timed: equal searches take equal turns.
    """

    def __init__(self) -> None:
        self.rates = {False: 0.0, True: 0.0}  # few: gained per work, lately
        self.taken = 0

    def few(self, chance: float) -> bool:
        """`chance`: a random number below 1. The first two turns are one of each."""
        return self.taken == 1 if self.taken < 2 else chance < self.share

    @property
    def share(self) -> float:
        """Of the turns among few."""
        total = sum(self.rates.values())
        return min(1 - LEAST, max(LEAST, self.rates[True] / total)) if total else 0.5

    def note(self, few: bool, gain: float, work: int) -> None:
        self.taken += 1
        self.rates = {kind: FADING * rate for kind, rate in self.rates.items()}
        self.rates[few] += max(0.0, gain) / max(1, work)


class Searcher:
    def __init__(
        self,
        arrays: Arrays,
        deadline: float,
        seed: int = 0,
        step: float = 0.0,  # costs are whole multiples of this; 0: any number
        publish: Callable[[Searcher], None] = lambda _: None,
        fetch: Callable[[], tuple[float, Ints] | None] = lambda: None,
    ) -> None:
        self.arrays, self.deadline, self.step = arrays, deadline, step
        self.publish, self.fetch = publish, fetch
        self.random = np.random.default_rng(seed)
        self.sizes = np.diff(arrays.start)
        self.everything = np.ones(arrays.count, np.uint8)
        self.bytes = arrays.limit or float(arrays.holdings.usage.max(initial=0.0)) or 1.0  # the scale of memory
        self.prices = np.zeros(len(arrays.base))
        self.costs = arrays.costs.copy()  # with memory at its price
        self.picked = np.zeros(arrays.count, np.int64)
        self.cost = math.inf
        self.best: Ints | None = None
        self.bound = -math.inf
        self.gap = 1e-9  # between the bound and what counts as proven
        self.best_prices = self.prices
        self.idle = 0  # regions since the last better solution
        self.looks = 0  # entries looked at so far, to tell what work has cost
        self.tables = np.zeros(0)
        self.back = reverse_arcs(arrays.graph.arc_start, arrays.graph.arc_to)
        self.message_start = offsets(self.sizes[arrays.graph.arc_to])
        self.message = np.zeros(self.message_start[-1])

    @property
    def finished(self) -> bool:
        return time.monotonic() >= self.deadline or self.proven or self.impossible

    @property
    def proven(self) -> bool:
        slack = self.gap * abs(self.cost) + 0.999 * self.step
        return self.best is not None and self.bound >= self.cost - slack

    @property
    def impossible(self) -> bool:
        """The bound, rounding errors of high prices aside, is above what any solution costs: nothing fits."""
        rounding = 1e-9 * self.arrays.limit * float(self.best_prices.sum())
        return self.best is None and self.bound - self.arrays.constant - rounding > self.arrays.forbidden

    # ---- what the steps are made of

    def held(self, picked: Ints) -> Floats:
        nothing = np.full(len(picked), -1, np.int64)
        found: Floats = held_after(self.arrays.base, self.arrays.holdings, nothing, picked)
        return found

    def total(self, picked: Ints) -> float:
        """Cost without memory's price."""
        return float(total_cost(self.arrays.graph, self.arrays.costs, picked)) + self.arrays.constant

    def priced(self, picked: Ints) -> float:
        """What these choices come to at the present prices, what is held whatever is chosen left aside."""
        return float(total_cost(self.arrays.graph, self.costs, picked))

    def set_prices(self, prices: Floats, wanted: Marks | None = None) -> None:
        self.prices = prices
        cumulated = np.zeros(len(prices) + 1)
        np.cumsum(prices, out=cumulated[1:])
        a = self.arrays
        add_prices(a.start, a.costs, a.holdings, cumulated, self.everything if wanted is None else wanted, self.costs)

    def note(self, picked: Ints, held: Floats) -> bool:
        """Keep these choices if they are feasible and the best so far."""
        if held.max(initial=0.0) > self.arrays.limit:
            return False
        cost = self.total(picked)
        if cost >= self.cost or cost - self.arrays.constant >= self.arrays.forbidden:
            return False
        self.cost, self.best, self.idle = cost, picked.copy(), 0
        self.arrays.cap(cost)
        self.publish(self)
        return True

    def random_plan(self, most: float, free: Marks | None = None) -> EliminationPlan:
        """Tables of random size up to 10 ** most."""
        free = self.everything if free is None else free
        tournament = int(self.random.choice((1, 1, 2, 4)))
        while True:
            cap, seed = 10 ** self.random.uniform(2, most), int(self.random.integers(1 << 30))
            plan: EliminationPlan = make_plan(self.arrays.graph, free.copy(), cap, tournament, seed)
            if (plan.work <= MOST_WORK and plan.looks <= MOST_LOOKS) or most <= 2.1:
                return plan
            most = max(2.1, most - 1)

    def solve(self, plan: EliminationPlan, picked: Ints) -> None:
        if len(self.tables) < plan.work:
            self.tables = np.zeros(int(1.3 * plan.work))
        self.looks += plan.looks
        solve_plan(self.arrays.graph, self.costs, plan, self.tables, picked)

    def messages(self, passes: int) -> float:
        """What no choices go below at the present prices, what is held whatever is chosen left aside."""
        low, state = -math.inf, (self.back, self.message_start, self.message)
        for number in range(passes):
            low = pass_messages(self.arrays.graph, self.costs, *state, number % 2 == 0, self.picked)
        return low

    def repair(self, most: int) -> None:
        """Dearer memory where the present choices hold too much, until they fit; then what can be had at old prices."""
        old, limit = self.prices, self.arrays.limit
        up = 0.02
        for _ in range(most):
            held = self.held(self.picked)
            over = np.maximum((held - limit) / self.bytes, 0.0)
            if not over.any() or self.finished:
                break
            unit = abs(self.total(self.picked)) / self.bytes
            rise = up * unit * over * (over.max() / (over @ over)) + np.where(over > 0, 0.2 * self.prices, 0.0)
            self.set_prices(self.prices + rise)
            up *= 1.6
            self.solve(self.random_plan(4.0), self.picked)
            self.note(self.picked, self.held(self.picked))
        self.set_prices(old)
        if self.held(self.picked).max(initial=0.0) > limit:
            return
        for _ in range(6):
            trial = self.picked.copy()
            self.solve(self.random_plan(4.0), trial)
            held = self.held(trial)
            if held.max(initial=0.0) <= limit:
                self.picked = trial
                self.note(trial, held)

    # ---- regions

    def improve(self, rounds: float = math.inf) -> None:
        """By turns among all choices, and among those that the messages hold promising: regions reach further there."""
        rank = self._ranks()
        turns = Turns()
        while rounds > 0 and not self.finished:
            self._adopt()
            if self.best is None:
                self.repair(12)
                rounds -= 1
                continue
            cost, looks = self.cost, self.looks
            if few := turns.few(self.random.random()):
                self._narrow(rank)
            else:
                self._turn()
            turns.note(few, cost - self.cost, self.looks - looks)
            rounds -= TURN

    def _turn(self) -> None:
        for _ in range(TURN):
            if self.finished:
                return
            self.idle += 1
            self._region()

    def _ranks(self) -> Floats:
        """By choice: what it costs more than the best of its node, as far as messages at the best prices tell."""
        a = self.arrays
        self.set_prices(self.best_prices)
        self.messages(SETTLING)
        found = beliefs(a.graph, self.costs, self.back, self.message_start, self.message)
        return np.asarray(found - np.repeat(np.minimum.reduceat(found, a.start[:-1]), self.sizes))

    def _narrow(self, rank: Floats) -> None:
        """A turn among few choices of each node, the present one included."""
        assert self.best is not None
        a, random = self.arrays, self.random
        most = int(10 ** random.uniform(*CANDIDATES))
        kept = candidates(a, rank * (1.0 + random.random(len(rank))), most, self.best)
        few = narrowed(a, kept, self.back)
        place = np.zeros(len(rank), np.int64)  # of a choice among those kept
        place[kept] = np.arange(len(kept))
        first = a.start[:-1]

        def learn(found: Searcher) -> None:
            if found.best is not None:
                picked = kept[few.start[:-1] + found.best] - first
                self.note(picked, self.held(picked))

        inner = Searcher(few, self.deadline, int(random.integers(1 << 30)), self.step)
        inner.best_prices, inner.bound, inner.gap = self.best_prices, self.bound, self.gap
        inner.note(place[first + self.best] - few.start[:-1], self.held(self.best))
        inner.idle, inner.publish = self.idle, learn
        inner._turn()
        self.looks += inner.looks + len(few.graph.pool)

    def _adopt(self) -> None:
        """The other process's solution where it is better."""
        found = self.fetch()
        if found is not None and found[0] < self.cost:
            self.note(found[1], self.held(found[1]))

    def _region(self) -> None:
        a, random = self.arrays, self.random
        size = int(10 ** random.uniform(1, max(1.3, math.log10(a.count) + 0.3)))
        free = self.everything.copy()
        if size < a.count:
            seed, ends = int(random.integers(1 << 30)), a.graph.arc_to
            anywhere = random.random() < 0.5 or not len(ends)
            centre = random.integers(a.count) if anywhere else ends[random.integers(len(ends))]
            grow_ball(a.graph, int(centre), size, free, seed)
        plan = self.random_plan(min(MOST_TABLES, TABLES + 0.5 * (self.idle // IDLE_REGIONS)), free)
        assert self.best is not None
        unit = max(float(self.best_prices.max(initial=0.0)), 1e-4 * (self.cost - a.constant) / self.bytes)
        prices = self.best_prices * random.choice(FRACTIONS)
        held = self.held(self.best)
        picked = self.best.copy()
        up = 0.3 * random.random()
        for _ in range(12):
            if self.finished:
                return
            self.set_prices(prices, plan.free)
            trial = picked.copy()
            self.solve(plan, trial)
            held = held_after(held, a.holdings, picked, trial)
            picked = trial
            over = np.maximum((held - a.limit) / self.bytes, 0.0)
            most = float(over.max(initial=0.0))
            if most == 0.0:
                break
            prices = prices + unit * up * over / most + np.where(over > 0, 0.1 * self.best_prices, 0.0)
            up *= 1.5
        else:
            return
        held = self.held(picked)
        if not self.note(picked, held) and self.total(picked) <= self.cost and held.max(initial=0.0) <= a.limit:
            self.best = picked  # as good: go on from there
