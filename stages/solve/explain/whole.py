"""The plan in words, and a module of it: what costs most, where the memory goes, why other plans lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.pipeline.cost.corrected import basis_in_words
from shardwright.pipeline.cost.resident import Kept, resident_parts, total_of
from shardwright.pipeline.cost.step import ParameterPrice
from shardwright.pipeline.cost.whole_ops import whole_ops
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Alternative, Plan, Prediction, Region, Sharding
from shardwright.pipeline.ops.samples import norms_in_words
from shardwright.stages.solve.explain.one import WHOLE_MODEL, HeldBytes, inside, starred
from shardwright.stages.solve.explain.priced_run import Item, ItemKind, PlannedRun

PARTS = ("compute", "communication", "recompute", "optimizer", "bubble", "host")
SAME = 1e-9  # of a step: what rounding leaves
LARGEST = 5  # parts of the memory that are named
OF_PARAMETERS = (ItemKind.gradient, ItemKind.optimizer)


@dataclass(frozen=True)
class Cost:
    what: str
    seconds: float
    count: int = 1


@dataclass(frozen=True)
class PlanSummary:
    plan: tuple[tuple[str, str], ...]  # mesh, pipeline, micro-batches, recompute
    step_seconds: float
    parts: tuple[Cost, ...]
    peak_bytes: int
    budget_bytes: int
    memory: tuple[HeldBytes, ...]
    largest: tuple[HeldBytes, ...]  # of what stays resident
    partition: int | None  # whose ops and memory these are: the busiest of a pipeline
    priced_seconds: float  # of all that is listed below, once a step and with nothing recomputed
    ops: tuple[Cost, ...]  # by class, the most costly first
    collectives: tuple[Cost, ...]
    parameters: tuple[Cost, ...]  # how many are stored so; seconds of their sums and conversions
    whole_ops: tuple[Cost, ...]  # for lack of a rule
    alternatives: tuple[Alternative, ...]


def explain_whole(plan: PlannedRun) -> PlanSummary:
    own, part = plan.plan, plan.busiest()
    items, predicted = part.items(), own.prediction
    kept = resident_parts(part.sharded, part.optimizer_copies)
    peak = own.partitions[part.number].peak_bytes if own.pipelined else predicted.peak_bytes
    resident = [HeldBytes(kind.value, total) for kind in Kept if (total := total_of(kept, kind))]
    rest = HeldBytes("activations, temporaries, the batch", max(0, peak - sum(one.nbytes for one in resident)))
    paid: dict[str, float] = defaultdict(float)  # by parameter, or by value
    for item in items:
        if item.kind is not ItemKind.op:
            paid[item.name] += item.seconds
    stored = _costs((stored_as(part.sharding, origin), paid[origin]) for origin in part.sharding.storage)
    without_rule = whole_ops(part, predicted.step_seconds)
    return PlanSummary(
        plan=tuple(in_words(own, plan.graph).items()),
        step_seconds=predicted.step_seconds,
        parts=tuple(Cost(name, value) for name, value in parts_of(predicted).items() if value),
        peak_bytes=peak,
        budget_bytes=own.budget_bytes,
        memory=(*resident, rest),
        largest=tuple(HeldBytes(one.label, one.nbytes) for one in kept[:LARGEST]),
        partition=part.number if own.pipelined else None,
        priced_seconds=sum(item.seconds for item in items),
        ops=_most_costly((item.what, item.seconds) for item in items if item.kind is ItemKind.op),
        collectives=_most_costly((_move(item), item.seconds) for item in items if item.collectives),
        parameters=tuple(sorted(stored, key=lambda cost: -cost.count)),
        whole_ops=tuple(Cost(one.target, one.seconds, one.count) for one in without_rule),
        alternatives=own.alternatives,
    )


def parts_of(predicted: Prediction) -> dict[str, float]:
    """Seconds of the step by what its devices do; what rounding leaves is nothing."""
    found = {name: getattr(predicted, f"{name}_seconds") for name in PARTS}
    return {name: value if abs(value) > SAME * predicted.step_seconds else 0.0 for name, value in found.items()}


def in_words(plan: Plan, graph: OpGraph) -> dict[str, str]:
    """What is decided beside layouts."""
    meshes = dict.fromkeys(" x ".join(f"{name}={size}" for name, size in part.axes) for part in plan.partitions)
    found = {"mesh": ", ".join(meshes) or "one device"}
    if plan.pipelined:
        spans = ", ".join(f"{part.first}..{part.last}" for part in plan.partitions)
        chunks = f", {plan.chunks} on the same devices" if plan.chunks > 1 else ""
        found["pipeline"] = f"{plan.schedule} of {len(plan.partitions)} partitions (links {spans}){chunks}"
    again = [region for part in plan.partitions for region in part.regions if region.recompute]
    spans = ", ".join(map(_span, again))
    found["micro-batches"] = str(plan.micro_batches)
    but = ", not in the last micro-batch" if plan.keeps_last else ""
    found["recompute"] = f"{len(again)} regions (links {spans}){but}" if again else "nothing"
    found |= {"prediction": basis} if (basis := basis_in_words(plan)) else {}
    found |= {"batch norms": norms} if (norms := norms_in_words(graph, plan)) else {}
    return found


def _span(region: Region) -> str:
    kept = f" keeping {len(region.kept)}" if region.kept else ""
    return (f"{region.first}..{region.last}" if region.first < region.last else str(region.first)) + kept


def _costs(named: Iterable[tuple[str, float]]) -> list[Cost]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for name, value in named:
        seconds[name].append(value)
    return [Cost(name, sum(own), len(own)) for name, own in seconds.items()]


def _most_costly(named: Iterable[tuple[str, float]]) -> tuple[Cost, ...]:
    return tuple(sorted(_costs(named), key=lambda cost: -cost.seconds))


def _move(item: Item) -> str:
    why = {ItemKind.gradient: "of gradients", ItemKind.talk: "of an op's own"}.get(item.kind, "of a conversion")
    return f"{' + '.join(item.collectives)}, {why}"


def stored_as(sharding: Sharding, origin: str) -> str:
    """`R`, `R, state S(0)` or `S(0), regathered`"""
    state = f", state {sharding.state[origin]}" if sharding.state.get(origin) else ""
    return f"{sharding.storage[origin]}{state}" + (", regathered" if origin in sharding.regathered else "")


@dataclass(frozen=True)
class ModuleRow:
    kind: ItemKind
    name: str
    what: str
    how: str
    seconds: float
    count: int


@dataclass(frozen=True)
class StoredParameter:
    name: str
    stored: str
    resident_bytes: int  # of all of them, as the seconds are
    sums: float
    optimizer: float
    count: int


@dataclass(frozen=True)
class Module:
    name: str
    step_seconds: float
    seconds: float  # of all that is in it
    rows: tuple[ModuleRow, ...]
    parameters: tuple[StoredParameter, ...]


def explain_module(plan: PlannedRun, pattern: str) -> Module:
    """With a star in the name, what equal layers have is one row: their ops, which have numbers, by their modules."""
    grouped = any(letter in pattern for letter in "*?[")
    rows: dict[tuple[ItemKind, str, str, str], list[float]] = defaultdict(list)
    kept: dict[tuple[str, str], list[ParameterPrice]] = defaultdict(list)
    for part in plan.parts:
        for item in part.items():
            if item.kind not in OF_PARAMETERS and inside(pattern, item.module):
                what = item.what.split(".")[1] if item.what.count(".") == 2 else item.what  # of `aten.linear.default`
                named = item.name.startswith(f"{item.module}.")
                label = starred(item.name if named else item.module or WHOLE_MODEL) if grouped else item.name
                rows[item.kind, label, what, item.how].append(item.seconds)
        for value, price in part.parameters.items():
            name = part.graph.values[value].origin
            if inside(pattern, name):
                kept[starred(name) if grouped else name, stored_as(part.sharding, name)].append(price)
    found = tuple(ModuleRow(*key, sum(own), len(own)) for key, own in rows.items())
    parameters = []
    for key, own in kept.items():
        resident = round(sum(one.resident for one in own))
        sums, optimizer = sum(one.gradient_sum for one in own), sum(one.optimizer for one in own)
        parameters.append(StoredParameter(*key, resident, sums, optimizer, len(own)))
    total = sum(row.seconds for row in found) + sum(one.sums + one.optimizer for one in parameters)
    return Module(pattern, plan.plan.prediction.step_seconds, total, found, tuple(parameters))
