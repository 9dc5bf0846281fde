"""On which device and in which numbers a run computes: fp32 as the model has it, bf16 throughout, or amp (autocast)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.train.engines.engine import Batch


@dataclass(frozen=True)
class Precision:
    device: torch.device
    name: str

    def tensor(self, tensor: Tensor) -> Tensor:
        """On the device; floating numbers in bfloat16 where that is what is trained in."""
        half = self.name == "bf16" and tensor.is_floating_point()
        return tensor.to(self.device, torch.bfloat16 if half else None)

    def batch(self, batch: Batch) -> Batch:
        return {name: self.tensor(tensor) for name, tensor in batch.items()}

    def autocast(self, *, cache: bool = False) -> torch.autocast:
        """With its cache it would hold cast weights of recomputed regions until the end of the forward pass."""
        amp = self.name == "amp"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=amp, cache_enabled=cache)
