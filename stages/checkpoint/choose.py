"""Over plans, meshes, partitions, micro-batches and recompute: the least predicted step time that fits the budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

from shardwright.pipeline.base.errors import BudgetError, SolveError
from shardwright.pipeline.config import Checkpoint
from shardwright.pipeline.cost.chain_memory import loss_temporaries
from shardwright.pipeline.cost.resident import budget_of, gigabytes, resident_parts
from shardwright.pipeline.cost.step import Priced, StepPrice, Workload
from shardwright.pipeline.cost.step_lines import StepLines
from shardwright.pipeline.cost.traffic import lines_of
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Alternative, Frontier, Partition, Plan, Prediction, Region
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.sharding.partitions import restricted
from shardwright.stages.checkpoint import timeline
from shardwright.stages.checkpoint.describe import axes_in_words, passes_in_words, pipeline_in_words, recompute_in_words
from shardwright.stages.checkpoint.expected import Make, expected, with_basis
from shardwright.stages.checkpoint.offers import Offer, alternatives
from shardwright.stages.checkpoint.pipelines.pipelined import Pipelines, PricedPipeline, predict
from shardwright.stages.checkpoint.pipelines.search_inputs import PipelineFloor
from shardwright.stages.checkpoint.recompute import rotor, schedule
from shardwright.stages.checkpoint.recompute.chain import Chain, Slots
from shardwright.stages.checkpoint.recompute.linearize import Linear, linearize
from shardwright.stages.checkpoint.recompute.simulate import ExecutedOp, MemoryState, Outcome, simulate
from shardwright.stages.checkpoint.recompute.two_lines import played, runs_of
from shardwright.stages.checkpoint.user_choices import fixed_schedule, join_of


@dataclass(frozen=True)
class Candidate:
    """A plan of the frontier with its recompute schedule; without one where none fits."""

    point: int
    priced: Priced
    price: StepPrice
    linear: Linear
    regions: tuple[Region, ...] | None
    outcome: Outcome  # of one micro-batch; of nothing where none fits
    peak_bytes: int  # of the schedule, or the least that any schedule needs
    consists: str = ""  # where none fits: of what that is made
    optimal_bytes: int | None = None  # where none fits: what the best schedule needs, if another was asked for
    slices: tuple[int, ...] = ()  # samples of the micro-batches into which a pass is cut; () is one of all

    @property
    def device_seconds(self) -> float:
        """Of one micro-batch, without waiting for the host."""
        return self.outcome.time - self.outcome.waited

    @property
    def step_seconds(self) -> float:
        return self.price.seconds_with(self.outcome.time) - self.hidden_seconds

    @cached_property
    def lines(self) -> StepLines:
        return lines_of(self.priced, runs_of(self.outcome, self.linear.costs))

    @cached_property
    def hidden_seconds(self) -> float:
        """Of collectives, behind what is computed."""
        return self.lines.saved


NOTHING = Outcome((), 0.0, 0.0)
LITTLE = 0.01  # of the time, that a device may wait for its host


def evaluate(
    graph: OpGraph, profile: Profile, cluster: Cluster, frontier: Frontier, number: int, settings: Checkpoint
) -> Candidate:
    mesh = frontier.meshes[frontier.points[number].mesh]
    workload = Workload(graph, profile, cluster.on(mesh), frontier.optimizer_copies, frontier.micro_batches)
    return evaluate_on(workload, frontier, number, settings)


def evaluate_on(workload: Workload, frontier: Frontier, number: int, settings: Checkpoint) -> Candidate:
    """`workload` is on the mesh of that point, and may be that of several."""
    graph, profile, point = workload.graph, workload.profile, frontier.points[number]
    priced = workload.priced(point.sharding)
    linear = linearize(priced, join_of(settings, profile.compiled is not None))
    candidate = Candidate(number, priced, priced.step, linear, None, NOTHING, 0)
    chain, fixed, budget = linear.chain, linear.fixed_bytes, frontier.budget_bytes
    if chain is None:
        loss = linear.costs[0].ways[0]
        need = loss_temporaries(linear.costs[0])
        found = replace(candidate, peak_bytes=max(fixed + need, linear.optimizer_peak))
        if found.peak_bytes > budget:
            return _refused(found, None)
        compiled = None if profile.compiled is None else 1.0
        regions = tuple(Region(link, link, False, (), (), compiled) for link in range(len(graph.chain)))
        return replace(found, regions=regions, outcome=_of_one_link(loss.forward + loss.backward, need))
    try:
        best, outcome = _played_schedule(graph, linear, budget - fixed, settings, frontier.micro_batches)
    except rotor.InfeasibleBudget as refusal:
        found = replace(candidate, peak_bytes=max(fixed + refusal.tightest, linear.optimizer_peak))
        return _refused(found, refusal.op)
    peak = max(fixed + int(outcome.peak), linear.optimizer_peak)
    found = replace(candidate, outcome=outcome, peak_bytes=peak)
    if found.peak_bytes <= budget:
        return replace(found, regions=linear.regions(best.regions))
    worst = max(outcome.steps, key=lambda step: step.held).op
    most = fixed + linear.repeated_bytes + rotor.tightest(chain, _slots(chain, settings)).memory
    least = max(most, linear.optimizer_peak)
    return replace(_refused(found, worst), optimal_bytes=least)


def _of_one_link(seconds: float, held: int) -> Outcome:
    """The whole model is the loss."""
    nothing = MemoryState(frozenset(), frozenset(), None)
    return Outcome((ExecutedOp(schedule.ScheduledOp(schedule.OpKind.B, 0), nothing, held, seconds),), seconds, held)


def _refused(candidate: Candidate, op: schedule.ScheduledOp | None) -> Candidate:
    """With a word on what its least is made of: what is resident, and the activations as that op runs."""
    price, graph = candidate.price, candidate.priced.graph
    parts = resident_parts(candidate.priced.sharded, candidate.priced.optimizer_copies)
    largest = f" (the largest part: {parts[0].label} with {gigabytes(parts[0].nbytes)})" if parts else ""
    common = price.fixed_bytes - price.resident_bytes
    least, linear = candidate.peak_bytes, candidate.linear
    if least == linear.optimizer_peak:
        inside, when = least - price.resident_bytes, "what the optimizer takes while it runs, and the batch"
        common = 0
    else:
        worst = op or schedule.ScheduledOp(schedule.OpKind.B, 0)
        inside = least - price.resident_bytes - common
        when = f"activations {_when(graph, replace(worst, link=linear.spans[worst.link][0]))}"
    shared = f", {gigabytes(common)} activations and copies that several links share" if common else ""
    return replace(
        candidate,
        consists=f"{gigabytes(price.resident_bytes)} are parameters, gradients and optimizer state{largest}{shared}"
        f" and {gigabytes(inside)} {'other ' if common else ''}{when}",
    )


def _when(graph: OpGraph, op: schedule.ScheduledOp) -> str:
    direction = "backward" if op.kind is schedule.OpKind.B else "forward"
    return f"when link {op.link} ({_module(graph, op.link)}) runs {direction}"


def _module(graph: OpGraph, link: int) -> str:
    """What the modules of a link's ops have in common, or the first of them."""
    names = [graph.op(name).module.split(".") for name in graph.chain[link].ops]
    same = [parts[0] for parts in zip(*names, strict=False) if len(set(parts)) == 1]
    return ".".join(same or names[0]) or "the model itself"


def _played_schedule(
    graph: OpGraph, linear: Linear, room: int, settings: Checkpoint, micro_batches: int
) -> tuple[schedule.Schedule, Outcome]:
    """Rotor adds up seconds of one line. It is asked for those of the device, and where that waits for its host, for
    those of the line that takes longer at each link; the better one in the play is taken."""

    def asked(chain: Chain) -> tuple[schedule.Schedule, Outcome]:
        found = _schedule(graph, chain, room, linear.repeated_bytes, settings, micro_batches)
        outcome = played(simulate(chain, found.sequence), linear.costs)
        return found, outcome.beside(linear.repeated_bytes) if found.regions.repeats else outcome

    assert linear.chain is not None
    if linear.device_chain is None:
        return asked(linear.chain)
    first = asked(linear.device_chain)
    if first[1].waited <= LITTLE * first[1].time:
        return first
    return min(first, asked(linear.chain), key=lambda one: one[1].time)


def _schedule(
    graph: OpGraph, chain: Chain, room: int, repeated: int, settings: Checkpoint, micro_batches: int
) -> schedule.Schedule:
    """What the user asked for. Keeping everything is tried first: rounding to slots may hide that it fits, and what is
    there only if something is `repeated` is not."""
    fixed = fixed_schedule(graph, chain, settings, micro_batches)
    if fixed is not None:
        return fixed
    everything = schedule.no_recompute(chain)
    peak = int(simulate(chain, everything.sequence).peak)
    if peak <= room:
        return everything
    slots = _slots(chain, settings)
    left = room - repeated
    if left < rotor.tightest(chain).memory or not rotor.fits(chain, slots, left):
        least = rotor.tightest(chain, slots)  # in slots: the budget that is named must be accepted when it is set
        raise rotor.InfeasibleBudget(max(room, 0), replace(least, memory=min(least.memory + repeated, peak)))
    return rotor.fastest_within(chain, left, slots)


def _slots(chain: Chain, settings: Checkpoint) -> int:
    return Slots(settings.slots_per_link).of(chain.length + 1)


# ------------------------------------------------------------------------------------------------------- the choice


def choose(
    candidates: list[Candidate],
    cluster: Cluster,
    frontier: Frontier,
    where: str,
    graph: OpGraph | None = None,
    pipelines: Pipelines = Pipelines(),  # noqa: B008
) -> Plan:
    """Of the plans without a pipeline and those with one; `graph` is needed for the latter."""
    made: list[tuple[Offer, Make]] = []
    for one in candidates:
        made.append(expected(_offer(one), partial(_plan_alone, cluster, frontier, one), cluster))
    for piped in pipelines.found:
        assert graph is not None
        made.append(expected(_piped_offer(piped), partial(_plan_piped, cluster, frontier, graph, piped), cluster))
    offers = [offer for offer, _ in made] + _refused_offer(pipelines)
    best = min(offers, key=lambda offer: offer.rank, default=None)
    if best is None or best.prediction is None:
        raise _refusal(candidates, frontier, where, pipelines, graph)
    (make,) = (make for offer, make in made if offer is best)
    plan = make(best.prediction, alternatives(offers, best, frontier.budget_bytes))
    return with_basis(plan, best, cluster)


def _plan_alone(
    cluster: Cluster,
    frontier: Frontier,
    best: Candidate,
    prediction: Prediction,
    others: tuple[Alternative, ...],
) -> Plan:
    assert best.regions is not None
    last = len(best.price.links) - 1
    axes, sharding = _axes(best.priced), best.priced.sharding
    only = Partition(0, last, axes, sharding, best.regions, 1, best.peak_bytes, best.outcome.time)
    return Plan(
        device=cluster.device,
        onednn=cluster.compute.onednn,
        budget_bytes=frontier.budget_bytes,
        partitions=(only,),
        prediction=prediction,
        alternatives=others,
        micro_batches=best.price.micro_batches,
        slices=best.slices,
        timeline=timeline.of_one(best.price, best.outcome, best.linear, best.lines),
    )


def _plan_piped(
    cluster: Cluster,
    frontier: Frontier,
    graph: OpGraph,
    best: PricedPipeline,
    prediction: Prediction,
    others: tuple[Alternative, ...],
) -> Plan:
    plan = best.plan
    partitions = tuple(
        Partition(
            first=first,
            last=last,
            axes=_axes(filled.priced),
            sharding=restricted(graph, filled.priced.sharding, first, last),
            regions=filled.linear.regions(part.region),
            in_flight=part.flight,
            peak_bytes=round(part.peak_bytes),
            seconds=part.load.time,
        )
        for part, filled, (first, last) in zip(plan.partitions, best.fills, best.spans, strict=True)
    )
    return Plan(
        device=cluster.device,
        onednn=cluster.compute.onednn,
        budget_bytes=frontier.budget_bytes,
        partitions=partitions,
        prediction=prediction,
        alternatives=others,
        micro_batches=plan.micro_batches,
        schedule=plan.pipeline.value,
        chunks=plan.chunks,
        slices=best.fills[0].slices,
        keeps_last=plan.keeps_last,
        timeline=timeline.of_pipeline(plan, best.spans),
    )


def _axes(priced: Priced) -> tuple[tuple[str, int], ...]:
    return tuple((axis.name, axis.size) for axis in priced.cluster.axes)


def _offer(candidate: Candidate) -> Offer:
    regions = candidate.regions or ()
    words = [
        f"plan {candidate.point} of the frontier on {axes_in_words(_axes(candidate.priced))}",
        "no pipeline",
        passes_in_words(candidate.price.micro_batches),
        recompute_in_words(sum(region.recompute for region in regions)),
    ]
    fits = candidate.regions is not None
    what = ", ".join(words if fits else words[:-1])
    prediction = _predict(candidate) if fits else None
    kind = "point", candidate.point, candidate.slices
    return Offer(what, "", kind, candidate.peak_bytes, prediction, candidate.point)


def _piped_offer(piped: PricedPipeline) -> Offer:
    plan, axes = piped.plan, [_axes(filled.priced) for filled in piped.fills]
    spans = [(*span, own) for span, own in zip(piped.spans, axes, strict=True)]
    again = sum(isinstance(step, schedule.Nesting) for part in plan.partitions for step in part.region.steps)
    what = ", ".join(
        [
            pipeline_in_words(plan.pipeline.value, spans),
            passes_in_words(plan.micro_batches),
            recompute_in_words(again, plan.keeps_last),
        ]
    )
    kind = plan.pipeline, plan.chunks, plan.micro_batches, tuple(axes)
    return Offer(what, plan.pipeline.value, kind, piped.peak_bytes, predict(piped))


def _refused_offer(pipelines: Pipelines) -> list[Offer]:
    floor = pipelines.refused.floor if pipelines.refused else None
    if floor is None:
        return []
    return [Offer("any pipeline", floor.pipeline.value, "refused", floor.memory, None)]


def _predict(best: Candidate) -> Prediction:
    price, once = best.price, best.linear.once
    moved = price.micro_batches * sum(link.communication.total for link in price.links)
    return Prediction(
        step_seconds=best.step_seconds,
        peak_bytes=best.peak_bytes,
        resident_bytes=price.resident_bytes,
        compute_seconds=price.micro_batches * once - moved + price.outside.total,
        communication_seconds=price.communication - best.hidden_seconds,
        recompute_seconds=price.micro_batches * max(0.0, best.device_seconds - once),
        optimizer_seconds=price.optimizer,
        host_seconds=price.micro_batches * best.outcome.waited,
        hidden_seconds=best.hidden_seconds,
    )


def _floor_in_words(graph: OpGraph, floor: PipelineFloor) -> str:
    rest = floor.memory - floor.resident_bytes - floor.waiting_bytes
    waiting = f", {gigabytes(floor.waiting_bytes)} micro-batches that wait" if floor.waiting_bytes else ""
    return (
        f"in partition {floor.partition + 1} of {floor.partitions} (links {floor.first}..{floor.last},"
        f" {floor.pipeline.value}, {floor.flight} in flight) {gigabytes(floor.resident_bytes)} are parameters,"
        f" gradients and optimizer state{waiting} and {gigabytes(rest)} activations {_when(graph, floor.op)}"
    )


def _refusal(
    candidates: list[Candidate], frontier: Frontier, where: str, pipelines: Pipelines, graph: OpGraph | None
) -> SolveError:
    """The tightest budget that some plan fits, and what is its floor."""
    refused = pipelines.refused
    floors = [(one.peak_bytes, one.consists) for one in candidates]
    if refused is not None and refused.floor is not None:
        assert graph is not None
        floors.append((refused.floor.memory, _floor_in_words(graph, refused.floor)))
    if not floors:
        what = "the frontier has no plan for all devices, and a pipeline is not asked for"
        return SolveError(what, where=where, remedy="set `pipeline: solve` in conf/checkpoint, or solve without `pp`")
    least, consists = min(floors)
    optimal = min((c.optimal_bytes for c in candidates if c.optimal_bytes is not None), default=least)
    better = f"set `recompute: optimal`, which needs {budget_of(optimal)}, " if optimal < least else ""
    return BudgetError(
        f"no plan fits {gigabytes(frontier.budget_bytes)}: the tightest feasible budget is "
        f"{budget_of(least)}, of which {consists}",
        least=least,
        budget=frontier.budget_bytes,
        where=where,
        remedy=f"raise the budget to that, {better}or use more devices",
    )
