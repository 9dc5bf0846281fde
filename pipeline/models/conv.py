"""A small convolutional classifier with batch norm, dropout and residual connections."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm_first = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.norm_second = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_first(self.first(x)))
        return F.relu(x + self.norm_second(self.second(y)))


class ConvNet(nn.Module):
    """Each block is followed by a halving of the image."""

    def __init__(self, channels: int, width: int, blocks: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(blocks))
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = F.max_pool2d(block(x), 2)
        return F.cross_entropy(self.out(self.dropout(x.mean((2, 3)))), labels)
