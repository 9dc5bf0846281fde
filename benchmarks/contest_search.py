"""The search of stages/solve/search/large from nothing: a first solution, prices of memory from below, then regions.

1. `start`       a first feasible solution: memory at so high a price that it fits
2. `raise_bound` subgradient steps on the prices, a few message passes after each; the choices that the messages suggest
                 are repaired where they hold too much
3. `improve`     better choices region by region (stages/solve/search/large/descent.py)
"""

from __future__ import annotations

import math
import time

import numpy as np

from shardwright.stages.solve.search.large.descent import Searcher


class ContestSearcher(Searcher):
    def run(self, dual_share: float) -> None:
        self.start()
        begin = time.monotonic()
        self.raise_bound(begin + dual_share * (self.deadline - begin))
        self.improve()

    def start(self) -> None:
        """Raise a price on all memory until a solution fits."""
        pool = self.arrays.graph.pool
        largest = float(pool.max(initial=0.0, where=pool < self.arrays.forbidden))
        unit = 1e-6 * (float(self.arrays.costs.max(initial=0.0)) + largest) / self.bytes
        for power in range(12):
            if self.finished:
                return
            self.set_prices(np.full(len(self.arrays.base), unit * 10.0**power))
            self.pass_messages(10)
            self.solve(self.random_plan(4.0), self.picked)
            if self.note(self.picked, self.held(self.picked)):
                return
            self.repair(6)
            if self.best is not None:
                return

    def raise_bound(self, until: float) -> None:
        limit = self.arrays.limit
        self.set_prices(np.zeros(len(self.prices)))
        now = time.monotonic()
        self._settle_messages(now + 0.2 * (until - now))
        pace, stalled, number = 1.0, 0, 0
        while pace > 0.003 and time.monotonic() < until and not self.finished:
            before = self.bound
            low = self.pass_messages(4)
            stalled = 0 if self.bound > before + 1e-5 * abs(before) else stalled + 1
            if stalled > 12:
                pace, stalled = 0.7 * pace, 0
            held = self.held(self.picked)
            self.note(self.picked, held)
            over = (held - limit) / self.bytes
            slope = np.where((self.prices > 0) | (over > 0), over, 0.0)
            target = self.cost if self.best is not None else low + abs(low)
            gain = pace * max(target - low, 1e-3 * abs(low)) / max(float(slope @ slope), 1e-12)
            prices = np.maximum(0.0, self.prices + gain * slope / self.bytes)
            if number % 10 == 9:
                self.repair(12)
            self.set_prices(prices)
            number += 1
            if number % 50 == 0:
                self._adopt()

    def _settle_messages(self, until: float) -> None:
        """Passes without a price until the bound hardly rises: without a binding limit this is the whole search."""
        before = -math.inf
        while time.monotonic() < until and not self.finished:
            low = self.pass_messages(20)
            self.note(self.picked, self.held(self.picked))
            if low - before < 1e-4 * abs(low):
                return
            before = low

    def pass_messages(self, passes: int) -> float:
        """Message passes at the present prices: a bound, and choices in `picked`."""
        a = self.arrays
        bound = self.messages(passes) + a.constant + float((self.prices * (a.base - a.limit)).sum())
        if bound > self.bound:
            self.bound, self.best_prices = bound, self.prices
            self.publish(self)
        return bound
