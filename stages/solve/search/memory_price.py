"""A memory limit by prices: a proven lower bound, and a plan that fits.

Put a price on the bytes that are held at some moments. The least of cost + prices * (held - limit) is below the cost of
every plan that fits, whatever the prices (Lagrange); elimination finds it exactly. Prices are raised and lowered to
make this bound as high as possible: every plan seen so far is a plane above it, and the next prices are where the
lowest of the planes are highest (Kelley's cutting planes), a small linear program for the solver. Moments enter when a
plan is seen to hold too much there. Where elimination would be too wide, other ways to the least at some prices take
its place (decomposition.py).

At the best prices several plans are equally good, some too large and some too small. With a tilt, nodes before a
turning point pay a little less for memory than those after it: the further the turn, the more is held. The last turn at
which the plan fits gives one that uses the budget up to the weight of one node.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shardwright.stages.solve.problem.data import Array, Problem
from shardwright.stages.solve.search.elimination import FREE, Elimination, Minimum, Prices

# Small ones keep the plan near the bound, large ones pay for changing over from one layout to another between layers.
TILTS = (1e-6, 0.03, -0.03, 0.1, -0.1, 0.3, -0.3, 0.6, -0.6, 0.9, -0.9)
MOST_ROUNDS = 60

Plane = tuple[float, tuple[float, ...]]  # a plan's cost, and by how much it is over the limit at each priced moment
BestPrices = Callable[[list[Plane], float], tuple[float, list[float]]]  # integer_program.best_prices


@dataclass(frozen=True, eq=False)
class EvaluatedPlan:
    """A plan with what it costs and holds."""

    picked: tuple[int, ...]
    cost: float
    held: Array

    @property
    def peak(self) -> float:
        return float(self.held.max(initial=0.0))


@dataclass(frozen=True, eq=False)
class Bounded:
    bound: float  # no plan that fits costs less
    prices: Prices  # that prove it
    best: EvaluatedPlan | None = None  # the cheapest plan seen that fits


class Minimiser(Protocol):
    """Finds the least of cost + prices * held."""

    def minimise(self, prices: Prices) -> Minimum: ...


class OnlyPlan:
    """Of a problem without a choice, as one device has it."""

    def __init__(self, problem: Problem) -> None:
        self.picked = (0,) * len(problem.nodes)
        self.cost, self.held = problem.cost(self.picked), problem.held(self.picked)

    def minimise(self, prices: Prices) -> Minimum:
        held = sum(price * self.held[moment] for price, moment in zip(prices.values, prices.moments, strict=True))
        return Minimum(self.cost + float(held), self.picked)


class Bounder:
    """Bounds and plans of one problem at any limit: what was seen at one serves the others."""

    method = "elimination"

    def __init__(self, problem: Problem, best_prices: BestPrices, least: Minimiser | None = None) -> None:
        self.problem, self.best_prices = problem, best_prices
        single = all(len(node.costs) == 1 for node in problem.nodes)
        self.least = least or (OnlyPlan(problem) if single else Elimination(problem))
        self.seen: dict[tuple[int, ...], EvaluatedPlan] = {}
        self.tried: list[tuple[float, float]] = []  # the least at some prices, and what these come to for a byte
        self.fastest = self.look(FREE)[1]

    @property
    def floor(self) -> float:
        """No plan costs less."""
        return self.fastest.cost

    def look(self, prices: Prices) -> tuple[float, EvaluatedPlan]:
        """The least of cost + prices * held, and the plan that has it."""
        found = self.least.minimise(prices)
        if not prices.tilt:
            self.tried.append((found.value, sum(prices.values)))
        return found.value, self.know(found.picked)

    def know(self, picked: tuple[int, ...]) -> EvaluatedPlan:
        """A plan, found here or elsewhere, joins those that answers are chosen from."""
        if picked not in self.seen:
            self.seen[picked] = EvaluatedPlan(picked, self.problem.cost(picked), self.problem.held(picked))
        return self.seen[picked]

    def probe(self, prices: Prices) -> tuple[float, Array]:
        """The least at some prices, and what is held by that which has it."""
        least, plan = self.look(prices)
        return least, plan.held

    def planes(self) -> list[tuple[float, Array]]:
        """Above the bound at any prices: the cost of what was seen, and what it holds."""
        return [(s.cost, s.held) for s in self.seen.values()]

    def bound_at(self, limit: float) -> float:
        """What is known of the cost of plans within that limit, whatever it was tried for."""
        return max(least - limit * total for least, total in self.tried)

    def within(self, limit: float, gap: float, deadline: float) -> Bounded:
        """The bound at that limit, as close as the gap asks or the deadline allows, and the best plan that fits."""
        raised = Bounded(self.bound_at(limit), FREE)
        if self.fastest.peak > limit and self.problem.length > 0:
            raised = self.raise_bound(limit, raised, gap, deadline)
            self.fit(limit, raised, gap, deadline)
        if (best := self.best_within(limit)) is None:
            self.smallest(deadline)
            best = self.best_within(limit)
        return Bounded(min(raised.bound, best.cost) if best else raised.bound, raised.prices, best)

    def raise_bound(self, limit: float, start: Bounded, gap: float, deadline: float) -> Bounded:
        """Prices that raise the bound, as far as planes tell."""
        moments = list(start.prices.moments) or [int(self.fastest.held.argmax())]
        bound, prices = start.bound, start.prices
        most = 1e3 * self.fastest.cost / max(1.0, limit)
        for _ in range(MOST_ROUNDS):
            if time.monotonic() >= deadline:
                break
            planes = [(cost, tuple(float(held[m]) - limit for m in moments)) for cost, held in self.planes()]
            promised, values = self.best_prices(planes, most)
            tried = Prices(tuple(moments), tuple(values))
            least, held = self.probe(tried)
            value = least - limit * sum(values)
            if value >= bound or not prices.moments:
                bound, prices = max(bound, value), tried
            worst = int(held.argmax())
            if held[worst] > limit and worst not in moments:
                moments.append(worst)
            elif promised - bound <= max(gap / 8, 1e-6) * max(promised, 1e-30) or len(self.planes()) == len(planes):
                break
        return Bounded(bound, prices)

    def fit(self, limit: float, raised: Bounded, gap: float, deadline: float) -> None:
        """Plans that take one way up to some node and another from there on, until one is close enough to the bound."""
        for tilt in TILTS:
            best = self.best_within(limit)
            if best and best.cost - raised.bound <= gap * best.cost:
                return
            low, high = 0, len(self.problem.nodes)  # the plan with the turn at low fits, that with the turn at high not
            while high - low > 1 and time.monotonic() < deadline:
                turn = (low + high) // 2
                _, plan = self.look(Prices(raised.prices.moments, raised.prices.values, turn, tilt))
                low, high = (turn, high) if (plan.peak <= limit) == (tilt > 0) else (low, turn)

    def best_within(self, limit: float) -> EvaluatedPlan | None:
        fits = [s for s in self.seen.values() if s.peak <= limit]
        return min(fits, key=lambda s: (s.cost, s.picked), default=None)

    def smallest(self, deadline: float) -> EvaluatedPlan:
        """A plan that holds as little as memory prices can bring about: bytes cost much wherever there was a peak."""
        price = 1e3 * self.fastest.cost / max(1.0, self.fastest.peak)
        best = self.fastest
        if not best.peak:
            return best
        moments = [int(best.held.argmax())]
        for _ in range(8):
            _, plan = self.look(Prices(tuple(moments), (price / len(moments),) * len(moments)))
            best = min(best, plan, key=lambda s: (s.peak, s.cost))
            worst = int(plan.held.argmax())
            if worst in moments or time.monotonic() > deadline:
                break
            moments.append(worst)
        return best
