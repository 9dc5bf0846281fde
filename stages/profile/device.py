"""The ops that a device really runs where the graph has a composite: what differs from device to device stands here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(x, p, train)[0] if train and p else x


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention where it can run: half precision and no mask, also with grouped heads; else the efficient one.

    The efficient one takes neither grouped heads nor a mask whose last dim does not lie together in memory (a bias that
    was permuted): then attention is plain matrix products.
    """
    if attn_mask is None and q.dtype in (torch.bfloat16, torch.float16):
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa or (attn_mask is not None and attn_mask.stride(-1) != 1):
        return _plain_attention(q, k, v, attn_mask, dropout_p, is_causal, scale)
    if attn_mask is not None:
        attn_mask = _additive(attn_mask, q.dtype).expand(*q.shape[:-1], k.shape[-2])
    grad = q.requires_grad or k.requires_grad or v.requires_grad
    found = aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, grad, dropout_p, is_causal, scale=scale)
    return found[0]


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """`_scaled_dot_product_attention_math` as a GPU runs it: half precision is computed in float32."""
    dtype = q.dtype
    if dtype in (torch.bfloat16, torch.float16):
        q, k, v = q.float(), k.float(), v.float()
    root = (scale or q.shape[-1] ** -0.5) ** 0.5
    q = q * root
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if (groups := q.shape[-3] // k.shape[-3]) > 1:
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    scores = q @ (k.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(_additive(mask, q.dtype))
    return (_dropout(aten._safe_softmax(scores, -1), dropout_p, True) @ v).to(dtype)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _batch_norm(
    x: Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool = True,
) -> Tensor:
    if training and weight is not None and x.dim() <= 5 and x.dtype != torch.bfloat16:
        return aten.cudnn_batch_norm(x, weight, bias, mean, var, True, momentum, eps)[0]
    return aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)[0]


_CUDA: dict[str, Callable[..., Any]] = {
    "aten.dropout.default": _dropout,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.batch_norm.default": _batch_norm,
}


def _attention_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention where it can run: four dims and no dropout; else plain matrix products."""
    mask = None if attn_mask is None else _additive(attn_mask, q.dtype)
    if dropout_p or q.dim() != 4 or enable_gqa or (mask is not None and mask.requires_grad):
        found = aten._scaled_dot_product_attention_math(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return found[0]
    found = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)
    return found[0]


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


_ANY = {"transformers.grouped_mm_fallback.default": _grouped_product}

LOWERED = {  # device -> op -> what it runs instead
    "cuda": _CUDA | _ANY,
    "cpu": _ANY | {"aten.scaled_dot_product_attention.default": _attention_on_cpu},
}
