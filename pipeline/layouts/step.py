"""Seconds and bytes of a step with its choices given, by the planner's model.

Of a micro-batch on a stage: its layers forward, backward, and what of them runs again; each op as long as the line that
takes longer, the card or the host that issues its kernels. Collectives come on top, as far as nothing hides them
(`visible`). Stages are put together by the closed form of the planner's schedules; then gradients are summed
over dp and the optimizer runs.

rank = ((stage * dp) + replica) * tp + slice: the slices of a product lie nearest each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from shardwright.pipeline.config.schema import OverlapMode
from shardwright.pipeline.cost.pipelines.schedules import Pipeline, Sending, forwards_ahead, sending_of
from shardwright.pipeline.cost.step import update_seconds
from shardwright.pipeline.ir.cluster import Axis, Overlap
from shardwright.pipeline.ir.profile import Kernel
from shardwright.pipeline.layouts.machine import Machine
from shardwright.pipeline.layouts.sizes import LayoutError, LayoutModel, ParallelLayout, stage_layers, why_not
from shardwright.pipeline.layouts.traced import COPIES, Works
from shardwright.pipeline.layouts.work import Parts, PartWork, Pass, RecomputeMode
from shardwright.pipeline.rates.kernels import PRODUCTS, Card, kernel_seconds

OPTIMIZER = "_fused_adamw_"
OPTIMIZER_READ, OPTIMIZER_WRITTEN = 16, 14  # bytes for each parameter: gradient, copy in single, moments; and weight
HALF = 2  # bytes of a parameter


@dataclass(frozen=True)
class PassSeconds:
    busy: float = 0.0  # the card without collectives, or its host where that takes longer
    products: float = 0.0  # of these, in products
    links: float = 0.0

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(self.busy + other.busy, self.products + other.products, self.links + other.links)

    def __mul__(self, times: int) -> PassSeconds:
        return PassSeconds(self.busy * times, self.products * times, self.links * times)

    def seconds(self, overlap: OverlapMode, hidden: float) -> tuple[float, float]:
        """In all, and of these the ones that nothing hides of the links."""
        waits = visible(self.links, self.products, hidden) if overlap is OverlapMode.megatron else self.links
        return self.busy + waits, waits


def visible(links: float, beside: float, hidden: float) -> float:
    """Of collectives, what a step takes longer for them where they run beside so many seconds of computation.

    As pipeline.cost.lines plays it: the part `hidden` of the shorter one costs nothing.
    """
    return max(0.0, links - beside) + (1 - hidden) * min(links, beside)


@dataclass(frozen=True)
class PartSeconds:
    """Of a part of the model, by one way to recompute."""

    forward: PassSeconds
    backward: PassSeconds  # what runs again included
    update: float = 0.0  # the sum of its gradients over the replicas, and new values gathered
    gathered: float = 0.0  # ZeRO-3: its parameters, once
    scattered: float = 0.0  # ZeRO-2 and 3: its gradients, of each micro-batch


@dataclass(frozen=True)
class StageSeconds:
    """Of a micro-batch on a stage."""

    forward: float
    backward: float
    links: float  # of both, what the card waits for links
    handed: float = 0.0  # of one to the next stage, and back: all its chunks
    waits: float = 0.0  # of that, and of what the stage before hands, the part that nothing hides of any

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def each(self) -> float:
        """Of any micro-batch once all stages are at work."""
        return self.total + self.waits


@dataclass(frozen=True)
class Price:
    seconds: float
    bubble: float  # share of the step in which the busiest stage waits for others
    communication: float  # share of the step in which it waits for links
    memory_bytes: float  # of a device
    samples_per_s: float
    tokens_per_s: float
    flops: float  # FLOP/s of a device, what is computed again included
    mfu: float  # of the data sheet, nothing computed twice
    fits: bool


@dataclass(frozen=True, eq=False)
class LayoutPrices:
    """Of the layouts of one model on one machine; parts of equal layouts are priced once."""

    model: LayoutModel
    works: Works  # of a layer of it
    machine: Machine
    _passes: dict[Pass, PassSeconds] = field(default_factory=dict)

    def seconds(self, layout: ParallelLayout) -> float:
        stages = self.stages(layout)
        return pipeline_seconds(stages, layout)[0] + sum(self._end_of_step(layout, stages))

    def price(self, layout: ParallelLayout) -> Price:
        what = why_not(self.model, layout)
        if what is not None:
            raise LayoutError(what, remedy="choose sizes that divide")
        stages = self.stages(layout)
        seconds, busiest = pipeline_seconds(stages, layout)
        update, optimizer = self._end_of_step(layout, stages)
        whole = seconds + update + optimizer
        samples, memory = layout.batch / whole, self.memory(layout)
        once, flops = self.model.flops(layout, self.works.parts)
        worst = stages[busiest]
        busy = layout.micro_batches * worst.each
        return Price(
            seconds=whole,
            bubble=max(0.0, seconds - busy) / whole,
            communication=(layout.micro_batches * (worst.links + worst.waits) + update) / whole,
            memory_bytes=memory,
            samples_per_s=samples,
            tokens_per_s=samples * self.model.sequence,
            flops=flops * samples / layout.devices,
            mfu=once * samples / layout.devices / self.machine.rate,
            fits=memory <= self.machine.memory_bytes,
        )

    # ---- seconds

    def parts(self, layout: ParallelLayout) -> Parts:
        return self.works.parts(layout.attention, layout.tp, layout.sequence_parallel, layout.micro_batch)

    def stages(self, layout: ParallelLayout) -> list[StageSeconds]:
        """In the order of the pipeline; those in the middle with as many layers are one object."""
        parts, counts = self.parts(layout), stage_layers(self.model, layout)
        made: dict[tuple[int, bool, bool], StageSeconds] = {}
        found = []
        for stage, layers in enumerate(counts):
            key = layers, stage == 0, stage == layout.pp - 1
            if key not in made:
                made[key] = self._stage(parts, layout, key)
            found.append(made[key])
        return found

    def _stage(self, parts: Parts, layout: ParallelLayout, ends: tuple[int, bool, bool]) -> StageSeconds:
        layers, first, last = ends
        forward = backward = PassSeconds()
        gathered = scattered = 0.0
        for part, times in ((parts.before, int(first)), (parts.layer, layers), (parts.after, int(last))):
            ahead, back = self._both(part, layout, part is parts.layer)
            forward, backward = forward + ahead * times, backward + back * times
            gather, scatter = self._zero(part, layout)
            gathered, scattered = gathered + gather * times, scattered + scatter * times
        passes = [(forward, gathered), (backward, gathered + scattered)]
        (ahead_seconds, waits), (back_seconds, waits_back) = (self._with_zero(*own, layout) for own in passes)
        handed = handovers(
            ahead_seconds + back_seconds, layout, self._message(parts, layout), (first, last), self.machine.hidden
        )
        return StageSeconds(ahead_seconds, back_seconds, waits + waits_back, *handed)

    def _with_zero(self, work: PassSeconds, links: float, layout: ParallelLayout) -> tuple[float, float]:
        """Seconds of a pass beside which so many seconds of collectives of ZeRO run, and what is waited for links."""
        seconds, waits = work.seconds(layout.overlap, self.machine.hidden)
        more = links if layout.overlap is OverlapMode.none else visible(links, seconds, self.machine.hidden)
        return seconds + more, waits + more

    def _both(self, part: PartWork, layout: ParallelLayout, is_layer: bool) -> tuple[PassSeconds, PassSeconds]:
        """Forward, and backward with what runs again: of the ends of a model nothing does."""
        forward = self._pass(part.forward, layout.tp, backward=False)
        backward = self._pass(part.backward, layout.tp, backward=True)
        if is_layer and layout.recompute is not RecomputeMode.none:
            backward += self._pass(part.again[layout.recompute], layout.tp, backward=False)
        return forward, backward

    def _pass(self, work: Pass, tp: int, backward: bool) -> PassSeconds:
        if work not in self._passes:
            self._passes[work] = pass_seconds(work, self.machine.card, self.machine.axis("tp", tp, 1), backward)
        return self._passes[work]

    def _zero(self, part: PartWork, layout: ParallelLayout) -> tuple[float, float]:
        """Seconds to gather the parameters of a part, and to scatter its gradients, in each micro-batch."""
        if layout.dp == 1 or layout.zero < 2 or not part.parameters:
            return 0.0, 0.0
        links, nbytes = self._replicas(layout).links, sum(part.parameters)
        gathered = links["all_gather"].seconds(nbytes) if layout.zero == 3 else 0.0
        return gathered, links["reduce_scatter"].seconds(nbytes)

    def _replicas(self, layout: ParallelLayout) -> Axis:
        return self.machine.axis("dp", layout.dp, layout.tp)

    def _message(self, parts: Parts, layout: ParallelLayout) -> float:
        """To the next stage: a slice from each device, gathered inside tp."""
        if layout.pp == 1:
            return 0.0
        nbytes = parts.layer.output
        if layout.tp > 1 and not layout.sequence_parallel:
            inside = self.machine.axis("tp", layout.tp, 1).links["all_gather"].seconds(nbytes)
            nbytes /= layout.tp
        else:
            inside = 0.0
        return self.machine.sent(layout.dp * layout.tp).seconds(nbytes) + inside

    def _end_of_step(self, layout: ParallelLayout, stages: Sequence[StageSeconds]) -> tuple[float, float]:
        """Of the stage with most parameters: sums of gradients that no backward hides, and the optimizer."""
        parts, counts = self.parts(layout), stage_layers(self.model, layout)
        kinds = {(layers, stage == 0, stage == layout.pp - 1): stage for stage, layers in enumerate(counts)}
        ends = [self._end_of_stage(parts, layout, at, layers, stages[at]) for (layers, *_), at in kinds.items()]
        return max(ends, key=sum)

    def _end_of_stage(
        self, parts: Parts, layout: ParallelLayout, stage: int, layers: int, seconds: StageSeconds
    ) -> tuple[float, float]:
        axis, every = self._replicas(layout), self._parameters(parts, layout, stage, layers)
        nbytes = sum(size * times for size, times in every)
        split = [axis] if layout.zero else []
        if layout.zero < 2:
            update = sum(times * update_seconds(size, [axis], split) for size, times in every)
        else:  # gradients are scattered with each micro-batch; ZeRO-3 gathers new values where they are read
            update = 0.0 if layout.zero == 3 or layout.dp == 1 else axis.links["all_gather"].seconds(nbytes)
        if layout.overlap is not OverlapMode.none:
            update = visible(update, seconds.backward, self.machine.hidden)
        own = nbytes / HALF / (layout.dp if layout.zero else 1)
        return update, optimizer_seconds(own, self.machine.card)

    def _parameters(self, parts: Parts, layout: ParallelLayout, stage: int, layers: int) -> list[tuple[float, int]]:
        """Bytes of each parameter on a rank of the stage, and how often; a tied embedding is at both ends."""
        ends = [parts.before] * (stage == 0) + [parts.after] * (stage == layout.pp - 1)
        if self.model.tied and layout.pp == 1:
            ends = [parts.before]
        return [(size, layers) for size in parts.layer.parameters] + [(s, 1) for end in ends for s in end.parameters]

    # ---- bytes

    def memory(self, layout: ParallelLayout) -> float:
        """At the peak of the stage that needs most: one of the two ends, or the fullest."""
        counts = stage_layers(self.model, layout)
        fullest = max(range(layout.pp), key=lambda stage: counts[stage])
        return max(self._stage_bytes(layout, stage, counts[stage]) for stage in {0, layout.pp - 1, fullest})

    def _stage_bytes(self, layout: ParallelLayout, stage: int, layers: int) -> float:
        parts = self.parts(layout)
        every = self._parameters(parts, layout, stage, layers)
        weights = sum(size * times for size, times in every)
        held = parts.layer.held[layout.recompute]
        ends = [parts.before] * (stage == 0) + [parts.after] * (stage == layout.pp - 1)
        kept = layers * held.saved + sum(end.held[RecomputeMode.none].saved for end in ends)
        peak = max(held.peak, *(end.held[RecomputeMode.none].peak for end in ends), 0.0)
        gathered = 2 * sum(parts.layer.parameters) if layout.zero == 3 and layout.dp > 1 else 0.0
        states = state_bytes(weights, layout)
        libraries = self.machine.compute.workspace + 2 * self.machine.compute.workspace_biased
        return states + in_flight(layout, stage) * kept + peak + gathered + libraries


def state_bytes(weights: float, layout: ParallelLayout) -> float:
    """Weights and gradients in half precision, and what the optimizer keeps; ZeRO divides from the right."""
    over = [layout.dp if layout.zero >= level else 1 for level in (3, 2, 1)]
    return weights * (1 / over[0] + 1 / over[1] + COPIES / over[2])


def in_flight(layout: ParallelLayout, stage: int) -> float:
    """Micro-batches whose activations a stage keeps, all its chunks together."""
    if layout.chunks > 1:
        return min(layout.micro_batches, layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.chunks)))
    return forwards_ahead(layout.schedule, layout.pp - stage, layout.micro_batches)


def pass_seconds(work: Pass, card: Card, axis: Axis, backward: bool) -> PassSeconds:
    """An op takes as long as the line that takes longer: a host that is slow does not get far ahead of its card."""
    pace, begun = (card.host.backward_kernel, 0.0) if backward else (card.host.kernel, card.host.op)
    busy = products = 0.0
    for _, own in groupby(work.kernels, key=lambda kernel: kernel.op):
        each = [(kernel.name in PRODUCTS, kernel_seconds(kernel, card)) for kernel in own]
        busy += max(sum(seconds for _, seconds in each), begun + pace * len(each))
        products += sum(seconds for is_product, seconds in each if is_product)
    links = sum(axis.links[one.kind].seconds(one.nbytes) for one in work.collectives) if axis.size > 1 else 0.0
    return PassSeconds(busy, products, links)


def optimizer_seconds(parameters: float, card: Card) -> float:
    read, written = round(OPTIMIZER_READ * parameters), round(OPTIMIZER_WRITTEN * parameters)
    return kernel_seconds(Kernel(OPTIMIZER, 0.0, read, written, "float32", ((round(parameters),),)), card)


def handovers(
    total: float, layout: ParallelLayout, message: float, ends: tuple[bool, bool], hidden: float
) -> tuple[float, float]:
    """Of a stage (`StageSeconds`) whose messages to and from its neighbours take so long each; whether it is at an end.

    Where both sides meet they wait for each transfer, an activation and a gradient at once. Where the pipeline is
    interleaved these run beside computation, as long as a device has time for all of its own, and as a message is there
    before its reader: with all between them, S devices are twice S - 1 partitions apart, of whose time S compute.
    """
    (first, last), stages = ends, layout.pp
    handed = 2 * message * (layout.chunks - last)
    if (
        not message or layout.schedule is Pipeline.GPIPE
    ):  # the last stage waits in its forward, the first in its backward
        return handed, 2 * message
    if layout.schedule is not Pipeline.INTERLEAVED:
        return handed, message * (2 - first - last)
    sending = sending_of(Overlap(layout.overlap.value, hidden), layout.schedule)
    if sending is Sending.BLOCKING:  # the sender
        waits = message * (2 * layout.chunks - first - last)
        return waits / layout.chunks, waits
    both = 2 if sending is Sending.RUNTIME else 1  # ways between two devices in turn
    carried = both * message * (layout.chunks if stages > 2 else 2 * layout.chunks - 1)
    met = (stages * total + 2 * (stages - 1) * message * layout.chunks) / (2 * stages - 1)
    return handed, max(0.0, carried - total, met - total)


def pipeline_seconds(stages: Sequence[StageSeconds], layout: ParallelLayout) -> tuple[float, int]:
    """Of all micro-batches, and which stage is the slowest."""
    busiest = max(range(len(stages)), key=lambda stage: stages[stage].each)
    # a stage of an interleaved pipeline is `chunks` partitions, each with its part of it
    parts, chunks = layout.micro_batches * layout.chunks, layout.chunks
    once = sum(stage.total / chunks + stage.handed for stage in stages)
    return once + (parts - 1) * stages[busiest].each / chunks, busiest
