"""What must hold of the bodies of artifacts beside their types: in each by itself, and beside those that it names.

A digest is no signature: whoever writes a file can write its digest. So what a stage reads is checked once, where it is
read (pipeline/base/artifacts.py, pipeline/base/stage.py), and all that follows may rely on it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from math import prod
from typing import Any

from shardwright.pipeline.ir.cluster import COLLECTIVES, Axis, Cluster, Compute, Group, Mesh
from shardwright.pipeline.ir.correction import Correction
from shardwright.pipeline.ir.graph import ITEM_SIZE, Args, OpGraph
from shardwright.pipeline.ir.plan import Frontier, Plan, Region, Sharding
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.ir.report import Report

LARGEST = 1 << 62  # number of anything; also of the elements of a tensor
MOST_DEVICES = 1 << 20
MOST_PASSES = 1 << 20  # micro-batches of a step
MOST_AXES = 16
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
DEVICES = ("cpu", "cuda")
SIGNED = ("seed",)  # whole numbers that may be negative

Problems = Iterator[str]


class InvalidBody(ValueError):
    """A body breaks a rule: a bug in what made it, or an artifact that was edited."""


def verify_body(body: Any) -> None:
    for rule in (rule for kind, rules in RULES.items() if isinstance(body, kind) for rule in rules):
        if problem := next(rule(body), None):
            raise InvalidBody(problem)


def verify_beside(bodies: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of bodies by their kinds: each kind with what it names of another that is not there."""
    for kind, other, rule in BESIDE:
        if kind in bodies and other in bodies:
            yield from ((kind, problem) for problem in rule(bodies[kind], bodies[other]))


# ---- of all


def _numbers(body: Any) -> Problems:
    """Sizes, counts and bytes; JSON has no infinite ones."""
    for where, number in _whole_numbers(body, ""):
        if not (0 <= number <= LARGEST):
            yield f"{where} is {str(number)[:30]}"


def _whole_numbers(value: Any, where: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _whole_numbers(item, f"{where}.{key}")
    elif isinstance(value, tuple):
        for place, item in enumerate(value):
            yield from _whole_numbers(item, f"{where}[{place}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, Args) and not hasattr(value, "states"):
        for field in dataclasses.fields(value):
            if field.name not in SIGNED:
                yield from _whole_numbers(getattr(value, field.name), f"{where}.{field.name}".lstrip("."))


def _axes(axes: Collection[tuple[str, int]], what: str) -> Problems:
    names = [name for name, _ in axes]
    if odd := [name for name in names if not (name.isascii() and name.isidentifier())]:
        yield f"{what} has an axis called {odd[0]!r}"
    if len(set(names)) != len(names):
        yield f"{what} has two axes of one name"
    if any(size < 1 for _, size in axes):
        yield f"{what} has an axis of no device"
    if len(axes) > MOST_AXES or ((sizes := [size for _, size in axes]) and prod(sizes) > MOST_DEVICES):
        yield f"{what} has more than {MOST_AXES} axes or {MOST_DEVICES} devices"


def _within(numbers: Iterable[int | None], count: int, what: str) -> Problems:
    if any(number is not None and not 0 <= number < count for number in numbers):
        yield f"{what}: of {count} there is none of such a number"


def _known(names: Iterable[str], known: Collection[str], what: str) -> Problems:
    yield from (f"{what} {name!r}, which is not there" for name in names if name not in known)


def _same(names: Collection[str], known: Collection[str], what: str) -> Problems:
    if odd := set(names) ^ set(known):
        yield f"{min(odd)!r} is not both in {what} and in the graph"


# ---- cluster


def _devices(cluster: Cluster) -> Problems:
    if not 1 <= cluster.devices <= MOST_DEVICES:
        yield f"there are {cluster.devices} devices"
    if cluster.device not in DEVICES:
        yield f"the device is {cluster.device!r}: known are {', '.join(DEVICES)}"
    every = list(range(cluster.devices)) if cluster.devices <= MOST_DEVICES else []
    if cluster.order and sorted(cluster.order) != every:
        yield "`order` does not name each device once"
    if cluster.hosts and sorted(rank for host in cluster.hosts for rank in host.ranks) != every:
        yield "`hosts` do not have each device once"
    if cluster.group and sorted(cluster.group.ranks) != every:
        yield "`group` does not have each device once"
    if cluster.group:
        yield from _group(cluster.group)


def _group(group: Group) -> Problems:
    if group.bandwidth <= 0 or group.latency < 0 or (group.uplink is not None and group.uplink <= 0):
        yield "a link needs a latency that is not negative and a positive bandwidth"
    for member in group.members:
        yield from _group(member)


def _meshes(cluster: Cluster) -> Problems:
    for mesh in (Mesh(cluster.axes), *cluster.meshes):
        yield from _mesh(mesh.axes, cluster.devices)
    for split in cluster.splits:
        if not split.sizes or min(split.sizes) < 1 or sum(split.sizes) != cluster.devices:
            yield f"submeshes of {split.sizes} devices are not all {cluster.devices}"
        if odd := {str(size) for size in split.sizes} ^ set(split.meshes):
            yield f"a split has no mesh for each of its sizes ({min(odd)})"
        for size, meshes in split.meshes.items():
            for mesh in meshes:
                yield from _mesh(mesh.axes, int(size) if size.isdecimal() else 0)


def _mesh(axes: tuple[Axis, ...], devices: int) -> Problems:
    yield from _axes([(axis.name, axis.size) for axis in axes], "a mesh")
    if not axes or prod(axis.size for axis in axes) != devices:
        yield f"a mesh of {[axis.size for axis in axes]} does not hold {devices} devices"
    for axis in axes:
        if missing := [name for name in COLLECTIVES if name not in axis.links]:
            yield f"axis {axis.name} has no {missing[0]}"


def _rates(cluster: Cluster) -> Problems:
    compute: Compute = cluster.compute
    rates = [compute.memory_rate, *([] if compute.optimizer_rate is None else [compute.optimizer_rate])]
    if min(rates) <= 0:
        yield "a rate is not positive"
    paces = (*compute.ops.values(), *compute.flops.values(), compute.product_bytes)
    launches = (compute.launch, compute.launch_backward, compute.optimizer_launch)
    if min((*launches, *(second for pace in paces for second in (pace.forward, pace.backward)))) < 0:
        yield "a time is negative"
    curves = [curve.sizes for curve in (compute.matmul, *compute.matmul_by_dtype.values())]
    if any(sizes[0] < 0 or len(set(sizes)) != len(sizes) for sizes in curves):
        yield "a curve needs sizes that ascend"
    if compute.processors is not None and compute.processors < 1:
        yield "a GPU has no processor"


# ---- frontier and plan


def _points(frontier: Frontier) -> Problems:
    if not (frontier.points or frontier.submesh_points):
        yield "it has no point"
    if not 1 <= frontier.micro_batches <= MOST_PASSES:
        yield f"a step has {frontier.micro_batches} passes"
    yield from _corrections(frontier.correction)
    if frontier.optimizer_copies < 0:
        yield "an optimizer keeps less than nothing"
    points = (*frontier.points, *frontier.submesh_points)
    meshes = [*(point.mesh for point in points), *(row.mesh for row in frontier.baselines)]
    yield from _within(meshes, len(frontier.meshes), "meshes")
    for mesh in frontier.meshes:
        yield from _mesh(mesh.axes, prod(mesh.sizes))
    for point in points:
        yield from _layouts(point.sharding, len(frontier.meshes[point.mesh].axes))


def _corrections(correction: Correction | None) -> Problems:
    if correction is not None and not (min(correction.compute, correction.links) > 0):
        yield "a correction needs positive ratios"


def _layouts(sharding: Sharding, axes: int) -> Problems:
    found = [*sharding.storage.values(), *sharding.inputs.values(), *sharding.state.values()]
    found += [layout for one in sharding.strategies.values() for layout in (*one.inputs, *one.outputs)]
    found += [layout for way in sharding.paths.values() for layout in way]
    if odd := next((layout for layout in found if len(layout.states) != axes), None):
        yield f"the layout {odd} is not for a mesh of {axes} axes"


def _settings(plan: Plan) -> Problems:
    if plan.device not in DEVICES:
        yield f"the device is {plan.device!r}: known are {', '.join(DEVICES)}"
    if not 1 <= plan.micro_batches <= MOST_PASSES:
        yield f"a step has {plan.micro_batches} passes"
    if plan.pipelined != (plan.schedule in SCHEDULES) or (plan.schedule and not plan.pipelined):
        yield f"the schedule {plan.schedule!r} is not one of a pipeline: {', '.join(SCHEDULES)}"
    yield from _corrections(plan.correction)
    if plan.chunks < 1 or not plan.partitions or len(plan.partitions) % plan.chunks:
        yield f"{len(plan.partitions)} partitions are not {plan.chunks} on each device"
    if plan.slices and (min(plan.slices) < 1 or plan.micro_batches % len(plan.slices)):
        yield f"slices of {plan.slices} samples are not those of {plan.micro_batches} micro-batches"


def _partitions(plan: Plan) -> Problems:
    after = 0
    for number, partition in enumerate(plan.partitions):
        if partition.first != after or partition.last < partition.first:
            yield f"partition {number} does not follow the one before"
        after = partition.last + 1
        yield from _axes(partition.axes, f"partition {number}")
        yield from _layouts(partition.sharding, len(partition.axes))
        if not _cover(partition.regions, partition.first, partition.last):
            yield f"the regions do not cover the links {partition.first} to {partition.last}, once and in order"
    if sum(prod(partition.sizes) for partition in plan.partitions) > MOST_DEVICES * plan.chunks:
        yield f"it is for more than {MOST_DEVICES} devices"


def _cover(regions: tuple[Region, ...], first: int, last: int) -> bool:
    """Each link once; a region that is run again holds others, one that is not holds none."""
    starts = [first, *(region.last + 1 for region in regions)]
    return (
        starts[-1] == last + 1
        and all(region.first == start <= region.last for region, start in zip(regions, starts, strict=False))
        and all(bool(region.inner) == region.recompute for region in regions)
        and all(_cover(region.inner, region.first, region.last) for region in regions if region.recompute)
        and all(0 <= (region.compiled or 0.0) <= 1 for region in regions)
    )


def _timeline(plan: Plan) -> Problems:
    parts = [event.partition for event in plan.timeline.events] + [one.partition for one in plan.timeline.totals]
    yield from _within(parts, len(plan.partitions), "partitions of the timeline")
    links = [link for event in plan.timeline.events for link in (event.first, event.last)]
    yield from _within(links, plan.partitions[-1].last + 1, "links of the timeline")
    yield from _within([e.micro_batch for e in plan.timeline.events], plan.micro_batches, "micro-batches")


# ---- profile and report


def _kernels(profile: Profile) -> Problems:
    if kernels := profile.kernels:
        yield from _within(kernels.chain, len(kernels.links), "links of the kernels")
        yield from _within([one.run for one in kernels.joined], len(kernels.runs), "runs of the kernels")
        if kernels.slices < 1:
            yield f"the batch is cut into {kernels.slices}"
        for link in (*kernels.links, *kernels.runs):
            places = (link.writes, *link.saved.values(), *link.results.values())
            yield from _within(chain.from_iterable(places), len(link.held), "memory of a link")
    if profile.compiled is not None:
        runs = [block.run for block in profile.compiled.blocks]
        yield from _within(runs, len(profile.compiled.runs), "compiled runs")
        if not all(profile.compiled.runs):
            yield "a compiled block was not run"
    if profile.step is not None:
        odd = [name for name, curve in profile.step.curves.items() if len(curve) != len(profile.step.moments)]
        if odd or len(profile.step.kernels) != 3:
            yield "the curves of the step do not have a value for each of its moments"
    if odd := [dtype for dtype in profile.types.values() if dtype not in ITEM_SIZE]:
        yield f"unsupported dtype {odd[0]!r}"


def _measured(report: Report) -> Problems:
    if not report.losses or len(report.losses) != report.steps or len(report.step_seconds) > report.steps:
        yield f"{len(report.losses)} losses and {len(report.step_seconds)} times are not those of {report.steps} steps"
    if not report.peak_bytes or not 1 <= report.ranks <= MOST_DEVICES:
        yield f"{len(report.peak_bytes)} peaks are not those of {report.ranks} ranks"


RULES: dict[type, tuple[Callable[[Any], Problems], ...]] = {
    OpGraph: (_numbers,),
    Profile: (_numbers, _kernels),
    Cluster: (_numbers, _devices, _meshes, _rates),
    Frontier: (_numbers, _points),
    Plan: (_numbers, _settings, _partitions, _timeline),
    Report: (_numbers, _measured),
}


# ---- one beside another


def _profile_of(profile: Profile, graph: OpGraph) -> Problems:
    ops, values, links = {op.name for op in graph.ops}, graph.values, len(graph.chain)
    yield from _same(profile.ops, ops, "`ops`")
    yield from _known((*profile.storage, *profile.storage.values(), *profile.types), values, "it names the value")
    yield from _same(profile.storage, values, "`storage`")
    yield from _known((name for cost in profile.ops.values() for name in cost.saves), values, "an op saves")
    for name, own in profile.storage.items():  # memory belongs to a value that shares no other's
        if profile.storage[own] != own:
            yield f"{name} lies in {own}, which lies elsewhere"
    if profile.kernels is not None:
        if len(profile.kernels.chain) != links:
            yield f"it has kernels of {len(profile.kernels.chain)} links, the graph has {links}"
        yield from _spans([(one.first, one.last) for one in profile.kernels.joined], links, "joined links")
    if profile.compiled is not None:
        yield from _spans([(one.first, one.last) for one in profile.compiled.blocks], links, "compiled links")


def _spans(spans: list[tuple[int, int]], links: int, what: str) -> Problems:
    ends = [end for span in spans for end in span]
    if ends != sorted(ends) or (ends and ends[-1] >= links) or any(n > 2 for n in Counter(ends).values()):
        yield f"{what} {spans[:3]} are not in order, or not of {links}"


def _plan_of(plan: Plan, graph: OpGraph) -> Problems:
    if plan.partitions[-1].last != len(graph.chain) - 1:
        yield f"it is for {plan.partitions[-1].last + 1} links, the graph has {len(graph.chain)}"
    yield from _known(plan.released, graph.values, "it lets go of")
    if plan.slices and sum(plan.slices) != graph.batch:
        yield f"slices of {plan.slices} samples are not a batch of {graph.batch}"


def _plan_on(plan: Plan, cluster: Cluster) -> Problems:
    if plan.ranks != cluster.devices:
        yield f"it is for {plan.ranks} devices, the cluster has {cluster.devices}"


def _frontier_on(frontier: Frontier, cluster: Cluster) -> Problems:
    for point in frontier.points:
        if (held := prod(frontier.meshes[point.mesh].sizes)) != cluster.devices:
            yield f"a point is for {held} devices, the cluster has {cluster.devices}"


BESIDE: tuple[tuple[str, str, Callable[[Any, Any], Problems]], ...] = (
    ("profile", "graph", _profile_of),
    ("frontier", "cluster", _frontier_on),
    ("plan", "graph", _plan_of),
    ("plan", "cluster", _plan_on),
)
