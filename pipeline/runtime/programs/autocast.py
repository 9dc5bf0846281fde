"""What autocast would do to the arguments of an op, and an op without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwright.pipeline.ops.autocast import LOW


def as_autocast(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """As autocast would cast them inside the op of that name; any other op takes them as they are."""
    device = _device_of(arguments)
    if not torch.is_autocast_enabled(device) or name not in LOW:
        return arguments
    dtype = torch.get_autocast_dtype(device)
    return tuple(a.to(dtype) if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in arguments)


def without_autocast(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The function's result where the module has turned autocast off."""
    with torch.autocast(_device_of((arguments, named)), enabled=False):
        return function(*arguments, **named)


def _device_of(arguments: Any) -> str:
    return next((a.device.type for a in tree_leaves(arguments) if isinstance(a, Tensor)), "cpu")
