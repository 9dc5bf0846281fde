"""Bounds and plans of a problem that is too wide for elimination.

`CutBounder` cuts it open (separators.py): the bound is that of the cut problem, raised by prices and, in turn, by
drawing the copies together; plans settle what was cut as some plan did, and are then the best within the limit by
elimination. `WideBounder` asks the search for large problems (large/priced.py), which knows no width at all.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import suppress
from math import inf, isfinite

from shardwright.pipeline.base.log import Log
from shardwright.stages.solve.problem.data import Array, Problem
from shardwright.stages.solve.search.elimination import FREE, Elimination, Prices, TooWide
from shardwright.stages.solve.search.large.priced import LargeProblem
from shardwright.stages.solve.search.memory_price import BestPrices, Bounded, Bounder, EvaluatedPlan
from shardwright.stages.solve.search.separators import CutOpen

MOST_DRAWS = 3  # times that copies are drawn together at one limit
MOST_SETTLED = 4  # plans that show how to settle what was cut, at one limit
SETTLED_GAP = 1e-3  # within which the best plan of one such way is looked for
MOST_RAISES, RAISE = 10, 1.5  # times that prices are raised until plans fit, and how much


def bounder_of(problem: Problem, best_prices: BestPrices, seed: int, seconds: float, log: Log) -> Bounder:
    """By elimination where that is possible; else by the next best way, which is said."""
    try:
        return Bounder(problem, best_prices)
    except TooWide as too_wide:
        entries = too_wide
    found: Bounder
    try:
        found = CutBounder(problem, best_prices)
    except TooWide:
        found = WideBounder(problem, best_prices, seed, seconds)
    log.info("the graph is too wide for elimination (%s): planned by %s, with a bound", entries, found.method)
    return found


def fastest(problem: Problem, seconds: float) -> tuple[int, ...]:
    """The fastest plan, or one close to it where the problem is too wide for elimination."""
    for least in (Elimination, CutOpen):
        with suppress(TooWide):
            return least(problem).minimise().picked
    return LargeProblem(problem, 0, time.monotonic() + seconds).minimise().picked


class _Near(Bounder):
    """What has the least at some prices is not known for sure: the fastest plan is the fastest that was seen."""

    def know(self, picked: tuple[int, ...]) -> EvaluatedPlan:
        seen = super().know(picked)
        if len(self.seen) > 1 and seen.cost < self.fastest.cost:
            self.fastest = seen
        return seen

    @property
    def floor(self) -> float:
        return max(least for least, paid in self.tried if not paid)

    def within(self, limit: float, gap: float, deadline: float) -> Bounded:
        if not isfinite(self.fastest.cost):
            return Bounded(self.floor, FREE)
        return super().within(limit, gap, deadline)

    def best_within(self, limit: float) -> EvaluatedPlan | None:
        best = super().best_within(limit)
        return best if best and isfinite(best.cost) else None


class CutBounder(_Near):
    method = "cut elimination"

    def __init__(self, problem: Problem, best_prices: BestPrices) -> None:
        self.cut = CutOpen(problem)
        self.had: dict[tuple[int, ...], tuple[float, Array]] = {}  # plans of the cut problem
        self.last: tuple[int, ...] = ()
        self.settled: dict[Hashable, Bounder] = {}
        super().__init__(problem, best_prices, self.cut)
        for plan in self.cut.draw(FREE, inf):
            self.know(plan)
        self.look(FREE)
        if isfinite(self.floor) and not isfinite(self.fastest.cost):
            raise TooWide("its copies cannot be settled")

    def look(self, prices: Prices) -> tuple[float, EvaluatedPlan]:
        found = self.cut.minimise(prices)
        self.tried.append((found.value, sum(prices.values)))
        self.last = found.relaxed or ()
        if self.last not in self.had:
            narrow = self.cut.elimination.problem
            self.had[self.last] = narrow.cost(self.last), narrow.held(self.last)
        return found.value, self.know(found.picked)

    def probe(self, prices: Prices) -> tuple[float, Array]:
        least, _ = self.look(prices)
        return least, self.had[self.last][1]

    def planes(self) -> list[tuple[float, Array]]:
        had = ((cost + self.cut.shift(picked), held) for picked, (cost, held) in self.had.items())
        return [(cost, held) for cost, held in had if isfinite(cost)]

    def raise_bound(self, limit: float, start: Bounded, gap: float, deadline: float) -> Bounded:
        self.cut.drawn = {}
        raised = super().raise_bound(limit, start, gap, deadline)
        for _ in range(MOST_DRAWS):
            before = raised.bound
            for plan in self.cut.draw(raised.prices, deadline):
                self.know(plan)
            raised = super().raise_bound(limit, raised, gap, deadline)
            if raised.bound - before <= gap / 8 * abs(raised.bound):
                break
        return raised

    def fit(self, limit: float, raised: Bounded, gap: float, deadline: float) -> None:
        """The best plans within the limit that settle what was cut as the most promising plans do."""
        tried: set[Hashable] = set()
        for plan in self._promising(limit, raised.prices):
            best = self.best_within(limit)
            near = best is not None and best.cost - raised.bound <= gap * best.cost
            if near or time.monotonic() > deadline:
                return
            key, settled = self.cut.settle(plan.picked)
            if key in tried:
                continue
            tried.add(key)
            if key not in self.settled:
                self.settled[key] = Bounder(settled.problem, self.best_prices)
            inner = self.settled[key]
            promising = best is None or inner.fastest.cost < best.cost
            if promising and inner.smallest(deadline).peak <= limit:
                found = inner.within(limit, max(gap, SETTLED_GAP), deadline).best
                if found is not None:
                    self.know(settled.expand(found.picked)[: len(self.problem.nodes)])

    def _promising(self, limit: float, prices: Prices) -> Iterator[EvaluatedPlan]:
        """Plans that are good at these prices; then such as are good at higher ones, until some fit."""

        def promise(plan: EvaluatedPlan) -> float:
            paid = zip(prices.values, prices.moments, strict=True)
            return plan.cost + sum(price * (float(plan.held[m]) - limit) for price, m in paid)

        yield from sorted((s for s in self.seen.values() if isfinite(s.cost)), key=promise)[:MOST_SETTLED]
        enough = 0
        for _ in range(MOST_RAISES):
            _, plan = self.look(prices)
            yield plan
            enough += plan.peak <= limit
            if enough > 1:
                return
            worst, moments, values = int(plan.held.argmax()), prices.moments, prices.values
            if worst not in moments:
                moments, values = (*moments, worst), (*values, max(values, default=0.0))
            prices = Prices(moments, tuple(RAISE * v for v in values))


class WideBounder(_Near):
    method = "large search"

    def __init__(self, problem: Problem, best_prices: BestPrices, seed: int, seconds: float) -> None:
        self.wide = LargeProblem(problem, seed, time.monotonic() + seconds)
        super().__init__(problem, best_prices, self.wide)
        better = self.wide.within(None, FREE, self.floor, 0.0, self.fastest.picked)
        if better is not None:
            self.know(better)

    def planes(self) -> list[tuple[float, Array]]:
        return [(s.cost, s.held) for s in self.seen.values() if isfinite(s.cost)]

    def within(self, limit: float, gap: float, deadline: float) -> Bounded:
        self.wide.deadline = deadline
        return super().within(limit, gap, deadline)

    def smallest(self, deadline: float) -> EvaluatedPlan:
        self.wide.deadline = deadline
        return super().smallest(deadline)

    def fit(self, limit: float, raised: Bounded, gap: float, deadline: float) -> None:
        start = self.best_within(limit)
        found = self.wide.within(limit, raised.prices, raised.bound, gap, start.picked if start else None)
        if found is not None:
            self.know(found)
