"""A model, its batch and plans of it that take a second."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw

BATCH = {
    "x": torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float(),
    "y": torch.arange(8) % 4,
}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(self.mid(self.up(x).relu()).relu()), y)


def planned(model: Any = None, batch: Any = None, cluster: Any = "preset_cpu", **more: Any) -> sw.ModelPlan:
    model = Classifier() if model is None else model
    return sw.plan(model, BATCH if batch is None else batch, cluster, **{"frontier_points": 2, **more})
