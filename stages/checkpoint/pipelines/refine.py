"""A way to cut worked out in full: the recompute of every partition in finer slots, then the schedule played."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shardwright.pipeline.cost.pipelines.play import Load, PlayedSchedule, simulate
from shardwright.pipeline.cost.pipelines.schedules import DeviceOrder, Pipeline, Sending, orders
from shardwright.stages.checkpoint.pipelines.cuts import Cuts
from shardwright.stages.checkpoint.pipelines.partition_times import PartitionTimes
from shardwright.stages.checkpoint.pipelines.search_space import SearchTask
from shardwright.stages.checkpoint.pipelines.submesh_plans import SubmeshPlan
from shardwright.stages.checkpoint.recompute.in_flight import Moment, PartitionRun, fullest
from shardwright.stages.checkpoint.recompute.schedule import Keep, Nesting


@dataclass(frozen=True)
class PartitionPlan:
    """Links first..last on one submesh, and what they are predicted to take."""

    first: int
    last: int
    submesh: SubmeshPlan
    flight: int  # micro-batches whose forward has begun and whose backward has not ended, at most
    region: Nesting  # its steps are run in order; those that are regions are recomputed
    load: Load
    fullest: Moment  # at which it holds the most
    peak_bytes: float  # in all, then
    room_bytes: float  # in all

    @property
    def resident_bytes(self) -> float:
        """Whatever is recomputed."""
        return sum(self.submesh.resident[self.first : self.last + 1]) + self.submesh.everywhere

    @property
    def regions(self) -> str:
        return str(self.region)

    @property
    def recomputes(self) -> bool:
        return any(isinstance(step, Nesting) for step in self.region.steps)


@dataclass(frozen=True)
class PipelinePlan:
    pipeline: Pipeline
    chunks: int  # partitions on a device
    micro_batches: int
    partitions: tuple[PartitionPlan, ...]
    estimate: float  # of a step, by closed form
    seconds: float  # of a step, as simulated
    division: int  # of those given
    sending: Sending
    order: DeviceOrder = field(repr=False)
    timeline: PlayedSchedule = field(repr=False)

    @property
    def keeps_last(self) -> bool:
        """Whether the last micro-batch of a step recomputes nothing, and those before it do."""
        return any(part.load.last is not None and part.recomputes for part in self.partitions)

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(part.submesh.devices for part in self.partitions)

    @property
    def firsts(self) -> tuple[int, ...]:
        return tuple(part.first for part in self.partitions)


def plan_of(task: SearchTask, cuts: Cuts) -> PipelinePlan:
    """The schedules of all partitions, and the step as simulated."""
    spans = cuts.spans(task.plain.links)
    parts = []
    for number, (first, last, p) in enumerate(spans):
        then = spans[number + 1] if number + 1 < len(spans) else None
        send = task.send(last + 1, p, then[2]) if then else 0.0
        parts.append(_part(task.times[p], first, last, task.flights[len(spans) - 1 - number], send))
    order = orders(task.pipeline, len(spans) // task.chunks, task.micro_batches, task.chunks)
    timeline = simulate(order, [part.load for part in parts], task.sending)
    return PipelinePlan(
        pipeline=task.pipeline,
        chunks=task.chunks,
        micro_batches=task.micro_batches,
        partitions=tuple(parts),
        estimate=cuts.estimate,
        seconds=timeline.seconds,
        division=task.division,
        sending=task.sending,
        order=order,
        timeline=timeline,
    )


def _part(times: PartitionTimes, first: int, last: int, flight: int, send: float) -> PartitionPlan:
    submesh, span = times.submesh, slice(first, last + 1)
    region, passage = times.schedule(first, last, flight)
    whole = [step.link for step in region.steps if isinstance(step, Keep) and not step.option]  # else it is recomputed
    of_last = times.last_passage(first, last)
    last_load = _load(submesh, of_last, range(first, last + 1), send) if of_last is not None else None
    load = replace(_load(submesh, passage, whole, send), once=sum(submesh.once[span]), last=last_load)
    room, moment = times.terms.memory * times.terms.share, fullest(passage, of_last, flight)
    used = room - times.room(first, last, flight) + moment.memory
    return PartitionPlan(first, last, submesh, flight, region, load, moment, used, room)


def _load(submesh: SubmeshPlan, passage: PartitionRun, whole: Iterable[int], send: float) -> Load:
    """Of a micro-batch; the gradients of weights of the links that are not recomputed can be put off."""
    weight = min(sum(submesh.weight[link] for link in whole), passage.backward)
    return Load(passage.forward, passage.backward, send, weight)
