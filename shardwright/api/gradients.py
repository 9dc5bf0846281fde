"""Gradients of which a rank has a shard, so that functions of torch that ask for all of them are right or refused.

Between backward and the optimizer's step `.grad` of what the plan splits is one of these, on the same memory:

| the gradient                           | `.grad`             | norms   | GradScaler          | else          |
|----------------------------------------|---------------------|---------|---------------------|---------------|
| is whole                               | a plain tensor      | right   | right               | right         |
| lies in shards                         | `ShardGradient`     | refused | all ranks are asked | of this shard |
| lies with the optimizer's shard (ZeRO) | `GradientElsewhere` | refused | not asked for       | refused       |

The optimizer itself, and what sums and clips gradients here, work on plain tensors: its parameters keep their type
too, by which torch chooses optimizers of one kernel for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.pipeline.base.errors import TrainError

NORMS = (
    torch.linalg.vector_norm,
    torch._foreach_norm,
    torch.linalg.norm,
    torch.linalg.matrix_norm,
    torch.norm,
    Tensor.norm,
)
UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_  # gradients, whether one is not finite, a factor


class ShardGradient(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NORMS:
            what = "the plan splits this gradient over the ranks, and a norm of one rank's shard is none of the model's"
            raise TrainError(what, where="a norm of gradients", remedy="call model.clip_grad_norm_, which returns it")
        found = super().__torch_function__(func, types, args, kwargs)
        if func is UNSCALE:  # a step is skipped by all ranks or by none
            dist.all_reduce(args[1], dist.ReduceOp.MAX)
        return found


class GradientElsewhere(ShardGradient):
    """Of a parameter that the optimizer updates in shards: it has the parameter's shape, and no values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NORMS or getattr(func, "__name__", "") == "__get__":  # its shape and the like
            return super().__torch_function__(func, types, args, kwargs)
        what = "this gradient lies in shards, and this rank's is with the optimizer"
        remedy = "take the parameters of optimizer.param_groups; to clip by the norm call model.clip_grad_norm_"
        raise TrainError(what, where="the gradient of a parameter of the model", remedy=remedy)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "GradientElsewhere()"


class SplitGradients:
    """Of the parameters whose gradient is in shards: marked after backward, plain again before they are used.

    `rows`: for each parameter of the program the one that the optimizer updates, and in how many shards its state is.
    """

    def __init__(self, rows: Iterable[tuple[nn.Parameter, nn.Parameter, int]]) -> None:
        split = [(own, updated) for own, updated, shards in rows if shards > 1]
        self.updated = [updated for _, updated in split]
        self.bare = [(own, _elsewhere(own)) for own, updated in split if own is not updated]

    def mark(self) -> None:
        for parameter in self.updated:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.as_subclass(ShardGradient)
        for parameter, none in self.bare:
            parameter.grad = none

    def unmark(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.updated:
                if isinstance(parameter.grad, ShardGradient):
                    parameter.grad = parameter.grad.as_subclass(Tensor)
        for parameter, _ in self.bare:
            parameter.grad = None


def _elsewhere(parameter: Tensor) -> Tensor:
    """One number in memory, whatever the shape."""
    return parameter.new_zeros(()).expand(parameter.shape).as_subclass(GradientElsewhere)
