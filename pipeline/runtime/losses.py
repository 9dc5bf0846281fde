"""Means over a batch that is split: each rank returns its summand of the mean over the whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipeline.runtime.mesh import axis_of


def mean_cross_entropy(
    logits: Tensor, target: Tensor, axis: str, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Divides by the count of valid targets of all ranks: a mean of means is wrong where the counts differ."""
    group = axis_of(axis)
    valid = (target != ignore_index).sum().to(torch.float64)  # exact, whatever the logits' type
    if group.size > 1:
        dist.all_reduce(valid, group=group.group)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return F.cross_entropy(logits, target, reduction="sum", **options) / valid.to(logits.dtype)  # type: ignore[arg-type]


def mean_of_pieces(mean: Tensor, axis: str) -> Tensor:
    """A mean over this rank's piece as its summand of the mean over all pieces, which are of equal size."""
    return mean / axis_of(axis).size
