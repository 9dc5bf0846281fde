"""Seconds of one layer and of the two ends of the model, for one micro-batch on one device.

A kernel takes no less than the host needs to issue it. T tokens, h wide, tp = t, k the depth of a product:

    product    FLOPs / (rate * products * fill * k / (k + 64)), or its bytes; fill: the share of processors with a tile
    moves      bytes / (memory * share)

Bytes are those of a layer with fused norms, softmax, bias + GELU and bias + dropout + add, in half precision. What tp
does not divide (norms, dropouts, residuals) is divided by sequence parallelism (`sliced`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from pipeline.cluster_model.layout import Attention, Layout, Recompute
from pipeline.cluster_model.machine import Machine
from pipeline.cluster_model.sizes import Transformer
from pipeline.rates.kernels import ATTENTION, CAUSAL, TILE

DEPTH = 64  # of a product at which half of its time is its start and end
SPLIT = 1024  # of its depth: few tiles share a longer sum
ALIGNED = 8  # elements of 16 bytes
ACCUMULATED = 6  # bytes for each parameter: a gradient is read, one is added to and written
LOGIT_BYTES = 34  # that the loss moves for each logit, forward and backward, mostly in float32
EMBEDDED_BYTES = 20  # that the embedding moves for each element, both ways
END_KERNELS, EMBEDDING_KERNELS = 10, 6


@dataclass(frozen=True)
class Seconds:
    """Of a layer or an end: forward, backward without what is computed again, that, and collectives within both."""

    forward: float
    backward: float
    again: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.again + self.communication


@dataclass(frozen=True)
class Work:
    """What the kernels of a micro-batch depend on."""

    tokens: int
    tp: int
    sliced: int
    attention: Attention
    recompute: Recompute


def work_of(model: Transformer, layout: Layout) -> Work:
    tokens = layout.micro_batch * model.sequence
    return Work(tokens, layout.tp, layout.sliced, layout.attention, layout.recompute)


@lru_cache(maxsize=16384)
def layer_seconds(model: Transformer, work: Work, machine: Machine) -> Seconds:
    inner, outer = _attention(model, work, machine)
    products = list(_layer_products(model, work))
    moves = _forward_moves(model, work)
    forward = inner + _products(products, machine) + _moves(moves, machine)
    back = [turned for m, n, k in products for turned in ((m, k, n), (k, n, m))]
    backward = outer + _products(back, machine) + _moves(_backward_moves(model, work), machine)
    backward += ACCUMULATED * model.layer_parameters / work.tp / machine.moved
    again = {Recompute.none: 0.0, Recompute.selective: _square_again(inner, work), Recompute.full: forward}
    reduced = machine.all_reduce(2 * work.tokens * model.hidden, work.tp, 1)
    times = 6 if work.recompute is Recompute.full else 4
    return Seconds(forward, backward, again[work.recompute], times * reduced)


def _square_again(inner: float, work: Work) -> float:
    """Selective recompute runs the attention again; one that keeps no square tensor has done so already."""
    return inner if work.attention is Attention.plain else 0.0


@lru_cache(maxsize=16384)
def end_seconds(model: Transformer, work: Work, machine: Machine) -> tuple[Seconds, Seconds]:
    """Of the embedding, and of the last product with the loss."""
    kernel = machine.reached.kernel
    embedding = EMBEDDED_BYTES * work.tokens * model.hidden / machine.moved + EMBEDDING_KERNELS * kernel
    columns = model.vocabulary // work.tp
    share = 1.0 if columns % ALIGNED == 0 else machine.reached.unaligned
    shapes = (
        (work.tokens, columns, model.hidden),
        (work.tokens, model.hidden, columns),
        (model.hidden, columns, work.tokens),
    )
    first, *others = (max(kernel, product_seconds(*shape, machine) / share) for shape in shapes)
    loss = LOGIT_BYTES * work.tokens * columns / machine.moved + END_KERNELS * kernel
    reduced = machine.all_reduce(2 * work.tokens * model.hidden, work.tp, 1)
    return (
        Seconds(embedding / 3, 2 * embedding / 3, communication=reduced),
        Seconds(first + loss / 3, sum(others) + 2 * loss / 3, communication=reduced),
    )


def product_seconds(m: float, n: float, k: float, machine: Machine, many: float = 1.0) -> float:
    """Of `many` products at once, m x k by k x n."""
    tiles = many * ceil(m / TILE) * ceil(n / TILE)
    fill = min(1.0, tiles * max(1.0, k / SPLIT) / machine.processors)
    rate = machine.rate * machine.reached.products * fill * k / (k + DEPTH)
    return max(2 * many * m * n * k / rate, 2 * many * (m * k + k * n + m * n) / machine.moved)


def _products(shapes: Iterable[tuple[float, float, float]], machine: Machine) -> float:
    return sum(max(machine.reached.kernel, product_seconds(*shape, machine)) for shape in shapes)


def _moves(sizes: Iterable[float], machine: Machine) -> float:
    return sum(max(machine.reached.kernel, nbytes / machine.moved) for nbytes in sizes)


def _layer_products(model: Transformer, work: Work) -> Iterator[tuple[float, float, float]]:
    """Of the forward pass: rows, columns, depth."""
    tokens, hidden, tp = work.tokens, model.hidden, work.tp
    yield tokens, model.projected / tp, hidden
    yield tokens, hidden, hidden / tp
    yield tokens, (2 if model.gated else 1) * model.feed / tp, hidden
    yield tokens, hidden, model.feed / tp


def _forward_moves(model: Transformer, work: Work) -> list[float]:
    """Bytes of each kernel beside attention: two norms, what leaves attention, activation, two bias + dropout + add."""
    outer = work.tokens * model.hidden / work.sliced
    added = (7 if model.dropout else 6) * outer
    feed = work.tokens * model.feed / work.tp
    activation = (6 if model.gated else 4) * feed
    return [4 * outer, 4 * outer, 4 * work.tokens * model.hidden / work.tp, activation, added, added]


def _backward_moves(model: Transformer, work: Work) -> list[float]:
    """Dropouts, biases, sums of residuals, norms (input and weights), activation, its bias, what enters attention."""
    outer, inner = work.tokens * model.hidden / work.sliced, work.tokens * model.hidden / work.tp
    feed = work.tokens * model.feed / work.tp
    around = [6 * outer, 6 * outer, 6 * outer, 4 * outer, 6 * outer, 4 * outer]
    dropped = [5 * outer, 5 * outer, 2 * outer, 2 * outer, 2 * feed, 6 * inner] if model.dropout else []
    return [*around, *dropped, (10 if model.gated else 6) * feed, 4 * inner, 12 * inner]


def _attention(model: Transformer, work: Work, machine: Machine) -> tuple[float, float]:
    """Seconds of the scores, softmax and context: forward, backward."""
    kernel = machine.reached.kernel
    many = work.tokens / model.sequence * model.heads / work.tp
    if work.attention is Attention.flash:
        flops = 2.0 * many * model.sequence**2 * model.head  # half of the pairs
        rate = machine.rate * machine.reached.products
        way = "_scaled_dot_product_flash_attention"
        forward = flops / (rate * ATTENTION[way].plain * CAUSAL["forward"])
        backward = 2.5 * flops / (rate * ATTENTION[f"{way}_backward"].plain * CAUSAL["backward"])
        return max(kernel, forward), max(kernel, backward)
    scores = max(kernel, product_seconds(model.sequence, model.sequence, model.head, machine, many))
    context = max(kernel, product_seconds(model.sequence, model.head, model.sequence, machine, many))
    pairs = many * model.sequence**2
    dropped = (5 * pairs,) if model.dropout else ()
    forward = scores + context + _moves((4 * pairs, *dropped), machine)
    return forward, scores + 3 * context + _moves((6 * pairs, *dropped), machine)
