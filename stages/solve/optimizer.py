"""How much an optimizer keeps for each parameter: found by one step of the real one on a tiny parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.optimizer import try_optimizer


def optimizer_copies(settings: Mapping[str, Any], where: str, device: str = "cpu") -> float:
    """State tensors of the parameter's own size, counted in copies of the parameter."""
    import torch

    optimizer, parameter = try_optimizer(settings, where, device)
    state = [t for t in optimizer.state.get(parameter, {}).values() if isinstance(t, torch.Tensor)]
    return sum(t.numel() for t in state if t.numel() > 1) / parameter.numel()
