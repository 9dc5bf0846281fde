"""The time/memory frontier: from the fastest plan, however large, down to the smallest one.

The fastest plan is found by elimination, which is exact. For the others bytes get prices
(stages/solve/search/memory_price.py): the widest gap between two neighbours on the frontier is halved again and again,
and the plans that are best at the prices on the way join the frontier. Such a plan is the fastest of its own size, or
as close to it as its gap says.

Where the problem is too wide for elimination, it is cut open or left to the search for large problems
(stages/solve/search/decomposition.py): plans and bounds come from there, each with its gap, and points share the time.

Where prices leave a gap that is larger than asked for, on the frontier and at the user's own budget, the integer
program is solved as well if it is small enough for the solver; its plan counts if it is better, and its bound if it is
higher.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import TypeVar

from shardwright.pipeline.base.log import Advance, Log
from shardwright.pipeline.config import Search, Solve
from shardwright.pipeline.ir.plan import Proof
from shardwright.stages.solve.problem.data import Problem
from shardwright.stages.solve.search.backends import NothingFound
from shardwright.stages.solve.search.decomposition import WideBounder, bounder_of
from shardwright.stages.solve.search.integer_program import best_prices, solve, without_too_costly
from shardwright.stages.solve.search.memory_price import Bounder, EvaluatedPlan
from shardwright.stages.solve.search.restricted import Restricted, without_dominated

MOST_CHOICES = 5000  # of a problem in which dominated ones are looked for
MOST_VARIABLES = 1500  # choices that may be left, for an integer program that is worth a try
ELIMINATION, PRICES, PROGRAM = Bounder.method, "prices", "integer program"


@dataclass(frozen=True)
class Solution:
    picked: tuple[int, ...]
    cost: float
    peak: float  # bytes
    proof: Proof


P = TypeVar("P", EvaluatedPlan, Solution)


def without_beaten(plans: list[P]) -> list[P]:
    """Fastest first; each holds less than those before it."""
    kept: list[P] = []
    for plan in sorted(plans, key=lambda s: (s.cost, s.peak)):
        if not kept or plan.peak < kept[-1].peak:
            kept.append(plan)
    return kept


class FrontierSearch:
    def __init__(self, problem: Problem, settings: Solve, where: str, log: Log) -> None:
        self.problem, self.settings, self.where, self.log = problem, settings, where, log
        self.seconds: dict[str, float] = {}
        prices = best_prices(settings, where)
        with self.clock("bound"):
            if settings.search is Search.large:
                self.bounder: Bounder = WideBounder(problem, prices, settings.seed, settings.time_limit_s)
            else:
                self.bounder = bounder_of(problem, prices, settings.seed, settings.time_limit_s, log)

    def start_from(self, picked: tuple[int, ...]) -> None:
        """Answers are never worse than this plan where it fits."""
        self.bounder.know(picked)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start

    def frontier(self, budget: float, advance: Advance) -> list[Solution]:
        """Fastest first; plans that another beats in both time and memory are left out."""
        if not isfinite(self.bounder.fastest.cost):
            raise NothingFound(
                "no plan was found that keeps to the constraints",
                where=f"{self.where}: constraints",
                remedy="remove one, or raise time_limit_s",
            )
        deadline = time.monotonic() + self.settings.time_limit_s
        plans = [self.bounder.fastest]
        if self.settings.frontier_points > 1:
            with self.clock("bound"):
                plans = self._fill(deadline, advance)
        limits = [plan.peak for plan in plans[1:]]
        if budget < self.bounder.fastest.peak and self.bounder.smallest(deadline).peak <= budget:
            limits.append(budget)
        ends = time.monotonic() + self.settings.time_limit_s
        found = [self.within(limit, self._share(ends, len(limits) - n)) for n, limit in enumerate(limits)]
        found.append(self._solution(self.bounder.fastest, self.bounder.method, self.bounder.floor))
        advance(self.settings.frontier_points)
        return without_beaten(found)

    def _share(self, ends: float, parts: int) -> float:
        """Seconds for the next of so many parts: all that one solve may take, where elimination makes that enough."""
        exact = self.bounder.method == ELIMINATION
        return self.settings.time_limit_s if exact else max(0.0, ends - time.monotonic()) / parts

    def _fill(self, deadline: float, advance: Advance) -> list[EvaluatedPlan]:
        """Halves the widest gap in memory until there are enough plans, or no gap has one inside."""
        plans = without_beaten([self.bounder.fastest, self.bounder.smallest(deadline)])
        exhausted: set[tuple[float, float]] = set()
        while len(plans) < self.settings.frontier_points and time.monotonic() < deadline:
            gaps = [pair for pair in pairwise(plans) if (pair[0].peak, pair[1].peak) not in exhausted]
            if not gaps:
                break
            fast, small = max(gaps, key=lambda pair: pair[0].peak - pair[1].peak)
            left = self._share(deadline, self.settings.frontier_points - len(plans))
            until = min(deadline, time.monotonic() + left)
            self.bounder.within((fast.peak + small.peak) / 2, self.settings.gap, until)
            plans = without_beaten(list(self.bounder.seen.values()))
            if not any(small.peak < plan.peak < fast.peak for plan in plans):
                exhausted.add((fast.peak, small.peak))
            advance(min(len(plans), self.settings.frontier_points))
        while len(plans) > self.settings.frontier_points:  # the first and the last stay, the others far apart
            inner = range(1, len(plans) - 1)
            plans.pop(min(inner, key=lambda i: plans[i - 1].peak - plans[i + 1].peak, default=1))
        return plans

    def within(self, limit: float, seconds: float | None = None) -> Solution:
        """The best plan within a limit that some plan keeps."""
        deadline = time.monotonic() + (self.settings.time_limit_s if seconds is None else seconds)
        with self.clock("bound"):
            bounded = self.bounder.within(limit, self.settings.gap, deadline)
        if bounded.best is None:
            raise NothingFound(
                f"no plan was found that holds at most {limit / 1e9:.4g} GB at every moment",
                where=f"{self.where}: memory_budget_gb",
                remedy="raise it",
            )
        method = PRICES if self.bounder.method == ELIMINATION else self.bounder.method
        known = self._solution(bounded.best, method, bounded.bound)
        if known.proof.gap <= self.settings.gap or self.settings.search in (Search.dp, Search.large):
            return known
        with self.clock("exact"):
            return self._exact(limit, known, bounded.prices.moments)

    @cached_property
    def _small(self) -> Restricted | None:
        """The problem for the integer program; None where it would be too large."""
        if sum(len(node.costs) for node in self.problem.nodes) > MOST_CHOICES:
            return None
        small = without_dominated(self.problem)
        return small if sum(map(len, small.kept)) <= MOST_VARIABLES else None

    def _exact(self, limit: float, known: Solution, moments: tuple[int, ...]) -> Solution:
        small = self._small
        if small is None:
            return known
        try:
            bound, left = without_too_costly(small.problem, limit, moments, known.cost, self.settings, self.where)
            answer = solve(left.problem, limit, moments, self.settings, self.where)
        except NothingFound as nothing:
            self.log.warning("%s: the plan that prices found stands, with its proven gap", nothing)
            return known
        picked = small.expand(left.expand(answer.picked))
        cost, peak = self.problem.cost(picked), self.problem.peak(picked)
        if peak > limit * (1 + 1e-9) or cost > known.cost:
            picked, cost, peak = known.picked, known.cost, known.peak
        proof = self.proof(PROGRAM, cost, max(known.proof.bound, bound, answer.bound))
        return Solution(picked, cost, peak, replace(proof, variables=answer.variables, constraints=answer.constraints))

    def _solution(self, plan: EvaluatedPlan, method: str, bound: float) -> Solution:
        return Solution(plan.picked, plan.cost, plan.peak, self.proof(method, plan.cost, bound))

    def proof(self, method: str, cost: float, bound: float) -> Proof:
        bound = max(0.0, min(bound, cost))
        gap = (cost - bound) / cost if cost else 0.0
        return Proof(self.settings.backend.value, method, cost, bound, gap, 0, 0, self.settings.seed)
