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
    """Flash attention where it can run: half precision and no mask, also with grouped heads; else the efficient one."""
    if attn_mask is None and q.dtype in (torch.bfloat16, torch.float16):
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:  # the memory-efficient kernel cannot: attention falls back to plain matrix products
        found = aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )
        return found[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(attn_mask.logical_not(), float("-inf"))
        attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    grad = q.requires_grad or k.requires_grad or v.requires_grad
    found = aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, grad, dropout_p, is_causal, scale=scale)
    return found[0]


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
    if training and weight is not None and x.dim() <= 5:
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
    if dropout_p or q.dim() != 4 or enable_gqa or (attn_mask is not None and attn_mask.requires_grad):
        found = aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return found[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(attn_mask.logical_not(), float("-inf"))
    found = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return found[0]


LOWERED = {  # device -> op -> what it runs instead
    "cuda": _CUDA,
    "cpu": {"aten.scaled_dot_product_attention.default": _attention_on_cpu},
}
