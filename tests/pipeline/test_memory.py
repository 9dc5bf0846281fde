"""The peak of a piece of work, with nothing held for it that the work itself lets go of."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from pipeline.runtime.step.memory import measure_peak


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_old_gradients_are_gone_while_new_ones_are_made(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step lets go of them first, and they must not be there because their peak is measured."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    layer = nn.Linear(64, 64, bias=False)
    layer.weight.grad = torch.zeros(64, 64)
    old = weakref.ref(layer.weight.grad)

    def step() -> None:
        layer.weight.grad = None
        assert old() is None
        layer.weight.grad = torch.ones(64, 64)

    def resident() -> list[torch.Tensor]:
        return [layer.weight, *([] if layer.weight.grad is None else [layer.weight.grad])]

    peak = measure_peak(step, resident, torch.device(device))
    assert device == "cuda" or peak == 2 * 64 * 64 * 4
