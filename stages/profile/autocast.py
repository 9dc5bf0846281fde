"""Autocast as the device does it, spelled out: its casts are kernels, and what they make is memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.pipeline.ops.autocast import Policy, policy_of
from shardwright.stages.profile import recurrent


class Autocast:
    """Casts an op's tensors as autocast would: of a parameter once, of anything else each time it is read.

    A parameter is, to autocast, a leaf that wants a gradient.
    """

    def __init__(self, device: str = "cuda") -> None:
        self.device, self.low = device, torch.bfloat16
        self.composites = COMPOSITES if device == "cuda" else {}
        self.cache: dict[int, Tensor] = {}

    def arguments(self, target: str, args: Any) -> Any:
        leaves = tree_leaves(args)
        policy = policy_of(target, self.device, typed=any(isinstance(a, torch.dtype) for a in leaves))
        if policy is Policy.LOW or (self.device == "cpu" and target in recurrent.AUTOCAST):
            dtype = self.low
        elif policy in (Policy.FULL, Policy.WIDEST):
            wide = policy is Policy.FULL or any(isinstance(a, Tensor) and a.dtype == torch.float32 for a in leaves)
            dtype = torch.float32 if wide else self.low
        else:
            return args
        return tree_map(lambda a: self._cast(a, dtype), args)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        if not floats or value.dtype in (dtype, torch.float64):
            return value
        if value.is_leaf and value.requires_grad and dtype == self.low:
            if id(value) not in self.cache:
                self.cache[id(value)] = value.to(dtype)
            return self.cache[id(value)]
        return value.to(dtype)


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Not cast as a whole: log-softmax runs in the logits' own precision, the likelihood in float32."""
    log = torch.log_softmax(logits, 1).float()
    result: Tensor = torch.ops.aten.nll_loss_nd(log, target, weight, reduction, ignore_index)
    return result - label_smoothing * log.mean() if label_smoothing else result


# Composites of which autocast sees the parts on a GPU: op -> what runs instead.
COMPOSITES = {"aten.cross_entropy_loss.default": _cross_entropy, **recurrent.AUTOCAST}
