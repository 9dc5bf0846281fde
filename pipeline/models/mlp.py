"""A plain classifier: the smallest model worth planning."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, features: int, width: int, classes: int, depth: int) -> None:
        super().__init__()
        widths = [features, *([width] * depth)]
        self.hidden = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        self.out = nn.Linear(width, classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for layer in self.hidden:
            inputs = F.relu(layer(inputs))
        return F.cross_entropy(self.out(inputs), targets)


def build(**sizes: int) -> MLP:
    return MLP(**sizes)
