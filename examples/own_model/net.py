"""A model and a data set of one's own: plain PyTorch that imports nothing of Shardwright.

`forward` takes the tensors of one step by name and returns the loss: as a scalar tensor, as the entry `loss` of a
mapping, or first in a tuple. The data set gives one sample at a time, by the same names, without the batch dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class WaveClassifier(nn.Module):
    """Tells which of several kinds of wave a stretch of signal is."""

    def __init__(self, length: int, width: int, blocks: int, kinds: int) -> None:
        super().__init__()
        self.read = nn.Linear(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.tell = nn.Linear(width, kinds)

    def forward(self, signal: Tensor, kind: Tensor) -> dict[str, Tensor]:
        x = self.read(signal)
        for block in self.blocks:
            x = block(x)
        logits = self.tell(x)
        return {"loss": F.cross_entropy(logits, kind), "logits": logits}


class Waves(Dataset[dict[str, Tensor]]):
    """Sines, one frequency a kind, each with a phase and noise of its own."""

    def __init__(self, length: int, kinds: int, samples: int) -> None:
        self.length, self.kinds, self.samples = length, kinds, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)  # any process can make any sample
        kind = index % self.kinds
        phase = 2 * math.pi * torch.rand(1, generator=generator)
        time = torch.arange(self.length) / self.length
        noise = 0.3 * torch.randn(self.length, generator=generator)
        return {"signal": torch.sin(2 * math.pi * (kind + 1) * time + phase) + noise, "kind": torch.tensor(kind)}
