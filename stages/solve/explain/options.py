"""The other options of one choice of the plan: what the step would take, and what ruled each of them out.

One choice is changed and all else stays: conversions at its neighbours are found and priced anew, and recompute is
chosen again within the budget. With `again` all other choices are solved once more, with that one fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from shardwright.pipeline.base.errors import ArtifactError
from shardwright.pipeline.base.log import Log
from shardwright.pipeline.config import Checkpoint, Solve
from shardwright.pipeline.cost.resident import gigabytes
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.cost.traffic import lines_of
from shardwright.pipeline.cost.two_lines import unrecomputed_runs
from shardwright.pipeline.ir.cluster import Mesh
from shardwright.pipeline.ir.plan import FrontierPoint, Proof, Sharding
from shardwright.pipeline.ir.verify import InvalidSharding, gathered, verify_sharding
from shardwright.pipeline.ops.uneven import uneven_in
from shardwright.pipeline.sharding.lowering import with_paths
from shardwright.stages.solve.answer.frontier import FrontierSearch
from shardwright.stages.solve.answer.saved import Saved, found_among
from shardwright.stages.solve.explain.priced_run import ItemisedPartition, PlannedRun
from shardwright.stages.solve.problem.build import build, to_sharding
from shardwright.stages.solve.problem.constraints import UserConstraints
from shardwright.stages.solve.problem.storage import Way
from shardwright.stages.solve.search.backends import NothingFound
from shardwright.stages.solve.search.restricted import as_it_is, restrict

NOT_PROVEN = Proof("", "", 0.0, 0.0, 0.0, 0, 0)
NOT_FOUND = "the search ended before it, within its gap"
READ_OTHERWISE = "what is beside it in the plan does not go with it; --solve changes that as well"
SAME = 1e-9  # of a step: what rounding makes of equal times
PLAN = "runs/checkpoint/plan.json"


class OptionVerdict(StrEnum):
    chosen = "chosen"
    slower = "slower"
    equal = "as fast"
    faster = "faster"
    over_budget = "over the budget"
    setting = "a setting"
    neighbours = "its neighbours"
    shape = "does not divide"


@dataclass(frozen=True)
class PricedOption:
    choice: str
    verdict: OptionVerdict
    why: str = ""
    seconds: float | None = None  # by which the step is longer than the plan's
    peak_bytes: int | None = None  # by which the peak is higher
    solved_seconds: float | None = None  # the same where all else is solved again
    solved_peak_bytes: int | None = None


class Scheduled(Protocol):
    """A sharding with the best recompute for the budget (stages.checkpoint)."""

    @property
    def regions(self) -> Any: ...  # None where nothing fits
    @property
    def step_seconds(self) -> float: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def consists(self) -> str: ...


Evaluate = Callable[..., Scheduled]  # stages.checkpoint.choose.evaluate


@dataclass(frozen=True)
class StepOutcome:
    seconds: float
    peak_bytes: int
    over: str = ""  # the budget, by how much and where


@dataclass(frozen=True)
class Change:
    choice: int  # its number among those of its node
    sharding: Sharding  # its conversions not yet found
    picked: tuple[int, ...] | None  # all choices; None where the problem does not have them together


class Options:
    """Of every choice of one partition."""

    def __init__(
        self,
        plan: PlannedRun,
        part: ItemisedPartition,
        solve: Solve,
        checkpoint: Checkpoint,
        evaluate: Evaluate,
        where: str,
        log: Log,
    ) -> None:
        self.plan, self.part, self.solve, self.checkpoint = plan, part, solve, checkpoint
        self.evaluate, self.where, self.log = evaluate, where, log
        load = Workload(plan.graph, plan.profile, part.cluster, part.optimizer_copies, part.sharded.micro_batches)
        summed, self.choices = build(load)
        self.hand = UserConstraints(plan.graph, tuple(axis.name for axis in part.cluster.axes), solve, where)
        self.problem = summed
        # the plan as choices of the problem; a partition of a pipeline is none
        self.picked = None if plan.plan.pipelined else self._as_choices(part.sharding)
        behind = summed.behind(self.picked) if self.picked else 0.0
        if behind:  # with the share of it that the plan leaves exposed
            self.problem = summed.exposing(1 - lines_of(part, unrecomputed_runs(part)).saved / behind)
        self.unconverted = replace(part.sharding, paths={})  # the plan, its conversions not yet found
        self.now = self.outcome(part.sharding)

    def _as_choices(self, sharding: Sharding) -> tuple[int, ...]:
        saved = Saved(PLAN, self.part.cluster.sizes, sharding)
        return found_among(saved, self.plan.graph, self.problem, self.choices)

    def of(self, name: str, most: int, again: float | None = None) -> tuple[tuple[PricedOption, ...], int]:
        """Those of a value or an op, the chosen one first, then by seconds; and how many more there are.

        `most` are priced in full, `again` is how many seconds each may take to be solved again.
        """
        offered = [self.changed(name, k) for k in range(len(self._offered(name)))]
        chosen = offered.index(self.unconverted) if self.picked is None else self.picked[self.choices.index[name]]
        others = [
            self._change(name, k, changed)  # those that make another program than the plan's, each program once
            for k, changed in enumerate(offered)
            if changed != self.unconverted and changed not in offered[:k]
        ]
        ranked = sorted(others, key=self._rank)
        found = [self._option(name, change, again) for change in ranked[:most]]
        found.sort(key=lambda one: math.inf if one.seconds is None else one.seconds)
        first = PricedOption(self._words(name, chosen), OptionVerdict.chosen, "", 0.0, 0)
        return (first, *found), max(0, len(ranked) - most)

    def _offered(self, name: str) -> tuple[Any, ...]:
        known: tuple[Mapping[str, Any], ...] = (self.choices.storage, self.choices.inputs, self.choices.ops)
        return next((own[name] for own in known if name in own), ())

    def _words(self, name: str, k: int) -> str:
        option = self._offered(name)[k]
        if name not in self.choices.ops:
            return str(option)
        return f"{option.name}: {', '.join(map(str, option.inputs))} -> {', '.join(map(str, option.outputs))}"

    def changed(self, name: str, k: int) -> Sharding:
        """The plan with that one choice, its conversions not yet found."""
        old, option = self.unconverted, self._offered(name)[k]
        if name in self.choices.ops:
            new = replace(old, strategies={**old.strategies, name: option})
        elif name in self.choices.inputs:
            new = replace(old, inputs={**old.inputs, name: option})
        else:
            origin = self.plan.graph.values[name].origin
            state = {key: layout for key, layout in old.state.items() if key != origin}
            again = [key for key in old.regathered if key != origin]
            if option.way is Way.regathered:
                again = [key for key in old.storage if key in again or key == origin]
            new = replace(
                old,
                storage={**old.storage, origin: option.layout},
                state=state | ({origin: option.state} if option.state != option.layout else {}),
                regathered=tuple(again),
            )
        if not new.regathered:
            return new
        apart = gathered(self.part.graph, new, self.part.cluster.sizes)  # what nobody gathers, nobody regathers
        return replace(new, regathered=tuple(name for name in new.regathered if name in apart))

    def _change(self, name: str, k: int, changed: Sharding) -> Change:
        """With the choice that it comes to: a parameter that is split, and read otherwise, is gathered."""
        if self.picked is not None:
            try:
                picked = self._as_choices(changed)
            except ArtifactError:
                return Change(k, changed, None)
            return Change(picked[self.choices.index[name]], changed, picked)
        ways, part = self.choices.storage.get(name, ()), self.part
        if ways and ways[k].way is Way.as_it_lies:
            wanted = replace(ways[k], way=Way.gathered)
            if wanted in ways and part.graph.values[name].origin in gathered(part.graph, changed, part.cluster.sizes):
                return Change(ways.index(wanted), changed, None)
        return Change(k, changed, None)

    def _rank(self, change: Change) -> float:
        """Seconds by the problem, which is quick; of a pipeline's partition by its price."""
        if change.picked is not None:
            return self.problem.cost(change.picked)
        if self.picked is not None or self._misfit(change.sharding):
            return math.inf
        return self.part.with_sharding(self._with_paths(change.sharding)).step.seconds

    def _with_paths(self, sharding: Sharding) -> Sharding:
        return with_paths(self.part.graph, sharding, self.part.cluster)

    def _misfit(self, changed: Sharding) -> str:
        try:
            verify_sharding(self.part.graph, changed, self.part.cluster.sizes, uneven_in(self.part.graph).spots)
        except InvalidSharding as error:
            return str(error)
        return ""

    def _option(self, name: str, change: Change, again: float | None) -> PricedOption:
        words = self._words(name, change.choice)
        if misfit := self._misfit(change.sharding):
            return PricedOption(words, OptionVerdict.shape, misfit)
        if self.picked is not None and change.picked is None:
            alone = PricedOption(words, OptionVerdict.neighbours, READ_OTHERWISE)
            return alone if again is None else self._solved(alone, name, change, again)
        outcome = self.outcome(self._with_paths(change.sharding))
        more, peak = outcome.seconds - self.now.seconds, outcome.peak_bytes - self.now.peak_bytes
        setting = self.hand.forbids(name, self.choices, change.choice) if self.hand.asks else None
        verdict, why = OptionVerdict.slower, ""
        if setting is not None:
            verdict, why = OptionVerdict.setting, f"`{setting}`"
        elif outcome.over:
            verdict, why = OptionVerdict.over_budget, outcome.over
        elif abs(more) <= SAME * self.now.seconds:
            verdict = OptionVerdict.equal
        elif more < 0:
            verdict, why = OptionVerdict.faster, NOT_FOUND
        found = PricedOption(words, verdict, why, None if outcome.over else more, peak)
        if again is None or self.picked is None or setting is not None:
            return found
        return self._solved(found, name, change, again)

    def outcome(self, sharding: Sharding) -> StepOutcome:
        """Of the step; of a pipeline's partition what its devices do and hold, with nothing recomputed."""
        part = self.part
        if self.picked is None:
            price = part.with_sharding(sharding).step
            return StepOutcome(price.seconds, price.fixed_bytes + sum(link.memory.kept for link in price.links))
        point = FrontierPoint(sharding, 0.0, 0, 0, NOT_PROVEN)
        frontier = replace(self.plan.frontier, meshes=(Mesh(part.cluster.axes),), points=(point,), submesh_points=())
        found = self.evaluate(part.graph, part.profile, part.cluster, frontier, 0, self.checkpoint)
        if found.regions is not None:
            return StepOutcome(found.step_seconds, found.peak_bytes)
        over = found.peak_bytes - frontier.budget_bytes
        return StepOutcome(math.inf, found.peak_bytes, f"by {gigabytes(over)} at the least: {found.consists}")

    def _solved(self, option: PricedOption, name: str, change: Change, seconds: float) -> PricedOption:
        """With all other choices solved again within the budget's memory, or the plan's where that is more.

        Never worse than with that one changed alone.
        """
        assert self.picked is not None
        kept = list(self.hand.kept(self.choices) if self.hand.asks else as_it_is(self.problem).kept)
        kept[self.choices.index[name]] = (change.choice,)
        left = restrict(self.problem, tuple(kept))
        limit = max(float(self.plan.plan.budget_bytes), self.problem.peak(self.picked))
        settings = replace(self.solve, time_limit_s=seconds)
        found = [] if option.seconds is None else [(option.seconds, option.peak_bytes)]
        with suppress(NothingFound):
            best = FrontierSearch(left.problem, settings, self.where, self.log).within(limit, seconds)
            sharding = to_sharding(self.plan.graph, self.choices, left.expand(best.picked))
            outcome = self.outcome(self._with_paths(sharding))
            if not outcome.over:
                found.append((outcome.seconds - self.now.seconds, outcome.peak_bytes - self.now.peak_bytes))
        if not found:
            return option
        least, peak = min(found, key=lambda one: one[0])
        return replace(option, solved_seconds=least, solved_peak_bytes=peak)
