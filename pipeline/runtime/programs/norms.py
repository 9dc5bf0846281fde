"""Normalisation that keeps statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.runtime.programs.axes import position
from pipeline.runtime.programs.collectives import pieces_of_all, sum_of_all
from pipeline.runtime.recompute.regions import replaying
from pipeline.runtime.step.running_stats import collecting


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
    again: bool | None = None,
) -> Tensor:
    """Batch norm, whose running statistics change once a micro-batch, also where a recompute region runs it twice.

    `axis` is the one over which the batch is split: the statistics are those of the whole batch. Where a step collects
    statistics (pipeline/runtime/step/running_stats.py), the running ones are left to it. `again` is the second run of a
    region, for those who know.
    """
    again = replaying() if again is None else again
    if training and running_mean is not None and running_var is not None:
        if (collector := collecting()) is not None:
            running_mean, running_var = collector.scratch(running_mean, running_var, momentum, _count(x, axis))
            momentum = 1.0
        elif again:
            running_mean, running_var = running_mean.clone(), running_var.clone()  # these take the change
    if not training or not axis:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    result: Tensor
    result, mean, var = _BatchNorm.apply(x, weight, bias, eps, axis)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        count = _count(x, axis)
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    return result


def _count(x: Tensor, axis: str) -> int:
    """How many numbers of a channel there are on all ranks of the axis, or on this one."""
    return int(x.numel() // x.shape[1]) * (position(axis)[1] if axis else 1)


class _BatchNorm(torch.autograd.Function):
    """With the statistics of the batch of all ranks: one collective forward, of each rank's, and one backward.

    Both ways the kernel for given statistics does the work on whole tensors: it scales, and it adds up gradients of
    weight and bias, which are what the gradient of the statistics is made of. In the input's gradient

        dx = dy * a  -  a / n * (sum dy  +  (x - mean) / deviation * sum(dy * (x - mean) / deviation))

    with a = weight / deviation and sums over all ranks, the kernel has the first term; the others are a line in x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axis: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype  # of all but the images
        own = torch.stack(torch.batch_norm_update_stats(x.to(wide), None, None, 0.0))
        means, variances = pieces_of_all(own, axis).unbind(1)
        mean = means.mean(0)
        var = (variances + (means - mean).square()).mean(0)
        scale, shift = (None if given is None else given.to(wide) for given in (weight, bias))
        ctx.save_for_backward(x, scale, mean, var)
        ctx.eps, ctx.axis = eps, axis
        ctx.dtypes = [None if given is None else given.dtype for given in (weight, bias)]
        ctx.mark_non_differentiable(mean, var)
        return torch.native_batch_norm(x, scale, shift, mean, var, False, 0.0, eps)[0], mean, var

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, var = ctx.saved_tensors
        given = (gradients[0].contiguous(), x, weight, mean, var, None, None, False, ctx.eps, [True, True, True])
        of_x, *of_both = torch.ops.aten.native_batch_norm_backward(*given)
        products, sums = sum_of_all(torch.stack(of_both), ctx.axis) / _count(x, ctx.axis)
        deviation = (var + ctx.eps).sqrt()
        scale = 1 / deviation if weight is None else weight / deviation
        slope = -scale * products / deviation
        offset = -scale * sums - slope * mean
        shape = (1, -1, *(1,) * (x.dim() - 2))
        of_x.addcmul_(x, slope.to(x.dtype).view(shape)).add_(offset.to(x.dtype).view(shape))
        return of_x, *(g.to(d) if d else None for g, d in zip(of_both, ctx.dtypes, strict=True)), None, None
