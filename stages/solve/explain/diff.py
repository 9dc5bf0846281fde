"""What changed between two runs: settings, mesh, layouts, recompute; and which of it accounts for the time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.plan import Prediction
from shardwright.stages.solve.explain.one import WHOLE_MODEL, starred
from shardwright.stages.solve.explain.priced_run import Item, ItemKind, PlannedRun
from shardwright.stages.solve.explain.whole import PARTS, SAME, in_words, parts_of, stored_as

NOTHING = "-"
REST = "what runs together, or waits"  # a card's kernels, the passes of a pipeline

Facts = dict[str, tuple[str, str]]  # of each name its label, and how it is


@dataclass(frozen=True)
class Changed:
    name: str  # equal layers as `layers.*.up.weight`
    before: str
    after: str
    count: int = 1


@dataclass(frozen=True)
class CostChange:
    name: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        """None where they differ by the order in which parts were added up."""
        return 0.0 if math.isclose(self.before, self.after, rel_tol=1e-12) else self.after - self.before


@dataclass(frozen=True)
class Diff:
    names: tuple[str, str]
    settings: tuple[Changed, ...]
    plan: tuple[Changed, ...]
    parameters: tuple[Changed, ...]
    inputs: tuple[Changed, ...]
    ops: tuple[Changed, ...]
    seconds: tuple[CostChange, ...]  # the step, then its parts
    peak_bytes: CostChange
    causes: tuple[CostChange, ...]  # what accounts for the difference, the largest first; they add up to it
    same: int  # causes that are as they were


def explain_diff(
    before: PlannedRun, after: PlannedRun, names: tuple[str, str], settings: tuple[Changed, ...] = ()
) -> Diff:
    first, second = before.plan.prediction, after.plan.prediction
    causes = _causes(before, after)
    step = CostChange("step", first.step_seconds, second.step_seconds)
    telling = [one for one in causes if one.difference]
    old, new = _facts(before), _facts(after)
    return Diff(
        names=names,
        settings=settings,
        **{part: changes(old[part], new[part]) for part in old},
        seconds=(step, *(part for part in _parts(first, second, PARTS) if part.before or part.after)),
        peak_bytes=CostChange("peak", first.peak_bytes, second.peak_bytes),
        causes=tuple(sorted(telling, key=lambda one: -abs(one.difference))),
        same=len(causes) - len(telling),
    )


def _facts(run: PlannedRun) -> dict[str, Facts]:
    """By part of the diff. What several partitions have is as the first has it.

    Ops have numbers of their own: equal ones are those of equal modules.
    """
    plan = run.plan
    decided = {**in_words(plan, run.graph), "device": plan.device, "budget": f"{plan.budget_bytes / 1e9:.4g} GB"}
    given = {value.name for value in run.graph.of_role(Role.INPUT)}
    facts: dict[str, Facts] = {"plan": {key: (key, value) for key, value in decided.items()}}
    facts |= {"parameters": {}, "inputs": {}, "ops": {}}
    for part in reversed(run.parts):
        own = part.sharding
        facts["parameters"] |= {name: (starred(name), stored_as(own, name)) for name in own.storage}
        facts["inputs"] |= {name: (name, str(layout)) for name, layout in own.inputs.items() if name in given}
        for op in part.graph.ops:
            strategy = own.strategies[op.name]
            read, written = (", ".join(map(str, layouts)) for layouts in (strategy.inputs, strategy.outputs))
            facts["ops"][op.name] = _op_label(op.module, op.target), f"{read} to {written}"
    return facts


def _op_label(module: str, target: str) -> str:
    return f"{starred(module) or WHOLE_MODEL} {target.split('.')[1]}"


def changes(before: Facts, after: Facts) -> tuple[Changed, ...]:
    """What differs; equal changes of equal labels are one."""
    counted = Counter[tuple[str, str, str]]()
    for name in dict.fromkeys([*before, *after]):
        label = (after.get(name) or before[name])[0]
        old, new = (own[name][1] if name in own else NOTHING for own in (before, after))
        if old != new:
            counted[label, old, new] += 1
    return tuple(Changed(*key, count) for key, count in counted.items())


def _causes(before: PlannedRun, after: PlannedRun) -> list[CostChange]:
    """Seconds of equal things added up, then what is beside them: together they are the two steps.

    Of a pipeline the busiest partition's: the step waits for it.
    """
    old, new = defaultdict[str, float](float), defaultdict[str, float](float)
    for run, seconds in ((before, old), (after, new)):
        for item in run.busiest().items():
            seconds[_label(item)] += item.seconds
    first, second = before.plan.prediction, after.plan.prediction
    found = [CostChange(label, old[label], new[label]) for label in dict.fromkeys([*old, *new])]
    found += _parts(first, second, ("recompute", "bubble", "host"))
    rest = [first.step_seconds - sum(one.before for one in found)]
    rest.append(second.step_seconds - sum(one.after for one in found))
    rounding = SAME * max(first.step_seconds, second.step_seconds)
    return [*found, CostChange(REST, *(0.0 if abs(one) <= rounding else one for one in rest))]


def _parts(before: Prediction, after: Prediction, names: tuple[str, ...]) -> list[CostChange]:
    old, new = parts_of(before), parts_of(after)
    return [CostChange(name, old[name], new[name]) for name in names]


def _label(item: Item) -> str:
    if item.kind is ItemKind.op:
        return _op_label(item.module, item.what)
    if item.kind is ItemKind.talk:
        return f"collectives inside {_op_label(item.module, item.what)}"
    if item.kind is ItemKind.conversion:
        of_parameter = item.name.startswith(f"{item.module}.") and item.module
        reader = starred(item.module) or WHOLE_MODEL
        return f"conversions of {starred(item.name)}" if of_parameter else f"conversions for {reader}"
    return f"{item.kind} of {starred(item.name)}"
