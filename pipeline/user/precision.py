"""The type in which a model's weights and its floating inputs are, where `precision` of conf/model gives them one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

TYPES = {"bf16": torch.bfloat16}  # the others leave them as the model has them


def type_of(tensor: Tensor, precision: str) -> torch.dtype:
    """That of a weight, a buffer or an input in this precision."""
    return TYPES.get(precision, tensor.dtype) if tensor.is_floating_point() else tensor.dtype


def in_precision(module: nn.Module, precision: str) -> nn.Module:
    """Its floating parameters and buffers converted; complex ones stay, of which `to` would take the real parts."""
    return module._apply(lambda tensor: tensor.to(type_of(tensor, precision)))
