"""Modules whose activations are read far from where they are written; sizes divide by 2 and by 3."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH, SAMPLES = 12, 6, 6


class Ladder(nn.Module):
    """Rungs from each layer of the way down to its counterpart on the way up; all layers are of one size."""

    def __init__(self, rungs: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(rungs))
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(rungs))
        self.dropout = dropout

    def forward(self, inputs: Tensor) -> Tensor:
        y, skips = inputs, []
        for layer in self.down:
            y = torch.tanh(layer(y))
            skips.append(y)
            y = F.dropout(y, self.dropout)
        for layer in self.up:
            y = F.dropout(torch.tanh(layer(y)), self.dropout) + skips.pop()
        return F.mse_loss(y, inputs)


class Layer(nn.Module):
    """Attention to a memory, with a bias; where the gate is closed the layer's input passes instead."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = dropout

    def forward(self, y: Tensor, memory: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
        scores = self.query(y) @ memory.transpose(1, 2) + bias
        found = torch.softmax(scores, 2) @ self.value(memory)
        return y + F.dropout(self.out(torch.where(gate, found, y)), self.dropout)


class Shared(nn.Module):
    """Every layer reads the memory, a bias made of a parameter, and a gate, through which no gradient flows."""

    def __init__(self, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder, self.start = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.rand(LENGTH, LENGTH))
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))

    def forward(self, inputs: Tensor) -> Tensor:
        memory = torch.tanh(self.encoder(inputs))
        bias, gate = self.table.exp(), memory > 0
        y = self.start(inputs)
        for layer in self.layers:
            y = layer(y, memory, bias, gate)
        return F.mse_loss(y, inputs)


class UNet(nn.Module):
    """Two convolutions per level, halved and doubled between them, the level's skip put beside what comes up."""

    def __init__(self, levels: int = 3, channels: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 1)
        self.down = nn.ModuleList(self._level(channels, channels) for _ in range(levels))
        self.bottom = self._level(channels, channels)
        self.widen = nn.ModuleList(nn.ConvTranspose2d(channels, channels, 2, 2) for _ in range(levels))
        self.up = nn.ModuleList(self._level(2 * channels, channels) for _ in range(levels))
        self.last = nn.Conv2d(channels, 1, 1)

    @staticmethod
    def _level(inside: int, outside: int) -> nn.Module:
        first, second = nn.Conv2d(inside, outside, 3, padding=1), nn.Conv2d(outside, outside, 3, padding=1)
        return nn.Sequential(first, nn.BatchNorm2d(outside), nn.ReLU(), second, nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        y, skips = self.first(images), []
        for level in self.down:
            y = level(y)
            skips.append(y)
            y = F.max_pool2d(y, 2)
        y = self.bottom(y)
        for widen, level in zip(self.widen, self.up, strict=True):
            y = level(torch.cat((skips.pop(), widen(y)), 1))
        return F.mse_loss(self.last(y), images)


def sequences() -> dict[str, Tensor]:
    return {"inputs": torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))}


def images(side: int = 24) -> dict[str, Tensor]:
    return {"images": torch.randn(SAMPLES, 1, side, side, generator=torch.Generator().manual_seed(1))}
