"""Seconds of a kernel on a GPU, and of a sequence of them as eager PyTorch issues it.

What is calibrated is the card (`Card`: rates that a few products and one copy measure) and the op (the tables below:
what share of the card's rates its kernel reaches, seen with a profiler on an H200). Nothing is fitted to a model.

    moves memory     start + bytes / (rate * share) + elements * s + rows * s
    product          start + FLOPs / (rate * alignment * fill) + a part of the bytes / rate
    attention        start + FLOPs / (rate * share), or its bytes
    convolution      start + FLOPs / (rate * share) + changes of memory format
    batch norm       start + elements / min(channels, two per processor) * s + bytes / (rate * share)

The host issues kernels one after another; the card starts one when it has been issued and the one before is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd, inf, prod

from shardwright.pipeline.ir.cluster import HALF, HostPace
from shardwright.pipeline.ir.profile import Kernel

START, REPLAYED_START = 1.5e-6, 0.3e-6  # seconds from kernel to kernel: as they are issued, and in a CUDA graph


@dataclass(frozen=True)
class Card:
    products: dict[str, float]  # dtype -> FLOP/s of large products
    memory: float  # bytes/s of a large copy, read and written
    processors: int = 132
    start: float = START  # seconds that any kernel takes beside its own
    host: HostPace = field(default_factory=HostPace)
    unaligned: float | None = None  # share of the rate in products with rows that begin on no 16 bytes; None: as below

    def rate(self, dtype: str) -> float:
        known = (dtype, "bfloat16") if dtype in HALF else (dtype,)
        return next((self.products[name] for name in known if name in self.products), self.products["float32"])


@dataclass(frozen=True)
class Moves:
    """A kernel that is bound by the memory it moves: the share of the card's rate that it reaches."""

    share: float = 0.95
    reads: bool = True  # whether what it reads counts: an op that picks a few elements does not read the rest
    element: float = 0.0  # seconds for each element of its first tensor, beside the bytes
    row: float = 0.0  # seconds for each row (all dims but the last) of its first tensor
    once: float = 0.0  # seconds beside all that


_VIEWS_AND_CASTS = {"_to_copy": Moves(0.69), "clone": Moves(0.69), "copy_": Moves(0.69), "cat": Moves(0.6)}
_POINTWISE = {
    "gelu": Moves(element=0.3e-12), "gelu_backward": Moves(element=0.3e-12),
    "native_dropout": Moves(0.72), "embedding": Moves(0.6), "div": Moves(0.42), "where": Moves(0.6), "roll": Moves(0.2),
}  # fmt: skip
_REDUCTIONS = {
    "sum": Moves(0.9, element=1.0e-12, once=4e-6), "mean": Moves(0.9), "_log_softmax": Moves(0.55),
    "_log_softmax_backward_data": Moves(0.67), "_softmax": Moves(1.0), "_softmax_backward_data": Moves(1.0),
    "_safe_softmax": Moves(0.26), "native_layer_norm": Moves(0.95, row=1.2e-9),
    "native_layer_norm_backward": Moves(0.95, element=4.7e-12), "_fused_rms_norm": Moves(0.95, row=1.2e-9),
    "_fused_rms_norm_backward": Moves(0.95, element=6.7e-12),
    "native_group_norm": Moves(0.5), "native_group_norm_backward": Moves(0.4),
    "max_pool2d_with_indices": Moves(0.24), "max_pool2d_with_indices_backward": Moves(0.14),
    "avg_pool2d": Moves(0.5), "avg_pool2d_backward": Moves(0.3), "cumsum": Moves(0.2), "topk": Moves(0.05, once=2e-5),
    "sort": Moves(0.05, once=3e-5), "nll_loss_forward": Moves(reads=False, once=1.5e-5),
    "nll_loss_backward": Moves(1.0, reads=False),
}  # fmt: skip
_INDEXED = {
    "embedding_dense_backward": Moves(0.5, once=1.1e-4), "index": Moves(0.4), "index_put": Moves(0.3, once=1e-5),
    "_index_put_impl_": Moves(0.3, once=1e-5), "gather": Moves(0.4), "scatter": Moves(0.3), "scatter_add": Moves(0.1),
    "index_add": Moves(0.1), "index_select": Moves(0.4),
}  # fmt: skip
MOVES = {**_VIEWS_AND_CASTS, **_POINTWISE, **_REDUCTIONS, **_INDEXED}
# Of optimizers, by how their names begin: in float32 and in half precision. They treat all parameters at once.
OPTIMIZERS = {
    "_foreach": (Moves(0.88), Moves(0.73)),
    "_fused_ada": (Moves(0.81), Moves(0.63)),
    "_fused_sgd": (Moves(0.8), Moves(0.75)),
}
SCATTERED = 0.6  # of the share, for a kernel that reads memory out of order
BROADCAST = 0.72  # of the share, for one that repeats a smaller tensor along a larger one
BROADCASTS = ("mul", "add", "sub", "div", "where", "add_", "mul_", "maximum", "minimum")  # which may do so

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "addmv", "mv")
TILE = 128
# A product whose rows do not begin on 16 bytes runs an old kernel: share of the rate by the bytes on which they do, and
# for the odd ones by which operands are read across (the second alone is worst).
ALIGNMENT = {16: 1.0, 8: 0.31, 4: 0.31}
ODD = {"nt": 0.127, "nn": 0.178, "tn": 0.2, "tt": 0.162}
PRODUCT_BYTES = {"half": 0.1, "float32": 0.5}  # the part of its bytes that is not moved while it computes


@dataclass(frozen=True)
class AttentionRate:
    """Shares of the rate without and with dropout."""

    plain: float
    dropout: float


ATTENTION = {
    "_scaled_dot_product_flash_attention": AttentionRate(0.42, 0.205),
    "_scaled_dot_product_flash_attention_backward": AttentionRate(0.3, 0.28),
    "_scaled_dot_product_efficient_attention": AttentionRate(0.66, 0.5),
    "_scaled_dot_product_efficient_attention_backward": AttentionRate(0.66, 0.6),
}
EFFICIENT_IN_HALF = 0.18  # the efficient kernels do not use the fastest units of the card
CAUSAL = {"forward": 0.9, "backward": 0.9}  # of the share: skipping half of the pairs does not save half the time
ATTENTION_TILE = 64
WIDE = 0.4  # the share grows with the width of a head to this power, from 64 on
ATTENTION_BYTES = {"forward": 0.4, "backward": 0.25}  # share of the memory rate, where sequences are short

# Shares of the rate of half precision: in half precision, and in float32, which convolutions run in tf32.
CONVOLUTIONS = {"convolution": (0.46, 0.3), "cudnn_convolution": (0.46, 0.3), "convolution_backward": (0.44, 0.22)}
THIN = 64  # channels below which a convolution leaves the units idle in proportion
THINNEST, THINNEST_BACKWARD = 0.07, 0.03  # what is left of the rate where each channel stands alone
CHANNELS_LAST = 2  # passes over input and output to change the memory format and back

# Seconds for each element of a channel, and the share of the memory rate for what comes on top (inf: nothing does).
BATCH_NORM = {
    "cudnn_batch_norm": (0.45e-9, 0.9), "cudnn_batch_norm_backward": (1.5e-9, inf),
    "native_batch_norm": (1.0e-9, 0.45), "native_batch_norm_backward": (1.95e-9, inf),
}  # fmt: skip


def kernel_seconds(kernel: Kernel, card: Card) -> float:
    if kernel.name in PRODUCTS:
        return card.start + _product(kernel, card)
    if kernel.name in ATTENTION:
        return card.start + _attention(kernel, card)
    if kernel.name in CONVOLUTIONS:
        return card.start + _convolution(kernel, card)
    if kernel.name in BATCH_NORM:
        return card.start + _batch_norm(kernel, card)
    return card.start + _moves(kernel, card)


def _moves(kernel: Kernel, card: Card) -> float:
    found = MOVES.get(kernel.name, Moves())
    for beginning, (single, half) in OPTIMIZERS.items():
        if kernel.name.startswith(beginning):
            found = half if kernel.dtype in HALF else single
    share = found.share * (SCATTERED if kernel.scattered else BROADCAST if _broadcasts(kernel) else 1.0)
    first = kernel.shapes[0] if kernel.shapes else ()
    beside = found.once + found.element * prod(first) + found.row * prod(first[:-1])
    moved = kernel.written + (kernel.read if found.reads else 0)
    return moved / (card.memory * share) + beside


def _broadcasts(kernel: Kernel) -> bool:
    sizes = {prod(shape) for shape in kernel.shapes if shape}
    return kernel.name in BROADCASTS and len(sizes) > 1


def _product(kernel: Kernel, card: Card) -> float:
    *batch, rows, columns = kernel.shapes[-1]
    inner = max(1.0, kernel.flops / (2 * max(1, prod(kernel.shapes[-1]))))
    tiles = prod(batch) * -(-rows // TILE) * -(-columns // TILE)
    used = tiles * min(64.0, max(1.0, inner / 1024))  # few tiles share a long sum
    fill = min(1.0, used / card.processors) * inner / (inner + (16 if kernel.dtype in HALF else 40))
    if min(rows, columns) < TILE:
        fill *= max(min(rows, columns), 16) / TILE if kernel.dtype in HALF else 0.9
    computed = kernel.flops / (card.rate(kernel.dtype) * _alignment(kernel, card) * max(fill, 1e-3))
    beside = PRODUCT_BYTES["half" if kernel.dtype in HALF else "float32"]
    return computed + beside * (kernel.read + kernel.written) / card.memory


def _alignment(kernel: Kernel, card: Card) -> float:
    if kernel.dtype not in HALF:
        return 1.0
    begins = gcd(16, 2 * kernel.leading) if kernel.leading else 16
    if begins < 16 and card.unaligned is not None:
        return card.unaligned
    return ALIGNMENT.get(begins, ODD[kernel.transposed or "nn"])


def _attention(kernel: Kernel, card: Card) -> float:
    found = ATTENTION[kernel.name]
    share = found.dropout if kernel.dropout else found.plain
    if "efficient" in kernel.name and kernel.dtype in HALF:
        share *= EFFICIENT_IN_HALF
    way = "backward" if "backward" in kernel.name else "forward"
    if kernel.causal:
        share *= CAUSAL[way]
    *_, length, width = kernel.shapes[0] if kernel.shapes and len(kernel.shapes[0]) > 1 else (ATTENTION_TILE, 64)
    share *= length / (-(-length // ATTENTION_TILE) * ATTENTION_TILE) * float(max(1.0, width / 64) ** WIDE)
    moved = (kernel.read + kernel.written) / (ATTENTION_BYTES[way] * card.memory)
    return max(kernel.flops / (card.rate(kernel.dtype) * share), moved)


def _convolution(kernel: Kernel, card: Card) -> float:
    weight = _weight(kernel)
    thin = min(1.0, min(weight[0], weight[1]) / THIN) if len(weight) > 1 else 1.0
    half, single = CONVOLUTIONS[kernel.name]
    floor = THINNEST_BACKWARD if "backward" in kernel.name else THINNEST
    if kernel.dtype in HALF:
        rate = card.rate(kernel.dtype) * half
    else:
        rate = max(card.rate("bfloat16") * single, card.rate(kernel.dtype) * half)
    rate *= max(thin, floor)
    moved = (kernel.read + kernel.written) / card.memory
    if kernel.dtype not in HALF:
        return kernel.flops / rate + 0.5 * moved
    passes = CHANNELS_LAST if any(size > 1 for size in weight[2:]) else 1
    return kernel.flops / rate + passes * moved


def _weight(kernel: Kernel) -> tuple[int, ...]:
    """The smallest tensor that has the rank of an image."""
    ranked = [shape for shape in kernel.shapes if len(shape) >= 3]
    return min(ranked, key=prod) if ranked else ()


def _batch_norm(kernel: Kernel, card: Card) -> float:
    element, share = BATCH_NORM[kernel.name]
    shape = kernel.shapes[0]
    together = min(shape[1], 2 * card.processors)
    return prod(shape) / together * element + (kernel.read + kernel.written) / (card.memory * share)


@dataclass(frozen=True)
class KernelRun:
    """Kernels that the host issues at one pace."""

    kernels: tuple[float, ...]  # seconds of each on the card
    pace: float  # seconds of the host for each
    waits: frozenset[int] = frozenset()  # numbers of kernels before which the host waits for the card


def queue_seconds(phases: Iterable[Iterable[KernelRun]]) -> tuple[float, ...]:
    """Seconds of each phase on the card, where the host runs ahead as far as it can from an idle start."""
    host = card = 0.0
    ends = [0.0]
    for phase in phases:
        for part in phase:
            for number, seconds in enumerate(part.kernels):
                host = (max(host, card) if number in part.waits else host) + part.pace
                card = max(card, host) + seconds
        ends.append(card)
    return tuple(after - before for before, after in pairwise(ends))
