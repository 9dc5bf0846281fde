"""The time/memory frontier: from the fastest plan, however large, down to the smallest one.

The fastest plan is found by elimination, which is exact. For the others bytes get prices (stages/solve/bound.py): each
round between two neighbours on the frontier asks for the bound at the memory half way between them, and the plans that
are best at the prices on the way join the frontier. Such a plan is the fastest of its own size, or as close to it as its
gap says: prices once tried bound the cost at any other limit too.

At the user's own budget the best plan need not be one that prices can find. There the integer program is solved as
well, where it is small enough for the solver; its plan counts if it is better, and its bound if it is higher.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeline.config import Solve
from pipeline.ir.plan import Proof
from pipeline.log import Advance, Log
from stages.solve.backends import NothingFound
from stages.solve.bound import Bounder, Seen
from stages.solve.data import Problem
from stages.solve.exact import solve, without_dominated

MOST_VARIABLES = 6000  # of an integer program that is worth a try
PRICED = "prices"


@dataclass(frozen=True, eq=False)
class Solution:
    picked: tuple[int, ...]
    cost: float
    usage: float  # bytes at the peak
    proof: Proof


class Sweep:
    def __init__(self, problem: Problem, settings: Solve, where: str, log: Log) -> None:
        self.problem, self.settings, self.where, self.log = problem, settings, where, log
        self.seconds: dict[str, float] = {}
        with self.clock("bound"):
            self.bounder = Bounder(problem)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start

    def frontier(self, budget: float, advance: Advance) -> list[Solution]:
        """Fastest first; plans that another beats in both time and memory are left out."""
        deadline = time.monotonic() + self.settings.time_limit_s
        with self.clock("bound"):
            plans = [self.bounder.fastest]
            if self.settings.frontier_points > 1:
                plans = without_beaten([*plans, self.bounder.smallest(deadline)])
                self._fill(plans, advance, deadline)
                plans = self._spread(without_beaten(list(self.bounder.seen.values())))
        found = [self._solution(plan) for plan in plans]
        if plans[-1].peak <= budget < plans[0].peak:
            own = self.within(budget)
            found = [*(s for s in found if s.cost < own.cost or s.usage < own.usage), own]
        advance(self.settings.frontier_points)
        return sorted(found, key=lambda s: (s.cost, -s.usage))

    def _fill(self, plans: list[Seen], advance: Advance, deadline: float) -> None:
        """Halves the widest gap in memory until there are enough plans, or no gap has one inside."""
        exhausted: set[tuple[float, float]] = set()
        while len(plans) < self.settings.frontier_points and time.monotonic() < deadline:
            gaps = [pair for pair in pairwise(plans) if (pair[0].peak, pair[1].peak) not in exhausted]
            if not gaps:
                return
            fast, small = max(gaps, key=lambda pair: pair[0].peak - pair[1].peak)
            self.bounder.within((fast.peak + small.peak) / 2, self.settings.gap, deadline)
            grown = without_beaten(list(self.bounder.seen.values()))
            if not any(small.peak < plan.peak < fast.peak for plan in grown):
                exhausted.add((fast.peak, small.peak))
            plans[:] = grown
            advance(min(len(plans), self.settings.frontier_points))

    def _spread(self, plans: list[Seen]) -> list[Seen]:
        """As many as were asked for, the first and the last among them, as far apart as they come."""
        while len(plans) > self.settings.frontier_points:
            inner = range(1, len(plans) - 1)
            plans.pop(min(inner, key=lambda i: plans[i - 1].peak - plans[i + 1].peak, default=1))
        return plans

    def within(self, limit: float) -> Solution:
        """The best plan within a limit that the fastest does not keep."""
        deadline = time.monotonic() + self.settings.time_limit_s
        with self.clock("bound"):
            bounded = self.bounder.within(limit, self.settings.gap, deadline)
        best = bounded.best
        assert best is not None, "the smallest plan fits"
        priced = _proof(PRICED, best.cost, bounded.bound)
        if priced.gap <= self.settings.gap:
            return Solution(best.picked, best.cost, best.peak, priced)
        with self.clock("exact"):
            return self._exact(limit, best, bounded.bound, bounded.prices.moments)

    def _exact(self, limit: float, best: Seen, bound: float, moments: tuple[int, ...]) -> Solution:
        small = without_dominated(self.problem)
        known = Solution(best.picked, best.cost, best.peak, _proof(PRICED, best.cost, bound))
        if sum(map(len, small.kept)) > MOST_VARIABLES:
            return known
        try:
            answer = solve(small.problem, limit, moments, self.settings, self.where)
        except NothingFound as nothing:
            self.log.warning("%s: the plan that prices found stands, with its proven gap", nothing)
            return known
        picked = small.expand(answer.picked)
        held = self.problem.held(picked)
        cost, usage = self.problem.cost(picked), float(held.max(initial=0.0))
        if usage > limit * (1 + 1e-9) or cost > best.cost:
            picked, cost, usage = best.picked, best.cost, best.peak
        proof = _proof(self.settings.backend.value, cost, max(bound, answer.bound))
        return Solution(picked, cost, usage, replace(proof, variables=answer.variables, constraints=answer.constraints))

    def _solution(self, plan: Seen) -> Solution:
        return Solution(plan.picked, plan.cost, plan.peak, _proof(PRICED, plan.cost, self.bounder.bound_at(plan.peak)))


def _proof(backend: str, cost: float, bound: float) -> Proof:
    bound = max(0.0, min(bound, cost))
    return Proof(backend, cost, bound, (cost - bound) / cost if cost else 0.0, 0, 0)


def without_beaten(plans: list[Seen]) -> list[Seen]:
    kept: list[Seen] = []
    for plan in sorted(plans, key=lambda s: (s.cost, s.peak)):
        if not kept or plan.peak < kept[-1].peak:
            kept.append(plan)
    return kept
