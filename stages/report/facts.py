"""Everything the page shows, as plain values: gathered from the artifacts that are there.

The rows of the predicted step, by op class and collective, sum to what the plan predicts for each part. Ops and
conversions are priced one by one, as the solver did; the plan may price a whole link by its kernels, or as it was
measured, a pipeline by its slices, and collectives as far as nothing hides them. Then the rows say how a part divides,
and `scale` what they were multiplied by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwright.pipeline.cost.corrected import basis_in_words
from shardwright.pipeline.cost.step import Priced
from shardwright.pipeline.cost.whole_ops import WholeOp, whole_ops_of
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Event, Plan, Prediction
from shardwright.pipeline.ir.profile import as_run
from shardwright.pipeline.ir.program import Call, Convert
from shardwright.pipeline.ir.report import Report
from shardwright.pipeline.ops.samples import norms_in_words
from shardwright.pipeline.sharding.conversions import conversion_of
from shardwright.pipeline.sharding.partitions import busiest
from shardwright.stages.report.memory import MemoryFacts, memory_of
from shardwright.stages.report.model import ModelFacts, model_of
from shardwright.stages.report.priced import PricedPartition, Sources, class_of, priced_partitions

MOST_STEPS = 2000  # of training that are drawn: a long run must not make a large page
MOST_RANKS = 8  # whose peaks are listed one by one
SUMS = "gradient sums, in buckets"
BEFORE = "conversions before the chain"
OF_PARTITION = ("first", "last", "axes", "regions")  # what is shown of the plan's partitions


@dataclass(frozen=True)
class Mark:
    """A plan as a point: its seconds of a step, and its peak."""

    kind: str  # chosen, frontier, baseline, alternative
    name: str
    seconds: float
    peak_bytes: int
    about: str = ""


@dataclass(frozen=True)
class SecondsRow:
    part: str  # compute, communication, recompute, optimizer, waiting
    name: str
    seconds: float


@dataclass(frozen=True)
class SecondsFacts:
    rows: tuple[SecondsRow, ...]
    total: float
    scale: dict[str, float]  # of the parts whose rows did not sum to the prediction by themselves


@dataclass(frozen=True)
class PageFacts:
    title: str
    digest: str
    device: str
    ranks: int
    schedule: str
    micro_batches: int
    chunks: int
    links: int
    partitions: tuple[dict[str, Any], ...]
    prediction: Prediction
    model: ModelFacts | None  # None where there is no graph
    seconds: SecondsFacts
    whole_ops: tuple[WholeOp, ...]  # for lack of a rule
    memory: MemoryFacts
    events: tuple[Event, ...]
    marks: tuple[Mark, ...]
    report: Report | None  # with every so many-th of its steps
    every: int
    notes: tuple[str, ...]


def facts_of(sources: Sources) -> PageFacts:
    plan, graph, profile, cluster = sources.plan, sources.graph, sources.profile, sources.cluster
    parts = priced_partitions(sources)
    whole_ops: tuple[WholeOp, ...] = ()
    if graph is not None and profile is not None and cluster is not None:
        whole_ops = whole_ops_of(plan, as_run(graph, profile.types), profile, cluster)
    every = -(-sources.report.steps // MOST_STEPS) if sources.report else 1
    return PageFacts(
        title=sources.title,
        digest=sources.digest,
        device=plan.device,
        ranks=plan.ranks,
        schedule=plan.schedule,
        micro_batches=plan.micro_batches,
        chunks=plan.chunks,
        links=plan.partitions[-1].last + 1,
        partitions=tuple({key: getattr(part, key) for key in OF_PARTITION} for part in plan.partitions),
        prediction=plan.prediction,
        model=model_of(parts) if parts else None,
        seconds=seconds_of(plan, parts),
        whole_ops=whole_ops,
        memory=memory_of(plan, parts),
        events=plan.timeline.events,
        marks=tuple(_marks(sources)),
        report=sources.report and _thinned(sources.report, every),
        every=every,
        notes=tuple(filter(None, (*sources.notes, plan.timeline.note, _norms(graph, plan), _basis(plan)))),
    )


def _norms(graph: OpGraph | None, plan: Plan) -> str:
    norms = norms_in_words(graph, plan) if graph else ""
    return f"batch norms {norms}, as under DistributedDataParallel" if norms else ""


def _basis(plan: Plan) -> str:
    words = basis_in_words(plan)
    return f"predicted {plan.prediction.step_seconds * 1e3:.2f} ms a step, {words}" if words else ""


def _thinned(report: Report, every: int) -> Report:
    """With every so many-th step, and without the rows of single ranks where there are many of them."""
    rows = tuple(row for row in report.compared if report.ranks <= MOST_RANKS or "_rank_" not in row.what)
    return replace(report, losses=report.losses[::every], step_seconds=report.step_seconds[::every], compared=rows)


def _marks(sources: Sources) -> Iterator[Mark]:
    plan, frontier = sources.plan, sources.frontier
    if frontier is not None:
        for number, point in enumerate(frontier.points):
            about = f"without recompute; gap {point.proof.gap:.2g}, by {point.proof.method}"
            beaten = any(before.peak_bytes <= point.peak_bytes for before in frontier.points[:number])
            kind = "alternative" if beaten else "frontier"  # beside the curve, which does not rise again
            about += "; less of it stays resident, for recompute to begin from" if beaten else ""
            yield Mark(kind, f"plan {number} of the frontier", point.seconds, point.peak_bytes, about)
        for base in frontier.baselines:
            yield Mark("baseline", base.name, base.seconds, base.peak_bytes, "by the same costs, without recompute")
    for other in plan.alternatives:
        if other.seconds is not None:
            yield Mark("alternative", other.what, other.seconds, other.peak_bytes, other.lost)
    regions = sum(region.recompute for part in plan.partitions for region in part.regions)
    pipeline = f"{plan.schedule}, {len(plan.partitions)} partitions" if plan.pipelined else "no pipeline"
    about = f"{pipeline}, {plan.micro_batches} micro-batches, {regions} recompute regions"
    yield Mark("chosen", "the plan", plan.prediction.step_seconds, plan.prediction.peak_bytes, about)


# ---- seconds


def seconds_of(plan: Plan, parts: tuple[PricedPartition, ...]) -> SecondsFacts:
    predicted = plan.prediction
    compute: Counter[str] = Counter()
    communication: Counter[str] = Counter()
    for number in busiest(plan) if parts else ():
        if priced := parts[number].priced:
            _add(priced, compute, communication)
    rows, scale = [], {}
    for name, found, known in (
        ("compute", compute, predicted.compute_seconds),
        ("communication", communication, predicted.communication_seconds),
    ):
        total = sum(found.values())
        factor = known / total if total else 1.0
        divided = found if total else {"all": known}  # one row where nothing says how it divides
        own = [SecondsRow(name, what, seconds * factor) for what, seconds in divided.items() if seconds]
        rows += sorted(own, key=lambda row: -row.seconds)
        if abs(factor - 1) > 1e-6:
            scale[name] = factor
    rest = (
        ("recompute", "computed again", predicted.recompute_seconds),
        ("optimizer", "optimizer", predicted.optimizer_seconds),
        ("waiting", "pipeline bubble", predicted.bubble_seconds),
        ("waiting", "other, as measured" if plan.correction else "the GPU for its host", predicted.host_seconds),
    )
    rows += [SecondsRow(part, name, seconds) for part, name, seconds in rest if seconds > 1e-12]
    return SecondsFacts(tuple(rows), predicted.step_seconds, scale)


def _add(priced: Priced, compute: Counter[str], communication: Counter[str]) -> None:
    """The seconds of ops by class; of conversions and the collectives inside ops by what they do."""
    program, times = priced.program, priced.program.micro_batches
    before: Counter[str] = Counter()  # the plan counts what runs before the chain as compute
    chain = [(steps, times, communication) for steps in program.links]
    for steps, count, moved in (*chain, (program.prologue, times, before), (program.shared, 1, before)):
        kept = priced.kept_by(steps)
        for step in steps:
            if isinstance(step, Call):
                kind = class_of(priced.graph.op(step.op).target, priced.profile.ops[step.op].free)
                compute[kind] += count * priced.op(step.op).total  # type: ignore[assignment]
                parts = [("inside ops", priced.collectives_inside(step.op).total)]
            else:
                parts = _moves(priced, step, step.source.value in kept)
            for name, seconds in parts:
                if seconds:
                    moved[name] += count * seconds  # type: ignore[assignment]
    compute[BEFORE] += sum(before.values())
    communication[SUMS] += priced.step.gradient_sum  # type: ignore[assignment]


def _moves(priced: Priced, step: Convert, kept: bool) -> list[tuple[str, float]]:
    """The seconds of a conversion by what it does."""
    entry = conversion_of(step.source.layout, step.target.layout, priced.sharded.sizes)
    whole, once = priced.conversion(step, kept), priced.conversion(step, False)
    again = whole.backward - once.backward
    parts = ((entry.forward, whole.forward), (entry.backward, once.backward), (entry.forward, again))
    return [(move.replace("_", "-") if "_" in move else f"local {move or 'move'}", each) for move, each in parts]
