"""How much an optimizer keeps for each parameter: found by one step of the real one on a tiny parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import SolveError
from pipeline.instantiate import instantiate


def optimizer_copies(settings: Mapping[str, Any], where: str) -> float:
    """State tensors of the parameter's own size, counted in copies of the parameter."""
    import torch

    parameter = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = instantiate(settings, where, [parameter])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SolveError(f"{settings['_target_']} is not a torch.optim.Optimizer", where=where, remedy="name one")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [t for t in optimizer.state.get(parameter, {}).values() if isinstance(t, torch.Tensor)]
    return sum(t.numel() for t in state if t.numel() > 1) / parameter.numel()
