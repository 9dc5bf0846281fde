"""What changed between two runs: settings, mesh, layouts, recompute; and which of it accounts for the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.solve.explain.one import starred
from stages.solve.explain.priced_run import Item, ItemKind, PlannedRun
from stages.solve.explain.whole import PARTS, SAME, in_words, parts_of, stored_as

NOTHING = "-"
REST = "what runs together, or waits"  # a card's kernels, the passes of a pipeline


@dataclass(frozen=True)
class Changed:
    name: str  # equal layers as `layers.*.up.weight`
    before: str
    after: str
    count: int = 1


@dataclass(frozen=True)
class Moved:
    name: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Diff:
    names: tuple[str, str]
    settings: tuple[Changed, ...]
    plan: tuple[Changed, ...]
    parameters: tuple[Changed, ...]
    inputs: tuple[Changed, ...]
    ops: tuple[Changed, ...]
    seconds: tuple[Moved, ...]  # the step, then its parts
    peak_bytes: Moved
    causes: tuple[Moved, ...]  # what accounts for the difference, the largest first; they add up to it
    same: int  # causes that are as they were


def explain_diff(
    before: PlannedRun, after: PlannedRun, names: tuple[str, str], settings: tuple[Changed, ...] = ()
) -> Diff:
    first, second = before.plan.prediction, after.plan.prediction
    causes = _causes(before, after)
    step = Moved("step", first.step_seconds, second.step_seconds)
    parts = _parts(before, after, PARTS)
    telling = [one for one in causes if one.before != one.after]
    return Diff(
        names=names,
        settings=settings,
        plan=_changes(_decided(before), _decided(after)),
        parameters=_changes(_stored(before), _stored(after)),
        inputs=_changes(_inputs(before), _inputs(after)),
        ops=_changes(_run(before), _run(after)),
        seconds=(step, *(part for part in parts if part.before or part.after)),
        peak_bytes=Moved("peak", first.peak_bytes, second.peak_bytes),
        causes=tuple(sorted(telling, key=lambda one: -abs(one.difference))),
        same=len(causes) - len(telling),
    )


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Changed, ...]:
    """Each setting that differs, by its key."""
    return _changes(*({key: (key, str(value)) for key, value in one.items()} for one in (before, after)))


def _decided(run: PlannedRun) -> dict[str, tuple[str, str]]:
    plan = run.plan
    found = {**in_words(plan), "device": plan.device, "budget": f"{plan.budget_bytes / 1e9:.4g} GB"}
    return {key: (key, value) for key, value in found.items()}


def _stored(run: PlannedRun) -> dict[str, tuple[str, str]]:
    return {
        name: (starred(name), stored_as(part.sharding, name))
        for part in reversed(run.parts)
        for name in part.sharding.storage
    }


def _inputs(run: PlannedRun) -> dict[str, tuple[str, str]]:
    given = {value.name for value in run.graph.values.values() if value.role.value == "input"}
    return {
        name: (name, str(layout))
        for part in reversed(run.parts)
        for name, layout in part.sharding.inputs.items()
        if name in given
    }


def _run(run: PlannedRun) -> dict[str, tuple[str, str]]:
    """Ops have numbers of their own: equal ones are those of equal modules."""
    found = {}
    for part in reversed(run.parts):
        for op in part.graph.ops:
            strategy = part.sharding.strategies[op.name]
            inputs, outputs = (", ".join(map(str, own)) for own in (strategy.inputs, strategy.outputs))
            found[op.name] = _op_label(op.module, op.target), f"{inputs} to {outputs}"
    return found


def _op_label(module: str, target: str) -> str:
    return f"{starred(module) or 'the model itself'} {target.split('.')[1]}"


def _changes(before: Mapping[str, tuple[str, str]], after: Mapping[str, tuple[str, str]]) -> tuple[Changed, ...]:
    """Of each name its label and how it is; equal changes of equal labels are one."""
    counted: dict[tuple[str, str, str], int] = defaultdict(int)
    for name in dict.fromkeys([*before, *after]):
        label = (after.get(name) or before[name])[0]
        old, new = (own[name][1] if name in own else NOTHING for own in (before, after))
        if old != new:
            counted[label, old, new] += 1
    return tuple(Changed(*key, count) for key, count in counted.items())


def _causes(before: PlannedRun, after: PlannedRun) -> list[Moved]:
    """Seconds of equal things added up, then what is beside them: together they are the two steps.

    Of a pipeline the busiest partition's: the step waits for it.
    """
    old, new = (_by_label(run) for run in (before, after))
    found = [Moved(label, old.get(label, 0.0), new.get(label, 0.0)) for label in dict.fromkeys([*old, *new])]
    predicted = [run.plan.prediction for run in (before, after)]
    found += _parts(before, after, ("recompute", "bubble", "host"))
    rest = [predicted[0].step_seconds - sum(one.before for one in found)]
    rest.append(predicted[1].step_seconds - sum(one.after for one in found))
    rounding = SAME * max(one.step_seconds for one in predicted)
    return [*found, Moved(REST, *(0.0 if abs(one) <= rounding else one for one in rest))]


def _parts(before: PlannedRun, after: PlannedRun, names: tuple[str, ...]) -> list[Moved]:
    old, new = (parts_of(run.plan.prediction) for run in (before, after))
    return [Moved(name, old[name], new[name]) for name in names]


def _by_label(run: PlannedRun) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for item in run.busiest().items():
        found[_label(item)] += item.seconds
    return found


def _label(item: Item) -> str:
    if item.kind is ItemKind.op:
        return _op_label(item.module, item.what)
    if item.kind is ItemKind.talk:
        return f"collectives inside {_op_label(item.module, item.what)}"
    if item.kind is ItemKind.conversion:
        of_parameter = item.name.startswith(f"{item.module}.") and item.module
        reader = starred(item.module) or "the model itself"
        return f"conversions of {starred(item.name)}" if of_parameter else f"conversions for {reader}"
    return f"{item.kind} of {starred(item.name)}"
