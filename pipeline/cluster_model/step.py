"""Seconds of a step: p stages of u_i seconds for each of m micro-batches.

    1f1b         sum u + (m - 1) max u
    interleaved  (sum u - max u) / chunks + m max u
    gpipe        as 1f1b, but what is computed again at the end of the pipeline waits for nobody
    then         gradients' all-reduce over dp (reduce-scatter and gather with ZeRO: as many bytes), optimizer

Nothing of the all-reduce is hidden. ZeRO 2 scatters a layer's gradients for each micro-batch, ZeRO 3 also gathers its
parameters twice, while another layer runs: what is longer counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.cluster_model.layer import Seconds, end_seconds, layer_seconds, work_of
from pipeline.cluster_model.layout import Layout, Schedule, check, stage_layers
from pipeline.cluster_model.machine import Machine
from pipeline.cluster_model.memory import device_bytes, stage_parameters
from pipeline.cluster_model.sizes import Transformer

OPTIMIZER_BYTES = 30  # moved for each parameter: four tensors read and three written in float32, the weight in half


@dataclass(frozen=True)
class Stage:
    """Seconds of one micro-batch."""

    forward: float
    backward: float
    again: float
    communication: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.again + self.communication


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


def price(model: Transformer, layout: Layout, machine: Machine) -> Price:
    check(model, layout)
    stages = stage_seconds(model, layout, machine)
    busy, idle = pipeline_seconds(stages, layout)
    gradients, optimizer = _end_of_step(model, layout, machine)
    seconds = busy + idle + gradients + optimizer
    worst = max(stages, key=lambda stage: stage.total)
    samples = layout.batch / seconds
    held = device_bytes(model, layout)
    return Price(
        seconds=seconds,
        bubble=idle / seconds,
        communication=(layout.micro_batches * worst.communication + gradients) / seconds,
        memory_bytes=held,
        samples_per_s=samples,
        tokens_per_s=samples * model.sequence,
        flops=hardware_flops(model, layout) * samples / layout.devices,
        mfu=model.sample_flops * samples / layout.devices / machine.rate,
        fits=held <= machine.memory_bytes,
    )


def hardware_flops(model: Transformer, layout: Layout) -> float:
    """Of a sequence, as it is published: with full recompute the forward pass of all layers a second time."""
    layers = model.sequence * model.layers * 2.0 * (model.layer_parameters + 2 * model.sequence * model.hidden)
    return model.sample_flops + (layers if layout.recompute.value == "full" else 0.0)


def stage_seconds(model: Transformer, layout: Layout, machine: Machine) -> tuple[Stage, ...]:
    """Of each stage; those in the middle with as many layers are equal."""
    work = work_of(model, layout)
    layer = layer_seconds(model, work, machine)
    embedding, loss = end_seconds(model, work, machine)
    sent = _sent(model, layout, machine)
    gathered = _gathered(model, layout, machine)
    stages = []
    for stage, layers in enumerate(stage_layers(model, layout)):
        parts = [layer] * layers
        parts += [embedding] * (stage == 0) + [loss] * (stage == layout.pp - 1)
        stages.append(_together(parts, sent, layers * gathered))
    return tuple(stages)


def _together(parts: list[Seconds], sent: float, gathered: float) -> Stage:
    forward, backward, again = (sum(getattr(p, name) for p in parts) for name in ("forward", "backward", "again"))
    waits = max(0.0, gathered - forward - backward - again)
    return Stage(forward, backward, again, sum(part.communication for part in parts) + sent + waits)


def _sent(model: Transformer, layout: Layout, machine: Machine) -> float:
    """To the next stage and back, once for each chunk: a slice from each device, gathered inside tp."""
    if layout.pp == 1:
        return 0.0
    nbytes = 2.0 * layout.micro_batch * model.sequence * model.hidden
    one = machine.send(nbytes / layout.tp, layout.dp * layout.tp, layout.devices)
    gathered = 0.0 if layout.sequence_parallel else machine.gather(nbytes, layout.tp, 1)
    return 2 * layout.chunks * (one + gathered)


def _gathered(model: Transformer, layout: Layout, machine: Machine) -> float:
    """Seconds of a layer's collectives for one micro-batch: ZeRO 2 scatters gradients, ZeRO 3 also gathers twice."""
    times = {2: 1, 3: 3}.get(layout.zero, 0)
    return times * machine.gather(2 * model.layer_parameters / layout.tp, layout.dp, layout.tp)


def pipeline_seconds(stages: tuple[Stage, ...], layout: Layout) -> tuple[float, float]:
    """Busy seconds of the slowest stage, and what it waits."""
    worst = max(stages, key=lambda stage: stage.total)
    waits = sum(stage.total for stage in stages) - worst.total
    if layout.schedule is Schedule.gpipe:
        waits -= sum(stage.again for stage in stages) - worst.again
    return layout.micro_batches * worst.total, waits / layout.chunks


def _end_of_step(model: Transformer, layout: Layout, machine: Machine) -> tuple[float, float]:
    layers = stage_layers(model, layout)
    held = max(stage_parameters(model, layout, stage, count) for stage, count in enumerate(layers))
    gradients = machine.all_reduce(2 * held, layout.dp, layout.tp)
    own = held / layout.dp if layout.zero else held
    return gradients, OPTIMIZER_BYTES * own / machine.moved
