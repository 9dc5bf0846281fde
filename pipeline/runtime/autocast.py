"""What autocast would do to the arguments of an op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.low_precision import LOW


def as_autocast(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """As autocast would cast them inside the op of that name; any other op takes them as they are."""
    device = next((a.device.type for a in arguments if isinstance(a, Tensor)), "cpu")
    if not torch.is_autocast_enabled(device) or name not in LOW:
        return arguments
    dtype = torch.get_autocast_dtype(device)
    return tuple(a.to(dtype) if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in arguments)
