"""Regions whose activations are dropped after the forward pass and computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recompute(region: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Runs the region; regions may be nested."""
    result: Tensor = checkpoint(region, *arguments, use_reentrant=False)
    return result
