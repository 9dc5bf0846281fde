"""Seconds of a step: p stages of u_i seconds for each of m micro-batches, each stage a sum of layers.

    1f1b         sum u + (m - 1) max u
    interleaved  (sum u - max u) / chunks + m max u
    gpipe        as 1f1b, but what is computed again at the end of the pipeline waits for nobody
    then         gradients' all-reduce over dp (reduce-scatter and gather with ZeRO: as many bytes), optimizer

Nothing of the all-reduce is hidden. ZeRO 2 scatters a layer's gradients for each micro-batch, ZeRO 3 also gathers its
parameters twice, while another layer runs: what is longer counts.

In a layer a kernel takes no less than the host needs to issue it. T tokens, h wide, tp = t, k the depth of a product:

    product    FLOPs / (rate * products * fill * k / (k + 64)), or its bytes; fill: the share of processors with a tile
    moves      bytes / (memory * share)

Bytes are those of a layer with fused norms, softmax, bias + GELU and bias + dropout + add, in half precision. What tp
does not divide (norms, dropouts, residuals) is divided by sequence parallelism (`sliced`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from pipeline.cluster_model.machine import Machine
from pipeline.cluster_model.memory import device_bytes, stage_parameters
from pipeline.cluster_model.transformer import (
    AttentionKernel,
    LayoutError,
    ParallelLayout,
    PipelineSchedule,
    RecomputeMode,
    Transformer,
    stage_layers,
    why_not,
)
from pipeline.rates.kernels import ATTENTION, CAUSAL, TILE

DEPTH = 64  # of a product at which half of its time is its start and end
SPLIT = 1024  # of its depth: few tiles share a longer sum
ALIGNED = 8  # elements of 16 bytes
ACCUMULATED = 6  # bytes for each parameter: a gradient is read, one is added to and written
LOGIT_BYTES = 34  # that the loss moves for each logit, forward and backward, mostly in float32
EMBEDDED_BYTES = 20  # that the embedding moves for each element, both ways
END_KERNELS, EMBEDDING_KERNELS = 10, 6
OPTIMIZER_BYTES = 30  # moved for each parameter: four tensors read and three written in float32, the weight in half
FLASH = "_scaled_dot_product_flash_attention"


@dataclass(frozen=True)
class MicroBatchSeconds:
    """Of a layer, an end or a stage: forward, backward without what is computed again, that, and waits for links."""

    forward: float
    backward: float
    again: float = 0.0
    communication: float = 0.0

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


def price(model: Transformer, layout: ParallelLayout, machine: Machine) -> Price:
    what = why_not(model, layout)
    if what is not None:
        raise LayoutError(what, remedy="choose sizes that divide")
    stages = stage_seconds(model, layout, machine)
    busy, idle = pipeline_seconds(stages, layout)
    gradients, optimizer = _end_of_step(model, layout, machine)
    seconds = busy + idle + gradients + optimizer
    worst = max(stages, key=lambda stage: stage.total)
    samples = layout.batch / seconds
    memory = device_bytes(model, layout)
    return Price(
        seconds=seconds,
        bubble=idle / seconds,
        communication=(layout.micro_batches * worst.communication + gradients) / seconds,
        memory_bytes=memory,
        samples_per_s=samples,
        tokens_per_s=samples * model.sequence,
        flops=_hardware_flops(model, layout) * samples / layout.devices,
        mfu=model.sample_flops * samples / layout.devices / machine.rate,
        fits=memory <= machine.memory_bytes,
    )


def _hardware_flops(model: Transformer, layout: ParallelLayout) -> float:
    """Of a sequence, as it is published: with full recompute the forward pass of all layers a second time."""
    layers = model.sequence * model.layers * 2.0 * (model.layer_parameters + 2 * model.sequence * model.hidden)
    return model.sample_flops + (layers if layout.recompute is RecomputeMode.full else 0.0)


# ---- the stages of a pipeline


def stage_seconds(model: Transformer, layout: ParallelLayout, machine: Machine) -> tuple[MicroBatchSeconds, ...]:
    """Of each stage; those in the middle with as many layers are equal."""
    tokens = layout.micro_batch * model.sequence
    work = LayerWork(tokens, layout.tp, layout.sliced, layout.attention, layout.recompute)
    layer = layer_seconds(model, work, machine)
    embedding, loss = end_seconds(model, work, machine)
    sent = _sent(model, layout, machine)
    # a layer's collectives of one micro-batch: ZeRO 2 scatters gradients, ZeRO 3 also gathers parameters twice
    times = {2: 1, 3: 3}.get(layout.zero, 0)
    gathered = times * machine.gather(2 * model.layer_parameters / layout.tp, layout.dp, layout.tp)
    stages = []
    for stage, layers in enumerate(stage_layers(model, layout)):
        parts = [layer] * layers + [embedding] * (stage == 0) + [loss] * (stage == layout.pp - 1)
        forward, backward, again, communication = (
            sum(getattr(part, name) for part in parts) for name in ("forward", "backward", "again", "communication")
        )
        waits = max(0.0, layers * gathered - forward - backward - again)
        stages.append(MicroBatchSeconds(forward, backward, again, communication + sent + waits))
    return tuple(stages)


def _sent(model: Transformer, layout: ParallelLayout, machine: Machine) -> float:
    """To the next stage and back, once for each chunk: a slice from each device, gathered inside tp."""
    if layout.pp == 1:
        return 0.0
    nbytes = 2.0 * layout.micro_batch * model.sequence * model.hidden
    one = machine.send(nbytes / layout.tp, layout.dp * layout.tp, layout.devices)
    gathered = 0.0 if layout.sequence_parallel else machine.gather(nbytes, layout.tp, 1)
    return 2 * layout.chunks * (one + gathered)


def pipeline_seconds(stages: tuple[MicroBatchSeconds, ...], layout: ParallelLayout) -> tuple[float, float]:
    """Busy seconds of the slowest stage, and what it waits."""
    worst = max(stages, key=lambda stage: stage.total)
    waits = sum(stage.total for stage in stages) - worst.total
    if layout.schedule is PipelineSchedule.gpipe:
        waits -= sum(stage.again for stage in stages) - worst.again
    return layout.micro_batches * worst.total, waits / layout.chunks


def _end_of_step(model: Transformer, layout: ParallelLayout, machine: Machine) -> tuple[float, float]:
    layers = stage_layers(model, layout)
    most = max(stage_parameters(model, layout, stage, count) for stage, count in enumerate(layers))
    gradients = machine.all_reduce(2 * most, layout.dp, layout.tp)
    own = most / layout.dp if layout.zero else most
    return gradients, OPTIMIZER_BYTES * own / machine.moved


# ---- a layer, and the two ends of the model


@dataclass(frozen=True)
class LayerWork:
    """What the kernels of a micro-batch depend on."""

    tokens: int
    tp: int
    sliced: int
    attention: AttentionKernel
    recompute: RecomputeMode


@lru_cache(maxsize=16384)
def layer_seconds(model: Transformer, work: LayerWork, machine: Machine) -> MicroBatchSeconds:
    inner, outer = _attention(model, work, machine)
    products = _layer_products(model, work)
    forward = inner + _products(products, machine) + _moves(_forward_moves(model, work), machine)
    back = [turned for m, n, k in products for turned in ((m, k, n), (k, n, m))]
    backward = outer + _products(back, machine) + _moves(_backward_moves(model, work), machine)
    backward += ACCUMULATED * model.layer_parameters / work.tp / machine.moved
    # selective recompute runs the attention again; one that keeps no square tensor has done so already
    square = inner if work.attention is AttentionKernel.plain else 0.0
    again = {RecomputeMode.none: 0.0, RecomputeMode.selective: square, RecomputeMode.full: forward}
    reduced = machine.all_reduce(2 * work.tokens * model.hidden, work.tp, 1)
    times = 6 if work.recompute is RecomputeMode.full else 4
    return MicroBatchSeconds(forward, backward, again[work.recompute], times * reduced)


@lru_cache(maxsize=16384)
def end_seconds(model: Transformer, work: LayerWork, machine: Machine) -> tuple[MicroBatchSeconds, MicroBatchSeconds]:
    """Of the embedding, and of the last product with the loss."""
    kernel = machine.reached.kernel
    embedding = EMBEDDED_BYTES * work.tokens * model.hidden / machine.moved + EMBEDDING_KERNELS * kernel
    tokens, columns, hidden = work.tokens, model.vocabulary // work.tp, model.hidden
    share = 1.0 if columns % ALIGNED == 0 else machine.reached.unaligned
    shapes = ((tokens, columns, hidden), (tokens, hidden, columns), (hidden, columns, tokens))
    first, *others = (max(kernel, _product_seconds(*shape, machine) / share) for shape in shapes)
    loss = LOGIT_BYTES * tokens * columns / machine.moved + END_KERNELS * kernel
    reduced = machine.all_reduce(2 * tokens * hidden, work.tp, 1)
    return (
        MicroBatchSeconds(embedding / 3, 2 * embedding / 3, communication=reduced),
        MicroBatchSeconds(first + loss / 3, sum(others) + 2 * loss / 3, communication=reduced),
    )


def _product_seconds(m: float, n: float, k: float, machine: Machine, many: float = 1.0) -> float:
    """Of `many` products at once, m x k by k x n."""
    tiles = many * ceil(m / TILE) * ceil(n / TILE)
    fill = min(1.0, tiles * max(1.0, k / SPLIT) / machine.processors)
    rate = machine.rate * machine.reached.products * fill * k / (k + DEPTH)
    return max(2 * many * m * n * k / rate, 2 * many * (m * k + k * n + m * n) / machine.moved)


def _products(shapes: Iterable[tuple[float, float, float]], machine: Machine) -> float:
    return sum(max(machine.reached.kernel, _product_seconds(*shape, machine)) for shape in shapes)


def _moves(sizes: Iterable[float], machine: Machine) -> float:
    return sum(max(machine.reached.kernel, nbytes / machine.moved) for nbytes in sizes)


def _layer_products(model: Transformer, work: LayerWork) -> tuple[tuple[float, float, float], ...]:
    """Of the forward pass: rows, columns, depth."""
    tokens, hidden, tp = work.tokens, model.hidden, work.tp
    return (
        (tokens, model.projected / tp, hidden),
        (tokens, hidden, hidden / tp),
        (tokens, (2 if model.gated else 1) * model.feed / tp, hidden),
        (tokens, hidden, model.feed / tp),
    )


def _forward_moves(model: Transformer, work: LayerWork) -> list[float]:
    """Bytes of each kernel beside attention: two norms, what leaves attention, activation, two bias + dropout + add."""
    outer = work.tokens * model.hidden / work.sliced
    added = (7 if model.dropout else 6) * outer
    feed = work.tokens * model.feed / work.tp
    activation = (6 if model.gated else 4) * feed
    return [4 * outer, 4 * outer, 4 * work.tokens * model.hidden / work.tp, activation, added, added]


def _backward_moves(model: Transformer, work: LayerWork) -> list[float]:
    """Dropouts, biases, sums of residuals, norms (input and weights), activation, its bias, what enters attention."""
    outer, inner = work.tokens * model.hidden / work.sliced, work.tokens * model.hidden / work.tp
    feed = work.tokens * model.feed / work.tp
    around = [6 * outer, 6 * outer, 6 * outer, 4 * outer, 6 * outer, 4 * outer]
    dropped = [5 * outer, 5 * outer, 2 * outer, 2 * outer, 2 * feed, 6 * inner] if model.dropout else []
    return [*around, *dropped, (10 if model.gated else 6) * feed, 4 * inner, 12 * inner]


def _attention(model: Transformer, work: LayerWork, machine: Machine) -> tuple[float, float]:
    """Seconds of the scores, softmax and context: forward, backward."""
    kernel = machine.reached.kernel
    many = work.tokens / model.sequence * model.heads / work.tp
    if work.attention is AttentionKernel.flash:
        flops = 2.0 * many * model.sequence**2 * model.head  # half of the pairs
        rate = machine.rate * machine.reached.products
        forward = flops / (rate * ATTENTION[FLASH].plain * CAUSAL["forward"])
        backward = 2.5 * flops / (rate * ATTENTION[f"{FLASH}_backward"].plain * CAUSAL["backward"])
        return max(kernel, forward), max(kernel, backward)
    scores = max(kernel, _product_seconds(model.sequence, model.sequence, model.head, machine, many))
    context = max(kernel, _product_seconds(model.sequence, model.head, model.sequence, machine, many))
    pairs = many * model.sequence**2
    dropped = (5 * pairs,) if model.dropout else ()
    forward = scores + context + _moves((4 * pairs, *dropped), machine)
    return forward, scores + 3 * context + _moves((6 * pairs, *dropped), machine)
