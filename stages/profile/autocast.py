"""Autocast as CUDA does it, spelled out: which ops run in the low precision, which in float32, which in the widest.

The lists are those of torch's documentation of autocast op eligibility.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pipeline.low_precision import LOW
from stages.profile import recurrent


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


FULL = _names(
    "acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist cosine_similarity cumprod cumsum dist",
    "erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log_softmax log1p log2",
    "margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss norm normalize pdist",
    "poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum",
    "renorm tan triplet_margin_loss",
)
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot cat stack")


class Autocast:
    """Casts an op's tensors as autocast would: of a parameter once, of anything else each time it is read.

    A parameter is, to autocast, a leaf that wants a gradient.
    """

    def __init__(self, low: torch.dtype = torch.bfloat16) -> None:
        self.low = low
        self.cache: dict[int, Tensor] = {}

    def arguments(self, target: str, args: Any) -> Any:
        kind = target.split(".")[1]
        if kind in LOW:
            return tree_map(lambda a: self._cast(a, self.low), args)
        if kind in FULL:
            return tree_map(lambda a: self._cast(a, torch.float32), args)
        if kind in WIDEST:
            found = [a.dtype for a in torch.utils._pytree.tree_leaves(args) if _is_float(a)]
            widest = torch.float32 if torch.float32 in found else self.low
            return tree_map(lambda a: self._cast(a, widest), args)
        return args

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not _is_float(value) or value.dtype in (dtype, torch.float64):
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


# Composites of which autocast sees the parts: op -> what runs instead.
COMPOSITES = {"aten.cross_entropy_loss.default": _cross_entropy, **recurrent.AUTOCAST}


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
