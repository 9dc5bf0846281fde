"""Everything that is solved for one mesh: its problem, what the user leaves of it, plans and baselines."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from shardwright.pipeline.base.log import Advance, Log
from shardwright.pipeline.config import Solve
from shardwright.pipeline.cost.chain_memory import unrecomputed_peak
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.cost.traffic import lines_of
from shardwright.pipeline.cost.two_lines import unrecomputed_runs, unrecomputed_seconds
from shardwright.pipeline.ir.plan import Baseline, FrontierPoint, Proof, Sharding
from shardwright.pipeline.sharding.lowering import with_paths
from shardwright.stages.solve.answer.baselines import baselines
from shardwright.stages.solve.answer.frontier import ELIMINATION, PRICES, FrontierSearch, Solution
from shardwright.stages.solve.answer.saved import Saved, check_allowed, found_among
from shardwright.stages.solve.problem.build import build, to_sharding
from shardwright.stages.solve.problem.constraints import UserConstraints
from shardwright.stages.solve.problem.storage import Way
from shardwright.stages.solve.search.elimination import least_resident
from shardwright.stages.solve.search.restricted import Restricted, as_it_is, restrict

NO_PROOF = Proof("", "given", 0.0, 0.0, 0.0, 0, 0)
GIVEN = "given"  # a proof's method: the plan was saved, not found
MOST_SHARES = 4  # plans that are played to find how much of what they send stays exposed
LITTLE = 0.02  # of a share: what is not searched again for


class MeshProblem:
    def __init__(self, workload: Workload, settings: Solve, where: str, log: Log) -> None:
        self.workload, self.settings, self.where = workload, settings, where
        self.graph, self.cluster = workload.graph, workload.cluster
        self.given: list[tuple[int, ...]] = []  # plans that were saved, by what is left of the problem
        start = time.monotonic()
        self.summed, self.choices = build(workload)
        self.share = 1 - workload.cluster.overlap.hidden
        self.build_seconds = time.monotonic() - start
        self._search(log)

    def _search(self, log: Log, known: Collection[tuple[int, ...]] = ()) -> None:
        """With that share of what may run behind other work. `known`: plans that a search with another share found."""
        self.problem = self.summed.exposing(self.share)
        self.left = self._left_by(self.settings)
        self.sweep = FrontierSearch(self.left.problem, self.settings, self.where, log)
        for picked in (*self.given, *known):
            self.sweep.start_from(picked)

    def settle(self, log: Log) -> None:
        """The search with the share that its own fastest plan leaves exposed, as that is played.

        The first share is the least that any plan can have: `promise` is then a bound. After that each plan tells the
        share for the next one, until a plan comes again; the share of the fastest in the play is kept.
        """
        tried: dict[tuple[int, ...], tuple[float, float]] = {}  # plan -> its seconds, the share that it leaves
        most = MOST_SHARES if self._exact else 1
        while len(tried) < most:
            picked = self.left.expand(self.sweep.bounder.fastest.picked)
            if picked in tried or not math.isfinite(self.problem.cost(picked)) or not self.summed.behind(picked):
                break
            tried[picked] = self._played(picked)
            self._take(tried[picked][1], log)
        if tried:
            self._take(min(tried.values())[1], log)

    @property
    def _exact(self) -> bool:
        return self.sweep.bounder.method == ELIMINATION

    def _played(self, picked: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of a plan's step, and the share of what may run behind other work that does not."""
        sharding = with_paths(self.graph, to_sharding(self.graph, self.choices, picked), self.cluster)
        priced = self.workload.priced(sharding)
        ran = unrecomputed_runs(priced)
        lines = lines_of(priced, ran)
        seconds = priced.step.seconds_with(sum(one.seconds for one in ran)) - lines.saved
        return seconds, 1 - lines.saved / self.summed.behind(picked)

    def _take(self, share: float, log: Log) -> None:
        if abs(share - self.share) > LITTLE:
            self.share = share
            self._search(log, () if self._exact else [self.sweep.bounder.fastest.picked])

    def _left_by(self, settings: Solve, ways: Collection[Way] = ()) -> Restricted:
        """What the settings leave of the problem; of the ways to store a parameter these, where any is named."""
        hand = self._hand(settings)
        if not hand.asks and not ways:
            return as_it_is(self.problem)
        kept = list(hand.kept(self.choices))
        for name, stored in self.choices.storage.items() if ways else ():
            number = self.choices.index[name]
            kept[number] = tuple(k for k in kept[number] if stored[k].way in ways) or kept[number]
        return restrict(self.problem, tuple(kept))

    def _hand(self, settings: Solve) -> UserConstraints:
        return UserConstraints(self.graph, tuple(axis.name for axis in self.cluster.axes), settings, self.where)

    def start_from(self, saved: Saved) -> None:
        """The search knows this plan from the beginning, and the frontier has a place for it."""
        picked = found_among(saved, self.graph, self.problem, self.choices)
        check_allowed(picked, self.choices, self.left, self._hand(self.settings))
        self.given.append(self.left.shrink(picked))
        self.sweep.start_from(self.given[-1])

    def given_points(self) -> list[FrontierPoint]:
        """The plans that the search started from, with what it proved."""
        return [self._point(self._known(picked, GIVEN)) for picked in self.given]

    def judged_points(self, budget: float) -> list[FrontierPoint]:
        """The same without a search for others, each with the bound on plans that fit the budget as it does."""
        found = []
        for picked in self.given:
            known = self._known(picked, GIVEN)
            bound = self.sweep.within(max(known.peak, budget)).proof.bound
            found.append(self._point(replace(known, proof=self.sweep.proof(GIVEN, known.cost, bound))))
        return found

    def promise(self, budget: float) -> float:
        """No plan within the budget is faster, before recompute; infinite where no plan keeps to the constraints."""
        fastest = self.sweep.bounder.fastest
        return fastest.cost if fastest.peak <= budget else max(fastest.cost, self.sweep.bounder.bound_at(budget))

    def likely(self, budget: float) -> float:
        """The same with what the fastest plan leaves exposed when it is played, and not the least that any does."""
        promise, picked = self.promise(budget), self.left.expand(self.sweep.bounder.fastest.picked)
        behind = self.summed.behind(picked) if math.isfinite(promise) else 0.0
        return promise + (max(0.0, self._played(picked)[1] - self.share) * behind if behind else 0.0)

    def points(self, budget: float, advance: Advance) -> list[FrontierPoint]:
        return [self._point(solution) for solution in self.sweep.frontier(budget, advance)]

    def _point(self, solution: Solution) -> FrontierPoint:
        sharding = to_sharding(self.graph, self.choices, self.left.expand(solution.picked))
        return price_point(self.workload, sharding, solution.proof)

    def least(self, settings: Solve, ways: Collection[Way] = ()) -> Sharding | None:
        """The plan that keeps least for good under these settings; None where it is not known."""
        left = self._left_by(settings, ways)
        picked = self._least(left)
        return to_sharding(self.graph, self.choices, left.expand(picked)) if picked else None

    def least_point(self) -> FrontierPoint | None:
        """The same under the user's settings, priced."""
        picked = self._least(self.left)
        return self._point(self._known(picked, PRICES)) if picked else None

    def _least(self, left: Restricted) -> tuple[int, ...] | None:
        parameters = {self.choices.index[name] for name in self.choices.storage}
        return least_resident(left.problem, parameters, self.sweep.bounder.fastest.cost)

    def _known(self, picked: tuple[int, ...], method: str) -> Solution:
        """A plan that the sweep did not ask for, with what is known of those that hold no more than it."""
        cost, peak = self.left.problem.cost(picked), self.left.problem.peak(picked)
        return Solution(picked, cost, peak, self.sweep.proof(method, cost, self.sweep.bounder.bound_at(peak)))


def price_point(workload: Workload, sharding: Sharding, proof: Proof) -> FrontierPoint:
    """The plan with its conversions' paths, and what its program is predicted to cost."""
    sharding = with_paths(workload.graph, sharding, workload.cluster)
    priced = workload.priced(sharding)
    seconds, resident = unrecomputed_seconds(priced), priced.step.resident_bytes
    return FrontierPoint(sharding, seconds, resident, unrecomputed_peak(priced), proof)


def most_promising(meshes: list[MeshProblem], budget: float, count: int) -> list[MeshProblem]:
    """The meshes on which the fastest plan is likely fastest, of equal ones the first; and those with a saved plan.

    By the bounds alone a mesh whose plans send what nothing hides would look as good as one whose plans hide it.
    """
    possible = [mesh for mesh in meshes if math.isfinite(mesh.promise(budget))]
    seconds = MeshProblem.likely if len(possible) > count else MeshProblem.promise
    best = sorted(possible or meshes[:1], key=lambda mesh: seconds(mesh, budget))[:count]
    return best + [mesh for mesh in possible if mesh.given and mesh not in best]


def best_rows(meshes: list[MeshProblem]) -> tuple[Baseline, ...]:
    """Of each kind the fastest on any of the meshes."""
    best: dict[str, Baseline] = {}
    for number, mesh in enumerate(meshes):
        for row in baselines(
            mesh.graph, mesh.choices, mesh.problem, partial(price_point, mesh.workload, proof=NO_PROOF)
        ):
            if row.name not in best or row.seconds < best[row.name].seconds:
                best[row.name] = replace(row, mesh=number)
    return tuple(best.values())
