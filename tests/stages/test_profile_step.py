"""The step on tensors without memory holds what the real step holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.models.gpt import GPT
from pipeline.models.mlp import MLP
from pipeline.runtime.memory import measure_peak
from stages.profile.step import profile_step
from stages.profile.symbolic import ALLOCATION, rounded
from tests.graphs import trace


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, 10)

    def forward(self, images, labels):
        x = torch.relu(self.norm(self.first(images)))
        x = (x[:, :, 1:-1, 1:-1] + self.second(x)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(x), labels)


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {name: torch.randint(500, (batch, length)) for name in ("input_ids", "labels")}


CASES = {
    "gpt": lambda: (GPT(vocab_size=500, context=64, width=64, layers=3, heads=4), tokens(8, 64)),
    "tied": lambda: (GPT(vocab_size=500, context=64, width=64, layers=2, heads=4, tie=True), tokens(8, 64)),
    "mlp": lambda: (MLP(64, 256, 10, 4), {"inputs": torch.randn(256, 64), "targets": torch.randint(10, (256,))}),
    "images": lambda: (Images(), {"images": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))}),
}


def real_peak(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that one forward and backward pass of the real model adds, gradients included."""
    held = [*model.parameters(), *model.buffers(), *batch.values()]
    before = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    return measure_peak(lambda: model(**batch).backward(), held, torch.device("cpu")) - before


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_the_real_step(name):
    model, batch = CASES[name]()
    found = profile_step(trace(model, batch), "cpu", "native").memory
    ours = found.backward_peak - found.resident
    # Convolutions on CPU work on reordered copies, which the meta device does not make.
    assert ours == pytest.approx(real_peak(model, batch), rel=0.2 if name == "images" else 0.05)


def test_gradients_are_left_after_backward():
    model, batch = CASES["tied"]()
    found = profile_step(trace(model, batch), "cpu", "native").memory
    gradients = sum(rounded(p.numel() * 4) for p in model.parameters())
    assert found.after_backward - found.resident == pytest.approx(gradients, abs=4 * ALLOCATION)


def test_a_deep_model_runs_no_more_kernels_than_a_shallow_one():
    """Equal links are run once, however many there are; what they hold is counted every time."""
    shallow, deep = (
        profile_step(trace(GPT(500, 64, 64, layers, 4), tokens(4, 64)), "cpu", "native") for layers in (2, 8)
    )
    assert len({id(link) for link in deep.runs}) == len({id(link) for link in shallow.runs})
    grown = deep.memory.after_forward - deep.memory.resident
    assert grown > 2 * (shallow.memory.after_forward - shallow.memory.resident)


def test_half_precision_and_autocast_hold_less_on_a_gpu():
    model, batch = CASES["gpt"]()
    graph = trace(model, batch)
    full, mixed = (profile_step(graph, "cuda", precision).memory for precision in ("native", "amp"))
    assert mixed.after_forward < full.after_forward and mixed.resident == full.resident


class Loss(nn.Module):
    """A loss with all its arguments, some by position."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)
        self.register_buffer("weight", torch.ones(6))

    def forward(self, x, y):
        loss = torch.ops.aten.cross_entropy_loss(self.layer(x), y, self.weight)
        return loss + nn.functional.cross_entropy(self.layer(x), y, ignore_index=2, label_smoothing=0.1)


def test_under_autocast_the_likelihood_runs_in_float32():
    graph = trace(Loss(), {"x": torch.randn(64, 8), "y": torch.randint(6, (64,))})
    kernels = [k for link in profile_step(graph, "cuda", "amp").runs for k in link.forward]
    assert [k.dtype for k in kernels if "_log_softmax" in k.name] == ["bfloat16", "bfloat16"]
    assert [k.dtype for k in kernels if "nll_loss" in k.name] == ["float32", "float32"]


def test_attention_on_a_gpu_keeps_no_matrix_of_scores():
    model = GPT(vocab_size=100, context=512, width=32, layers=1, heads=4)
    graph = trace(model, {name: torch.randint(100, (1, 512)) for name in ("input_ids", "labels")})
    kernels = [k.name for link in profile_step(graph, "cuda", "native").runs for k in link.forward]
    assert any("efficient_attention" in name for name in kernels) and not any("softmax.int" in n for n in kernels)
