"""Any problem of the stage, however wide: the least cost with bytes at a price, and better plans within a limit.

Takes the place of elimination (stages/solve/search/elimination.py) where that would need tables too large. Message
passing bounds the least from below, elimination of parts at a time brings choices down to it; often both meet, and the
answer is exact. Messages are kept from one price to the next, so that the next answer is near at hand.

Work is counted in passes and rounds: equal problems get equal plans, unless a deadline ends the search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from shardwright.stages.solve.problem.data import Problem
from shardwright.stages.solve.search.elimination import FREE, Minimum, Prices
from shardwright.stages.solve.search.large.arrays import Floats, Ints, flatten
from shardwright.stages.solve.search.large.descent import MOST_TABLES, Searcher
from shardwright.stages.solve.search.large.plain import plain
from shardwright.stages.solve.search.large.presolve import NoChoice, Presolved, reduce

PASSES, MOST_PASSES = 10, 400  # of messages: in a row, and in all for one answer
RISE = 1e-6  # of the bound by a row of passes: below this they are done
TABLES = 4.5  # powers of ten: the tables that bring choices down have fewer entries
IDLE_ROUNDS = 6  # of bringing down, without a better answer: then it stands, if it is allowed
MOST_IDLE_ROUNDS = 48  # else, in larger and larger tables
REGIONS = 230  # that are solved anew for a better plan within a limit
EXACT = 1e-9


class LargeProblem:
    """A problem, what is left of it once it is reduced, and the messages at the last prices."""

    def __init__(self, problem: Problem, seed: int, deadline: float) -> None:
        self.problem, self.seed, self.deadline = problem, seed, deadline
        self.plain = plain(problem)
        now = time.monotonic()
        self.reduced: Presolved | None = None  # None, as the searcher: no plan is allowed
        self.searcher: Searcher | None = None
        with suppress(NoChoice):
            self.reduced = reduce(self.plain.problem, now + 0.5 * (deadline - now))
            self.searcher = self._searcher(self.reduced, None, math.inf)
        self.known: dict[tuple[int, ...], Ints] = {}  # plans by what is left of them

    def _searcher(self, reduced: Presolved, limit: float | None, deadline: float) -> Searcher:
        small = reduced.problem
        most = sum(float(h.usages.max()) for node in small.nodes for h in node.holdings)
        limit = float(reduced.base.max(initial=0.0)) + most if limit is None else limit
        return Searcher(flatten(small, reduced.base, limit, reduced.constant, scale=1e4), deadline, self.seed)

    def minimise(self, prices: Prices = FREE) -> Minimum:
        """A bound of cost + prices * held, and a plan close to it; infinite where no plan is allowed."""
        if self.reduced is None or self.searcher is None:
            return Minimum(math.inf, (0,) * len(self.problem.nodes))
        searcher = self.searcher
        searcher.set_prices(self._spread(prices))
        low, best, value = self._pass(searcher)
        idle = 0
        while value - low > EXACT * abs(value) and time.monotonic() < self.deadline:
            if idle >= (IDLE_ROUNDS if self._allowed(searcher, best) else MOST_IDLE_ROUNDS):
                break
            trial = best.copy()
            searcher.solve(searcher.random_plan(min(MOST_TABLES, TABLES + 0.5 * (idle // IDLE_ROUNDS))), trial)
            reached = searcher.priced(trial)
            idle = 0 if reached < value - EXACT * abs(value) else idle + 1
            if reached <= value:
                best, value = trial, reached
        bytes_ = float(searcher.prices @ self.reduced.base)
        return Minimum(min(low, value) + searcher.arrays.constant + bytes_, self._plan(best))

    def _allowed(self, searcher: Searcher, picked: Ints) -> bool:
        return searcher.total(picked) - searcher.arrays.constant < searcher.arrays.forbidden

    def _pass(self, searcher: Searcher) -> tuple[float, Ints, float]:
        """Messages until the bound stands: it, and the best choices on the way."""
        low, best, value = -math.inf, searcher.picked.copy(), math.inf
        for _ in range(MOST_PASSES // PASSES):
            before, low = low, max(low, searcher.messages(PASSES))
            reached = searcher.priced(searcher.picked)
            if reached < value:
                best, value = searcher.picked.copy(), reached
            done = low - before <= RISE * abs(low) or value - low <= EXACT * abs(value)
            if done or time.monotonic() > self.deadline:
                break
        return low, best, value

    def within(
        self, limit: float | None, prices: Prices, bound: float, gap: float, start: Sequence[int] | None
    ) -> tuple[int, ...] | None:
        """A plan that fits (None: any does), better than the one to start from where that can be found."""
        if self.reduced is None or self.searcher is None:
            return None
        searcher = self._searcher(self.reduced, limit, self.deadline)
        searcher.bound, searcher.gap, searcher.best_prices = bound, gap, self._spread(prices)
        searcher.set_prices(searcher.best_prices)
        searcher.picked = self.searcher.picked.copy()
        if start is not None:
            known = self.known.get(tuple(start))  # None for a plan from elsewhere, whose choices may have gone
            if known is not None:
                searcher.note(known, searcher.held(known))
        searcher.improve(REGIONS)
        return None if searcher.best is None else self._plan(searcher.best)

    def _spread(self, prices: Prices) -> Floats:
        assert self.reduced is not None
        found = np.zeros(len(self.reduced.base))
        np.add.at(found, list(prices.moments), prices.values)
        return found

    def _plan(self, picked: Ints) -> tuple[int, ...]:
        assert self.reduced is not None
        plan = self.plain.read(self.reduced.expand(picked))
        self.known[plan] = picked
        return plan
