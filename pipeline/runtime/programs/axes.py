"""What local forms of ops ask of the mesh, by the name of an axis; no name is an axis of one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.runtime.programs.mesh import axis_of


def position(axis: str) -> tuple[int, int]:
    """Which piece of a dim this rank holds, and of how many."""
    return (axis_of(axis).rank, axis_of(axis).size) if axis else (0, 1)


def own_range(whole: int, axis: str) -> tuple[int, int]:
    """Where this rank's piece of a dim of that size begins and how long it is."""
    rank, count = position(axis)
    return rank * (whole // count), whole // count


def combine(x: Tensor, axis: str, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum or the largest over the ranks, without gradient."""
    return combining(x, axis, how)()


def combining(x: Tensor, axis: str, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Callable[[], Tensor]:
    """The same, under way until it is called."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    if position(axis)[1] == 1:
        return lambda: total
    work = dist.all_reduce(total, op=how, group=axis_of(axis).group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return total

    return finish
