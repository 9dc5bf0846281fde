"""Losses whose batch or whose classes are split.

Over a split batch each rank returns its summand of the loss of the whole batch. Over split classes (Megatron's
parallel loss) the logits are never gathered: the ranks exchange one largest logit, one sum of exponentials and one
target's logit for each row, and every rank returns the whole loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pipeline.runtime.programs.axes import combine, combining, position
from pipeline.runtime.programs.collectives import all_reduce
from pipeline.runtime.programs.uneven import own_part

_counting: Any = WeakTensorKeyDictionary()  # target -> axis, ignored index, and the count that is under way


def count_targets(target: Tensor, axis: str, ignore_index: int = -100) -> None:
    """Begins to sum over the ranks what the loss of these targets divides by: it is there by the time of the loss."""
    _counting[target] = axis, ignore_index, combining(_weight_of(target, None, ignore_index), axis)


def _count(target: Tensor, axis: str, weight: Tensor | None, ignore_index: int) -> Callable[[], Tensor]:
    *begun, count = _counting.get(target, (None,))
    if weight is None and begun == [axis, ignore_index]:
        return count  # type: ignore[no-any-return]
    return combining(_weight_of(target, weight, ignore_index), axis)


def mean_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: str,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Divides by the count of valid targets of all ranks: a mean of means is wrong where the counts differ."""
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    count = _count(target, axis, weight, ignore_index)
    loss = F.cross_entropy(logits, target, weight, reduction="sum", **options)  # type: ignore[arg-type]
    return loss / count().to(logits.dtype)


def _weight_of(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What the mean divides by: the valid targets, or their classes' weights; exact, whatever the logits' type."""
    if target.is_floating_point():  # probabilities: the mean counts rows
        return torch.tensor(target.numel() // target.shape[1], dtype=torch.float64, device=target.device)
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(torch.float64)
    return weight.to(torch.float64)[target.where(valid, 0)].where(valid, 0.0).sum()


def mean_of_pieces(mean: Tensor, axis: str) -> Tensor:
    """A mean over this rank's piece as its summand of the mean over all pieces, which are of equal size."""
    return mean / position(axis)[1]


class _Hidden(torch.autograd.Function):
    """What lies behind the first columns as the least number there is, where it lies: its exponential is zero.

    So is its gradient then, and what comes back is passed on as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int) -> Tensor:
        x[:, columns:] = torch.finfo(x.dtype).min
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _without_padding(x: Tensor, columns: int) -> Tensor:
    """`x` is no tensor that anything else keeps."""
    hidden: Tensor = x if x.shape[1] == columns else _Hidden.apply(x, columns)  # type: ignore[no-untyped-call]
    return hidden


def class_split_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: str,
    rows: str = "",
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    classes: int | None = None,
) -> Tensor:
    """Cross entropy of logits whose classes (dim 1) lie on `axis`; target and class weights are whole.

    `rows` is an axis over which the batch is split too, for the mean. `classes` says how many there are where they do
    not divide: behind the last rank's own is padding, which counts for nothing.
    """
    classes = logits.shape[1] * position(axis)[1] if classes is None else classes
    first, own = own_part(classes, *position(axis))
    valid = target != ignore_index
    largest = combine(logits.detach()[:, :own].amax(1), axis, dist.ReduceOp.MAX)
    shifted = _without_padding(logits - largest.unsqueeze(1), own)
    log_sum = all_reduce(shifted.exp().sum(1), axis).log()
    place = target.where(valid, 0) - first
    mine = (place >= 0) & (place < own) & valid
    picked = shifted.gather(1, place.where(mine, 0).unsqueeze(1)).squeeze(1).where(mine, 0.0)
    scale = 1.0 if weight is None else weight[target.where(valid, 0)]
    loss = (log_sum - all_reduce(picked, axis)) * scale
    if label_smoothing:
        owned = logits.new_ones(own) if weight is None else weight[first : first + own]
        every = torch.tensordot(shifted[:, :own], owned, dims=([1], [0]))
        total = float(classes) if weight is None else weight.sum()
        smooth = (log_sum * total - all_reduce(every, axis)) / classes
        loss = loss * (1 - label_smoothing) + smooth * label_smoothing
    loss = loss.where(valid, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / _count(target, rows, weight, ignore_index)().to(logits.dtype)
