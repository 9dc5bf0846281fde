"""What local forms of ops ask of the mesh, by the name of an axis; no name is an axis of one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.runtime.mesh import axis_of


def position(axis: str) -> tuple[int, int]:
    """Which piece of a dim this rank holds, and of how many."""
    return (axis_of(axis).rank, axis_of(axis).size) if axis else (0, 1)


def own_range(whole: int, axis: str) -> tuple[int, int]:
    """Where this rank's piece of a dim of that size begins and how long it is."""
    rank, count = position(axis)
    return rank * (whole // count), whole // count


def combine(x: Tensor, axis: str, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum or the largest over the ranks, without gradient."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    if position(axis)[1] > 1:
        dist.all_reduce(total, op=how, group=axis_of(axis).group)
    return total
