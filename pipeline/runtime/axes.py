"""What local forms of ops ask of the mesh: one axis by name, or several that split the same dim, outermost first."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.runtime.collectives import all_reduce, all_reduce_both
from pipeline.runtime.mesh import axis_of

AxisNames = str | tuple[str, ...]


def each(axis: AxisNames) -> tuple[str, ...]:
    """The axes one by one; none for an empty name."""
    return tuple(name for name in ((axis,) if isinstance(axis, str) else axis) if name)


def position(axis: AxisNames) -> tuple[int, int]:
    """Which piece of a dim this rank holds, and of how many."""
    rank, count = 0, 1
    for name in each(axis):
        rank, count = rank * axis_of(name).size + axis_of(name).rank, count * axis_of(name).size
    return rank, count


def own_range(whole: int, axis: AxisNames) -> tuple[int, int]:
    """Where this rank's piece of a dim of that size begins and how long it is."""
    rank, count = position(axis)
    return rank * (whole // count), whole // count


def combine(x: Tensor, axis: AxisNames, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum or the largest over the ranks, without gradient."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    for name in each(axis):
        if axis_of(name).size > 1:
            dist.all_reduce(total, op=how, group=axis_of(name).group)
    return total


def summed(x: Tensor, axis: AxisNames) -> Tensor:
    """P -> R on each of the axes."""
    for name in each(axis):
        x = all_reduce(x, axis=name)
    return x


def summed_both(x: Tensor, axis: AxisNames) -> Tensor:
    """P -> B on each of the axes."""
    for name in each(axis):
        x = all_reduce_both(x, axis=name)
    return x
