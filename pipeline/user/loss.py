"""Where the loss is in what a user's module returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardwright.pipeline.base.errors import TraceError


def pick_loss(output: Any) -> Tensor:
    """The loss in what a module returns: the tensor itself, the entry `loss`, or the first of a tuple."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif hasattr(output, "loss"):
        output = output.loss
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or output.numel() != 1 or not output.is_floating_point():
        found = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise TraceError(
            f"the model's output holds no scalar loss (found {found})",
            where="conf/model: module",
            remedy="return the loss as a scalar tensor, as the entry 'loss', or first in a tuple",
        )
    return output
