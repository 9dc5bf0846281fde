"""Everything the page shows, as plain values: gathered from the artifacts that are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.cost.whole_ops import WholeOp, whole_ops_of
from pipeline.ir.plan import Event, Plan, Prediction, Region, Total
from pipeline.ir.profile import as_run
from pipeline.ir.report import Report
from stages.report.memory import Memory, memory_of
from stages.report.model import Model, model_of
from stages.report.priced import priced_partitions
from stages.report.seconds import StepSeconds, seconds_of
from stages.report.sources import Sources

MOST_STEPS = 2000  # of training that are drawn: a long run must not make a large page
MOST_RANKS = 8  # whose peaks are listed one by one


@dataclass(frozen=True)
class PartitionFacts:
    first: int
    last: int
    axes: tuple[tuple[str, int], ...]
    in_flight: int
    seconds: float
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Mark:
    """A plan as a point: its seconds of a step, and its peak."""

    kind: str  # chosen, frontier, baseline, alternative
    name: str
    seconds: float
    peak_bytes: int
    about: str = ""


@dataclass(frozen=True)
class Facts:
    title: str
    digest: str
    device: str
    ranks: int
    schedule: str
    micro_batches: int
    chunks: int
    links: int
    partitions: tuple[PartitionFacts, ...]
    prediction: Prediction
    model: Model | None  # None where there is no graph
    seconds: StepSeconds
    whole_ops: tuple[WholeOp, ...]  # for lack of a rule
    memory: Memory
    events: tuple[Event, ...]
    totals: tuple[Total, ...]
    marks: tuple[Mark, ...]
    report: Report | None  # with every so many-th of its steps
    every: int
    notes: tuple[str, ...]


def facts_of(sources: Sources) -> Facts:
    plan = sources.plan
    parts = priced_partitions(sources)
    copies = sources.frontier.optimizer_copies if sources.frontier else None
    every = -(-sources.report.steps // MOST_STEPS) if sources.report else 1
    return Facts(
        title=sources.title,
        digest=sources.digest,
        device=plan.device,
        ranks=plan.ranks,
        schedule=plan.schedule,
        micro_batches=plan.micro_batches,
        chunks=plan.chunks,
        links=plan.partitions[-1].last + 1,
        partitions=tuple(
            PartitionFacts(part.first, part.last, part.axes, part.in_flight, part.seconds, part.regions)
            for part in plan.partitions
        ),
        prediction=plan.prediction,
        model=model_of(parts) if parts else None,
        seconds=seconds_of(plan, parts),
        whole_ops=_whole_ops(sources),
        memory=memory_of(plan, parts, copies),
        events=plan.timeline.events,
        totals=plan.timeline.totals,
        marks=tuple(_marks(sources)),
        report=sources.report and thinned(sources.report, every),
        every=every,
        notes=tuple(filter(None, (*sources.notes, plan.timeline.note))),
    )


def _whole_ops(sources: Sources) -> tuple[WholeOp, ...]:
    graph, profile, cluster = sources.graph, sources.profile, sources.cluster
    if graph is None or profile is None or cluster is None:
        return ()
    return whole_ops_of(sources.plan, as_run(graph, profile.types), profile, cluster)


def thinned(report: Report, every: int) -> Report:
    """With every so many-th step, and without the rows of single ranks where there are many of them."""
    rows = tuple(row for row in report.compared if report.ranks <= MOST_RANKS or "_rank_" not in row.what)
    return replace(report, losses=report.losses[::every], step_seconds=report.step_seconds[::every], compared=rows)


def _marks(sources: Sources) -> Iterator[Mark]:
    plan, frontier = sources.plan, sources.frontier
    if frontier is not None:
        for number, point in enumerate(frontier.points):
            about = f"without recompute; gap {point.proof.gap:.2g}, by {point.proof.method}"
            yield Mark("frontier", f"plan {number} of the frontier", point.seconds, point.peak_bytes, about)
        for base in frontier.baselines:
            yield Mark("baseline", base.name, base.seconds, base.peak_bytes, "by the same costs, without recompute")
    for other in plan.alternatives:
        if other.seconds is not None:
            yield Mark("alternative", other.what, other.seconds, other.peak_bytes, other.lost)
    yield Mark("chosen", "the plan", plan.prediction.step_seconds, plan.prediction.peak_bytes, _words(plan))


def _words(plan: Plan) -> str:
    regions = sum(region.recompute for part in plan.partitions for region in part.regions)
    pipeline = f"{plan.schedule}, {len(plan.partitions)} partitions" if plan.pipelined else "no pipeline"
    return f"{pipeline}, {plan.micro_batches} micro-batches, {regions} recompute regions"
