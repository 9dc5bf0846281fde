"""What differs from device to device: the ops that really run where the graph has a composite, and their workspace.

Convolutions in half precision run on channels-last memory: cuDNN changes the format of what it is given and gives back
in a workspace, with channels padded to eight. Those of one element and stride one run as products and convert less;
their weight gradient is summed from partial sums. As measured on an H200 for all convolutions of a ResNet-50.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.pipeline.ir.cluster import HALF
from shardwright.pipeline.ir.profile import Kernel
from shardwright.stages.profile.recurrent import keeps_on_cpu, keeps_on_cuda, lowered

aten = torch.ops.aten
PADDED = 8  # channels
LARGE = 2**19  # elements of a weight from which one-element convolutions are run as the others are
PARTIAL_SUMS, MOST_PARTIAL = 1024, 140e6  # bytes for each element of such a weight, and in all
FORWARD, BACKWARD = ("convolution", "cudnn_convolution"), ("convolution_backward",)
REDUCTIONS = ("sum", "mean")
FEW_ROWS = 3072  # of an embedding, whose gradient needs nothing beside it
WARP, REDUCING, THREADS, PROCESSORS = 32, 512, 2048, 132  # threads; of a block that reduces; of a processor of an H200

Shape = tuple[int, ...]


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(x, p, train)[0] if train and p else x


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of `scaled_dot_product_attention`, by the names that torch gives them."""

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = field(default=None, kw_only=True)
    enable_gqa: bool = field(default=False, kw_only=True)


def _attending(run: Callable[[AttentionCall], Tensor]) -> Callable[..., Tensor]:
    return lambda *given, **named: run(AttentionCall(*given, **named))


def _attention(a: AttentionCall) -> Tensor:
    """Flash attention where it can run: half precision and no mask, also with grouped heads; else the efficient one.

    The efficient one takes neither grouped heads nor a mask whose last dim does not lie together in memory (a bias that
    was permuted): then attention is plain matrix products.
    """
    q, k, v, mask = a.q, a.k, a.v, a.attn_mask
    if mask is None and q.dtype in (torch.bfloat16, torch.float16):
        return aten._scaled_dot_product_flash_attention(q, k, v, a.dropout_p, a.is_causal, scale=a.scale)[0]
    if a.enable_gqa or (mask is not None and mask.stride(-1) != 1):
        return plain_attention(a)
    if mask is not None:
        mask = _additive(mask, q.dtype).expand(*q.shape[:-1], k.shape[-2])
    grad = q.requires_grad or k.requires_grad or v.requires_grad
    run = aten._scaled_dot_product_efficient_attention
    return run(q, k, v, mask, grad, a.dropout_p, a.is_causal, scale=a.scale)[0]


def plain_attention(a: AttentionCall) -> Tensor:
    """`_scaled_dot_product_attention_math` as a GPU runs it: half precision is computed in float32."""
    q, k, v, mask, dtype = a.q, a.k, a.v, a.attn_mask, a.q.dtype
    if dtype in (torch.bfloat16, torch.float16):
        q, k, v = q.float(), k.float(), v.float()
    root = (a.scale or q.shape[-1] ** -0.5) ** 0.5
    q = q * root
    if a.is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if (groups := q.shape[-3] // k.shape[-3]) > 1:
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    weights = q @ (k.transpose(-2, -1) * root)
    if mask is not None:
        weights.add_(_additive(mask, q.dtype))
    weights = aten._safe_softmax(weights, -1)  # by the same name, as torch has it: what was before it goes
    weights = _dropout(weights, a.dropout_p, True)
    return (weights @ v).to(dtype)


def _attention_on_cpu(a: AttentionCall) -> Tensor:
    """Flash attention where it can run, also with grouped heads: four dims and no dropout; else plain products."""
    mask = None if a.attn_mask is None else _additive(a.attn_mask, a.q.dtype)
    if a.dropout_p or a.q.dim() != 4 or (mask is not None and mask.requires_grad):
        math = aten._scaled_dot_product_attention_math
        return math(a.q, a.k, a.v, mask, a.dropout_p, a.is_causal, scale=a.scale, enable_gqa=a.enable_gqa)[0]
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    return flash(a.q, a.k, a.v, a.dropout_p, a.is_causal, attn_mask=mask, scale=a.scale)[0]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _batch_norm(x: Tensor, weight: Tensor | None, *given: Any) -> Tensor:
    """The others are bias, mean, variance, training, momentum, epsilon and whether cuDNN may be used."""
    training = given[3]
    if training and weight is not None and x.dim() <= 5 and x.dtype != torch.bfloat16:
        return aten.cudnn_batch_norm(x, weight, *given[:6])[0]
    return aten.native_batch_norm(x, weight, *given[:6])[0]


class _GroupedProduct(torch.autograd.Function):
    """Each row meets one matrix of a stack. Which one depends on values: rows are taken as shared out evenly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _by_group(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        of_weight = torch.empty_like(weight)
        groups = len(weight)
        for rows, gradient, own in zip(
            x.tensor_split(groups), gradients[0].tensor_split(groups), of_weight, strict=True
        ):
            torch.mm(rows.t(), gradient, out=own)
        return _by_group(gradients[0], weight.transpose(1, 2)), of_weight


def _by_group(x: Tensor, weight: Tensor) -> Tensor:
    result = x.new_empty(len(x), weight.shape[-1])
    groups = len(weight)
    for rows, matrix, own in zip(x.tensor_split(groups), weight, result.tensor_split(groups), strict=True):
        torch.mm(rows, matrix, out=own)
    return result


def _grouped_product(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    result: Tensor = _GroupedProduct.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


_ANY: dict[str, Callable[..., Any]] = {"transformers.grouped_mm_fallback.default": _grouped_product}

LOWERED = {  # device -> op -> what it runs instead
    "cuda": _ANY
    | lowered(keeps_on_cuda)
    | {
        "aten.dropout.default": _dropout,
        "aten.scaled_dot_product_attention.default": _attending(_attention),
        "aten.batch_norm.default": _batch_norm,
    },
    "cpu": _ANY | lowered(keeps_on_cpu) | {"aten.scaled_dot_product_attention.default": _attending(_attention_on_cpu)},
}


def workspace_bytes(kernel: Kernel) -> int:
    """What a kernel of a GPU takes beside its tensors while it runs."""
    if kernel.name in REDUCTIONS:
        return _reduction(kernel.shapes[0], kernel.shapes[-1])
    if kernel.name == "_scaled_dot_product_flash_attention_backward":
        return _flash_backward(*kernel.shapes[1:3])
    if kernel.name == "embedding_dense_backward":  # rows that are read more than once are added up first
        rows = prod(kernel.shapes[0][:-1])
        return 4 * prod(kernel.shapes[0]) if rows > FEW_ROWS else 0
    if kernel.name in (*FORWARD, *BACKWARD) and kernel.dtype in HALF:
        return _convolution(kernel)
    return 0


def _reduction(given: Shape, result: Shape) -> int:
    """Sums over rows, such as the gradient of a bias: blocks of threads that share a column write their sums down, and
    torch takes as much for each as if it had all columns of its block (`setReduceConfig` in its Reduce.cuh)."""
    columns, rows = prod(result), prod(given) // max(prod(result), 1)
    if not result or not given or given[-1] == 1 or result[-1] != given[-1]:
        return 0  # along rows: a few bytes
    vector = next(size for size in (4, 2, 1) if result[-1] % size == 0)
    threads = REDUCING // vector
    high = min(_power_of_two(rows), max(threads // min(_power_of_two(columns // vector), WARP), 1))
    wide = min(_power_of_two(columns // vector), threads // high)
    of_one = -(-rows // high)
    blocks, room = -(-columns // vector // wide), PROCESSORS * (THREADS // (wide * high))
    if rows < min(16 * high, 256) or of_one < 256 or blocks > room:
        return 0
    shared_by = max(min(-(-room // blocks), -(-of_one // 16)), -(-of_one // 256))
    return 4 * columns * shared_by * wide * vector if shared_by > 1 else 0


def _power_of_two(size: int) -> int:
    """The largest one that is not larger."""
    return 1 << max(size, 1).bit_length() - 1


def _flash_backward(query: Shape, key: Shape) -> int:
    """Gradients of queries are added up in float32, those of keys and values first for each head of the queries."""
    heads, width = query[1], query[-1]
    shared = 2 * 2 * query[0] * heads * key[2] * width if key[1] != heads else 0
    return 4 * prod(query[:-1]) * (1 + width) + shared


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _convolution(kernel: Kernel) -> int:
    if kernel.name in FORWARD:
        given, weight, result = kernel.shapes[0], kernel.shapes[1], kernel.shapes[-1]
    else:
        result, given, weight = kernel.shapes[:3]
    if len(given) != 4:
        return 0
    as_product = prod(weight[2:]) == 1 and given[2:] == result[2:] and prod(weight) < LARGE
    whole, made = 2 * prod(given), 2 * prod(result)
    padded = whole // given[1] * _up(given[1], PADDED)
    if kernel.name in FORWARD:
        return made if as_product else padded + 2 * made
    if as_product:
        return whole + int(min(PARTIAL_SUMS * prod(weight), MOST_PARTIAL))
    return whole + padded + made
