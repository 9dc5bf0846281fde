"""Normalisation that keeps statistics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.runtime.axes import position
from pipeline.runtime.collectives import all_reduce_both
from pipeline.runtime.deferred import collecting
from pipeline.runtime.recompute import replaying


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    axis: str = "",
) -> Tensor:
    """Batch norm, whose running statistics change once a micro-batch, also where a recompute region runs it twice.

    `axis` is the one over which the batch is split: the statistics are those of the whole batch. Where a step collects
    statistics (pipeline/runtime/deferred.py), the running ones are left to it.
    """
    if training and running_mean is not None and running_var is not None:
        if (collector := collecting()) is not None:
            running_mean, running_var = collector.scratch(running_mean, running_var, momentum, _count(x, axis))
            momentum = 1.0
        elif replaying():
            running_mean, running_var = running_mean.clone(), running_var.clone()  # these take the change
    if not training or not axis:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    mean, var, count = _statistics(x, axis)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    scale = (var + eps).rsqrt() if weight is None else (var + eps).rsqrt() * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return x * scale.view(shape) + shift.view(shape)


def _statistics(x: Tensor, axis: str) -> tuple[Tensor, Tensor, int]:
    """Mean and variance of every channel over all ranks, and how many numbers they are taken from.

    `P -> B`: each rank reads the whole statistics for its own piece, so their gradient is partial.
    """
    dims = [d for d in range(x.dim()) if d != 1]
    count = _count(x, axis)
    mean = all_reduce_both(x.sum(dims), axis) / count
    centred = x - mean.view(1, -1, *(1,) * (x.dim() - 2))
    return mean, all_reduce_both(centred.square().sum(dims), axis) / count, count


def _count(x: Tensor, axis: str) -> int:
    """The numbers of a channel, over all ranks of the axis."""
    return int(x.numel() // x.shape[1]) * (position(axis)[1] if axis else 1)
