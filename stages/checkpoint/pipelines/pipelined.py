"""Pipelines for the plans of a frontier: submeshes priced, partitions searched, what comes out in figures.

Which devices may be submeshes is what the cluster offers as splits, each with its link and meshes. Where all devices
are linked alike any mix of sizes may follow one another, which holds all splits at once. A pass of the model may be cut
into slices: the micro-batches of a step are passes times slices. These differ by one grain at most, a number of samples
that the devices of every submesh can share out: the slices of each grain make divisions of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.config import Checkpoint, Pipeline, Recompute
from shardwright.pipeline.config.schema import SOLVE
from shardwright.pipeline.cost.groups import Join, groups_of
from shardwright.pipeline.cost.pipelines import schedules
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import Cluster, Mesh, Split
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Frontier, Prediction
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.sharding.slices import fits, sliced, slices_of
from shardwright.stages.checkpoint.pipelines import submesh_plans
from shardwright.stages.checkpoint.pipelines.hidden import Hidden, overlapped
from shardwright.stages.checkpoint.pipelines.partition import partition
from shardwright.stages.checkpoint.pipelines.refine import PartitionPlan, PipelinePlan
from shardwright.stages.checkpoint.pipelines.reshard import Resharding
from shardwright.stages.checkpoint.pipelines.search_inputs import Division, Effort, PartitionError, UserChoices
from shardwright.stages.checkpoint.pipelines.submesh_costs import SubmeshCosts, fill
from shardwright.stages.checkpoint.recompute.chain import Slots
from shardwright.stages.checkpoint.user_choices import boundary_places, join_in_partitions, spans_of

MOST_PER_DEVICE = 8  # micro-batches for each device that are looked at: more shorten the bubble by little

WAYS = {
    Recompute.optimal: submesh_plans.Recompute.SOLVED,
    Recompute.full: submesh_plans.Recompute.MARKED,
    Recompute.every: submesh_plans.Recompute.MARKED,
    Recompute.off: submesh_plans.Recompute.NEVER,
    Recompute.never: submesh_plans.Recompute.NEVER,
    Recompute.always: submesh_plans.Recompute.ALWAYS,
    Recompute.except_last: submesh_plans.Recompute.EXCEPT_LAST,
}


@dataclass(frozen=True)
class PricedPipeline:
    """A pipeline with the plans of its partitions."""

    plan: PipelinePlan
    fills: tuple[SubmeshCosts, ...]  # of each partition
    hidden: tuple[Hidden, ...]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First and last links of the graph in each partition."""
        of_links = self.fills[0].linear.spans
        return tuple((of_links[part.first][0], of_links[part.last][1]) for part in self.plan.partitions)

    @property
    def submeshes(self) -> int:
        """Groups of devices."""
        return len(self.plan.partitions) // self.plan.chunks

    def on(self, device: int) -> list[tuple[PartitionPlan, SubmeshCosts]]:
        """The partitions of one of them."""
        pairs = list(zip(self.plan.partitions, self.fills, strict=True))
        return pairs[device :: self.submeshes]

    @property
    def peak_bytes(self) -> int:
        return max(round(sum(part.peak_bytes for part, _ in self.on(device))) for device in range(self.submeshes))


@dataclass(frozen=True)
class Pipelines:
    """Those that fit, the fastest first; where none does, why."""

    found: tuple[PricedPipeline, ...] = ()
    refused: PartitionError | None = None


def find_pipelines(
    graph: OpGraph, profile: Profile, cluster: Cluster, frontier: Frontier, settings: Checkpoint, where: str
) -> Pipelines:
    """`where` is the file of the settings. A pipeline that is asked for and cannot be is an error."""
    if settings.pipeline is Pipeline("off"):
        return Pipelines()
    counts = slice_counts(graph.batch, settings, frontier.micro_batches, cluster.devices, where)
    join = join_in_partitions(settings, profile.compiled is not None)
    spans = [(group.first, group.last) for group in groups_of(graph, profile, join)]
    wishes = replace(_wishes(graph, spans, settings, where), overlap=cluster.overlap)
    submeshes = _Submeshes(graph, profile, cluster, frontier, join)
    divisions = tuple(
        division
        for split in usable_splits(cluster)
        for offered in offered_slices(graph.batch, counts, cluster.devices)
        if (division := submeshes.division(split, offered)) is not None
    )
    if not divisions or len(spans) < 2:
        if _may_do_without(settings, frontier):
            return Pipelines()
        raise _impossible(graph, cluster, frontier, settings, where)
    try:
        effort = Effort(Slots(settings.slots_per_link))
        plans = partition(
            divisions, frontier.budget_bytes, wishes, effort, Resharding(graph, submeshes.filled, cluster)
        )
    except PartitionError as refused:
        if refused.floor is not None:
            floor = refused.floor  # in links of the graph for those of the chain
            op = replace(floor.op, link=spans[floor.op.link][0])
            refused.floor = replace(floor, first=spans[floor.first][0], last=spans[floor.last][1], op=op)
            return Pipelines(refused=refused)
        key = next((key for key in ("boundaries", "partitions") if getattr(settings, key)), "pipeline")
        if key == "pipeline" and _may_do_without(settings, frontier):
            return Pipelines()
        remedy = refused.remedy if counts == (1,) else f"{refused.remedy}, or ask for fewer micro-batches"
        raise SolveError(refused.what, where=f"{where}: {key}", remedy=remedy) from refused
    found = [_piped(plan, tuple(submeshes.filled[part.submesh.name] for part in plan.partitions)) for plan in plans]
    return Pipelines(tuple(sorted(found, key=lambda piped: piped.plan.seconds)))


def _piped(plan: PipelinePlan, fills: tuple[SubmeshCosts, ...]) -> PricedPipeline:
    played, hidden = overlapped(plan, fills)
    return PricedPipeline(played, fills, hidden)


def may_stand_alone(settings: Checkpoint, frontier: Frontier) -> bool:
    """Whether plans without a pipeline are looked at: not where one is asked for, or a recompute that needs one."""
    asked = settings.pipeline not in (Pipeline("off"), Pipeline("solve"))
    return not asked and not _needs_one(settings, frontier)


def _needs_one(settings: Checkpoint, frontier: Frontier) -> bool:
    """Alone, the last of several micro-batches would need what `never` does, and the others would take longer."""
    return settings.recompute is Recompute.except_last and frontier.micro_batches > 1


def _may_do_without(settings: Checkpoint, frontier: Frontier) -> bool:
    return may_stand_alone(settings, frontier) and bool(frontier.points)


def _impossible(graph: OpGraph, cluster: Cluster, frontier: Frontier, settings: Checkpoint, where: str) -> SolveError:
    if cluster.devices == 1:
        what, remedy = "a pipeline needs several devices, and the cluster has one", "set `pipeline: off`"
    elif len(graph.chain) < 2:
        what, remedy = "the model is one link: it cannot be cut", "set `pipeline: off`"
    elif not frontier.submesh_points:
        what = "the frontier has no plans of fewer devices than all, which partitions could take"
        remedy = "set `submeshes: 1` or more and no saved plan `as_is` in conf/solve, or `pipeline: off`"
    else:
        what = "no plan of the frontier is for the submeshes into which the cluster splits, with such micro-batches"
        remedy = "ask for fewer micro-batches, or set `pipeline: off`"
    if settings.pipeline is Pipeline("solve") and _needs_one(settings, frontier):
        what += f", and `recompute: except_last` with {frontier.micro_batches} micro-batches needs one"
        remedy = "set `recompute` to never, which needs no more memory without a pipeline, always or optimal"
    return SolveError(what, where=f"{where}: pipeline", remedy=remedy)


# ---------------------------------------------------------------------------------------------------- the user's hand


def slice_counts(batch: int, settings: Checkpoint, passes: int, devices: int, where: str) -> tuple[int, ...]:
    """Into how many a pass of so many samples may be cut: any number, of which a search tries the likeliest."""
    asked = settings.micro_batches
    if asked is None:
        return (1,)
    if asked == SOLVE:
        most = min(batch, max(passes, MOST_PER_DEVICE * devices) // passes)
        return tuple(q for q in range(1, most + 1) if batch % q == 0 or q.bit_count() == 1)
    if asked % passes or asked // passes > batch:
        raise SolveError(
            f"got {asked}, and a step has {passes} passes of {batch} samples, each of which is cut into as many parts",
            where=f"{where}: micro_batches",
            remedy=f"use a multiple of {passes}, and at most {passes * batch}",
        )
    return (asked // passes,)


def offered_slices(batch: int, counts: Iterable[int], devices: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """For each grain that submeshes may share out: the batch in each number of slices, but for those of a finer one."""
    known: set[tuple[int, ...]] = set()
    for grain in range(1, devices + 1):
        cuts = (slices_of(batch, count, grain) for count in counts)
        own = tuple(cut for cut in cuts if cut is not None and cut not in known)
        known.update(own)
        if own:
            yield own


def _wishes(graph: OpGraph, spans: Sequence[tuple[int, int]], settings: Checkpoint, where: str) -> UserChoices:
    every = tuple(schedules.Pipeline)
    named = settings.pipeline is not Pipeline("solve")
    boundaries = None
    if settings.boundaries:
        boundaries = boundary_places(graph, spans, settings.boundaries, f"{where}: boundaries")
    asked = settings.partitions or (len(boundaries) + 1 if boundaries else None)
    marked = WAYS[settings.recompute] is submesh_plans.Recompute.MARKED
    return UserChoices(
        pipelines=(schedules.Pipeline(settings.pipeline.value),) if named else every,
        boundaries=boundaries,
        partitions=(asked,) if asked else tuple(range(2, max(2, len(spans)) + 1)),
        recompute=WAYS[settings.recompute],
        spans=spans_of(graph, settings) if marked else (),
        chunks=tuple(n for n in range(2, asked // 2 + 1) if asked % n == 0) if asked else (2,),
        buffers=True,
    )


# ---------------------------------------------------------------------------------------------------------- divisions


def usable_splits(cluster: Cluster) -> tuple[Split, ...]:
    """Where devices are linked alike, one without sizes for all mixes of them."""
    alike = cluster.group is not None and not cluster.group.members
    if not alike or not cluster.splits:
        return cluster.splits
    meshes: dict[str, tuple[Mesh, ...]] = {}
    for split in cluster.splits:
        meshes |= {size: own for size, own in split.meshes.items() if size not in meshes}
    return (Split((), max((split.link for split in cluster.splits), key=lambda link: link.seconds(1e6)), meshes),)


@dataclass(frozen=True)
class _Submeshes:
    """The plans of the frontier on submeshes of the cluster."""

    graph: OpGraph
    profile: Profile
    cluster: Cluster
    frontier: Frontier
    join: Join
    filled: dict[str, SubmeshCosts] = field(default_factory=dict)  # those that were priced, by name

    def division(self, split: Split, offered: tuple[tuple[int, ...], ...]) -> Division | None:
        """With the submeshes that have plans; None where a size has none."""
        by_count = {}
        for slices in offered:
            own = list(self._fills(split, slices))
            have = {one.submesh.devices for one in own}
            if own and have.issuperset(split.sizes):
                self.filled.update({one.submesh.name: one for one in own})
                by_count[self.frontier.micro_batches * len(slices)] = tuple(one.submesh for one in own)
        if not by_count:
            return None
        return Division(self.cluster.devices, by_count, split.link.seconds, split.sizes)

    def _fills(self, split: Split, slices: tuple[int, ...]) -> Iterator[SubmeshCosts]:
        frontier, passes = self.frontier, self.frontier.micro_batches * len(slices)
        graph, profile = sliced(self.graph, self.profile, slices)
        for number, point in enumerate(frontier.submesh_points):
            mesh = _mesh_in(split, frontier.meshes[point.mesh])
            if mesh is None or not fits(self.graph, point.sharding, mesh.sizes, slices):
                continue
            sizes = " + ".join(map(str, split.sizes)) or "any"
            cut = f"{len(slices)} slices of {slices[0]} to {slices[-1]}"
            workload = Workload(graph, profile, self.cluster.part(mesh), frontier.optimizer_copies, passes)
            name = f"plan {number} of {prod(mesh.sizes)} in {sizes}, {cut}"
            found = fill(name, workload.priced(point.sharding), slices, split.link.seconds, self.join)
            if found is not None:
                yield found


def _mesh_in(split: Split, mesh: Mesh) -> Mesh | None:
    """The mesh as this split has it: submeshes of one size may be slower in another. Axes keep their names."""
    for own in split.meshes.get(str(prod(mesh.sizes)), ()):
        if own.sizes == mesh.sizes:
            return Mesh(tuple(replace(a, name=b.name) for a, b in zip(own.axes, mesh.axes, strict=True)))
    return None


# ------------------------------------------------------------------------------------------------------------ figures


def predict(piped: PricedPipeline) -> Prediction:
    """Seconds by what they are for are those of the busiest devices; what is left of the step they wait."""
    plan = piped.plan
    busy = [
        sum(event.end - event.start for event in row) + sum(part.load.once for part, _ in piped.on(device))
        for device, row in enumerate(plan.timeline.events)
    ]
    device = max(range(piped.submeshes), key=lambda number: busy[number])
    compute = communication = recompute = optimizer = hidden = 0.0
    for (part, filled), own_hidden in zip(piped.on(device), piped.hidden[device :: piped.submeshes], strict=True):
        costs = filled.linear.costs[part.first : part.last + 1]
        span = slice(costs[0].first, costs[-1].last_link + 1)
        once, kept = filled.once[span], sum(own.ways[0].forward + own.ways[0].backward for own in costs)
        moved = sum(link.communication.total for link in filled.priced.step.links[span])
        compute += plan.micro_batches * (kept - moved) + sum(one.compute for one in once)
        behind = plan.micro_batches * own_hidden.each
        hidden += behind + own_hidden.once
        communication += plan.micro_batches * moved + sum(one.communication for one in once) - behind - own_hidden.once
        last = part.load.last or part.load  # the last micro-batch may keep everything
        busy_seconds = (plan.micro_batches - 1) * part.load.time + last.time
        recompute += max(0.0, busy_seconds + behind - plan.micro_batches * kept)
        optimizer += sum(one.optimizer for one in once)
    return Prediction(
        step_seconds=plan.seconds,
        peak_bytes=piped.peak_bytes,
        resident_bytes=max(round(sum(p.resident_bytes for p, _ in piped.on(n))) for n in range(piped.submeshes)),
        compute_seconds=compute,
        communication_seconds=communication,
        recompute_seconds=recompute,
        optimizer_seconds=optimizer,
        bubble_seconds=max(0.0, plan.seconds - compute - communication - recompute - optimizer),
        hidden_seconds=hidden,
    )
