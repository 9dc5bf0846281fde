"""The time/memory frontier: from the fastest plan, however large, down to the smallest one.

The fastest plan is the integer program without a memory row. For the others put a price p on a byte and minimise cost +
p usage: memory then is just another cost, and elimination answers exactly (the integer program where the graph is too
wide for it). The answer x is the fastest plan of its own size: any plan y with usage(y) <= usage(x) has
cost(y) >= bound(p) - p usage(x). Two neighbours on the frontier give the price at which both are worth the same; the
plan that is best at that price lies between them, or there is none on the hull. At the user's own budget the integer
program gets its memory row, since the best plan there need not lie on the hull; if the solver finds none in time, the
next smaller plan of the frontier stands in, with the gap that the hull proves.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeline.config import Solve
from pipeline.ir.plan import Proof
from pipeline.log import Advance, Log
from stages.solve.backends import NothingFound
from stages.solve.elimination import minimise
from stages.solve.model import build_model, read_choices
from stages.solve.presolve import reduce
from stages.solve.problem import Node, Problem


@dataclass(frozen=True)
class Solution:
    picked: tuple[int, ...]
    cost: float
    usage: float
    price: float  # seconds per byte at which it is the best plan
    proof: Proof


class Sweep:
    def __init__(self, problem: Problem, settings: Solve, where: str, log: Log) -> None:
        self.problem, self.settings, self.where, self.log = problem, settings, where, log
        self.backend = importlib.import_module(f"stages.solve.backends.{settings.backend.value}")

    def frontier(self, budget: float, advance: Advance) -> list[Solution]:
        """Fastest first; plans that another beats in both time and memory are left out."""
        found = [self.fastest()]
        if self.settings.frontier_points > 1:
            smallest = self.at_price(1000 * found[0].cost / max(1.0, found[0].usage))
            found = without_beaten([*found, smallest])
        advance(len(found))
        exhausted: set[tuple[float, float]] = set()
        while len(found) < self.settings.frontier_points:
            gaps = [pair for pair in pairwise(found) if (pair[0].usage, pair[1].usage) not in exhausted]
            if not gaps:
                break
            fast, small = max(gaps, key=lambda pair: pair[0].usage - pair[1].usage)
            between = self.at_price((small.cost - fast.cost) / (fast.usage - small.usage))
            grown = without_beaten([*found, between])
            if len(grown) == len(found):
                exhausted.add((fast.usage, small.usage))
            found = grown
            advance(len(found))
        if found[-1].usage <= budget < found[0].usage:
            found = without_beaten([*found, self.within(budget, found)])
        advance(self.settings.frontier_points)
        return found

    def fastest(self) -> Solution:
        solution, bound = self._solve(None)
        return replace(solution, proof=_with_bound(solution.proof, bound))

    def at_price(self, price: float) -> Solution:
        """The best plan where a byte costs `price` seconds."""
        whole = priced(self.problem, price)
        picked = minimise(whole)
        if picked is None:
            solution, bound = self._solve(None, price)
        else:
            solution, bound = self._solution(picked, Proof("elimination", 0.0, 0.0, 0.0, 0, 0)), whole.cost(picked)
        proof = _with_bound(solution.proof, bound - price * solution.usage)
        return replace(solution, price=price, proof=proof)

    def within(self, limit: float, hull: list[Solution]) -> Solution:
        """The best plan with the memory row at that limit; its bound is the better of the solver's and the hull's."""
        proven = max(s.proof.bound + s.price * (s.usage - limit) for s in hull)
        try:
            solution, bound = self._solve(limit)
        except NothingFound as nothing:
            stand_in = next(s for s in hull if s.usage <= limit)
            self.log.warning("%s: the next smaller plan of the frontier stands in", nothing)
            return replace(stand_in, proof=_with_bound(stand_in.proof, proven))
        return replace(solution, proof=_with_bound(solution.proof, max(bound, proven)))

    def _solve(self, limit: float | None, price: float = 0.0) -> tuple[Solution, float]:
        """The integer program's plan within the limit, and the solver's bound of cost + price * usage."""
        small = reduce(priced(self.problem, price) if price else self.problem)
        built = build_model(small.problem, None if limit is None else limit - small.constant_usage)
        bound = self.backend.solve(built.model, self.settings, self.where) * built.unit + small.constant_cost
        picked = small.expand(read_choices(small.problem, built.model))
        proof = Proof(self.settings.backend.value, 0.0, 0.0, 0.0, built.variables, built.constraints)
        return self._solution(picked, proof), bound

    def _solution(self, picked: tuple[int, ...], proof: Proof) -> Solution:
        cost = self.problem.cost(picked)
        return Solution(picked, cost, self.problem.usage(picked), 0.0, replace(proof, objective=cost))


def priced(problem: Problem, price: float) -> Problem:
    """The same problem with memory as a cost: no choice uses memory any more."""
    nodes = (
        Node(n.name, tuple(c + price * u for c, u in zip(n.costs, n.usages, strict=True)), (0.0,) * len(n.costs))
        for n in problem.nodes
    )
    return Problem(tuple(nodes), problem.edges)


def _with_bound(proof: Proof, bound: float) -> Proof:
    bound = max(0.0, min(bound, proof.objective))
    return replace(proof, bound=bound, gap=(proof.objective - bound) / proof.objective if proof.objective else 0.0)


def without_beaten(solutions: list[Solution]) -> list[Solution]:
    kept: list[Solution] = []
    for solution in sorted(solutions, key=lambda s: (s.cost, s.usage)):
        if not kept or solution.usage < kept[-1].usage:
            kept.append(solution)
    return kept
