"""Recurrent layers on a device: FLOPs to the last product, and what they keep for backward as measured."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.tracing.build import fake_mode, to_fake
from shardwright.pipeline.tracing.chain import find_chain
from shardwright.pipeline.tracing.export import export_loss
from shardwright.pipeline.tracing.lower import lower
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.profile.costs import op_costs
from shardwright.stages.profile.step import profile_step

STEPS, BATCH, GIVEN, HIDDEN = 32, 8, 64, 96
CASES = {
    "lstm": (nn.LSTM, {}),
    "two layers, two directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "projected": (nn.LSTM, {"proj_size": 32}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
}
# On an H200, torch 2.11: what cuDNN keeps of float32 beside the weights, which lie apart in a program and are copied.
ON_CUDA = {"lstm": 661_760, "projected": 725_248, "gru": 756_992, "rnn": 265_472}


class Summed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(GIVEN, GIVEN, bias=False), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.first(x))[0].sum()


def build(name: str) -> Summed:
    layer, options = CASES[name]
    torch.manual_seed(0)
    return Summed(layer(GIVEN, HIDDEN, **options))


@cache
def graph_of(name: str) -> OpGraph:
    mode = fake_mode()
    model = to_fake(build(name), mode).train()
    with mode:
        batch = {"x": torch.empty(STEPS, BATCH, GIVEN)}
    return find_chain(lower(export_loss(model, batch), model, ("x",)))


def costs(name: str, device: str):
    """Of the layer by the table and as run, and the bytes of activations that it then keeps."""
    graph = graph_of(name)
    op = next(op for op in graph.ops if op.target.endswith(".input"))
    table, run = profile_graph(graph).ops[op.name], op_costs(graph, profile_step(graph, device, "native"))[op.name]
    kept = [graph.values[n] for n in run.saves]
    return table, run, run.extra_saved + sum(v.type.nbytes for v in kept if v.role is Role.RESULT)


def measured(name: str) -> int:
    model = build(name)
    given = model.first(torch.randn(STEPS, BATCH, GIVEN))
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model.layer(given)
    assert result
    return sum(size for place, size in kept.items() if place not in known)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("onednn", [True, False], ids=["onednn", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_products_are_counted_and_memory_is_what_torch_keeps(monkeypatch, name: str, onednn: bool) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", onednn)
    table, run, kept = costs(name, "cpu")
    matrices = sum(p.numel() for p in build(name).layer.parameters() if p.dim() == 2)
    flops = 2.0 * STEPS * BATCH * matrices
    assert (run.flops_forward, run.flops_backward) == (table.flops_forward, table.flops_backward) == (flops, 2 * flops)
    assert kept == pytest.approx(measured(name), rel=0.05)


@pytest.mark.parametrize("name", ON_CUDA)
def test_memory_on_a_gpu_is_what_was_measured(name: str) -> None:
    _, _, kept = costs(name, "cuda")
    weights = sum(p.numel() * p.element_size() for p in build(name).layer.parameters())
    assert kept == pytest.approx(ON_CUDA[name] + weights, rel=0.02)
