"""Costs by the op table against hand formulas, and against what autograd really keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.profile import OpCost
from shardwright.stages.profile.by_table import find_storage, profile_graph
from tests.graphs import gpt, gpt_batch, gpt_graph, mlp, mlp_batch, mlp_graph, trace

B, T, W, H, V = 4, 8, 16, 2, 40  # batch, length, width, heads, vocabulary of the tests' GPT


def costs(graph: OpGraph, target: str, module: str | None = None) -> list[OpCost]:
    profile = profile_graph(graph)
    return [
        profile.ops[op.name]
        for op in graph.ops
        if op.target.split(".")[1] == target and (module is None or op.module == module)
    ]


class Net(nn.Module):
    """A layer before and a mean after a function of one's choosing."""

    def __init__(self, function, width=6):
        super().__init__()
        self.linear, self.function = nn.Linear(6, width), function

    def forward(self, x):
        return self.function(self.linear(x)).mean()


def net(function, shape=(4, 5, 6), width=6) -> tuple[OpGraph, Net, dict[str, torch.Tensor]]:
    model = Net(function, width)
    batch = {"x": torch.randn(*shape)}
    return trace(model, batch), model, batch


# -------------------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize(
    ("module", "inside", "outside"),
    [("layers.0.attention.query", W, W), ("layers.1.up", W, 4 * W), ("layers.1.down", 4 * W, W), ("head", W, V)],
)
def test_flops_of_a_linear_layer(module, inside, outside):
    (cost,) = costs(gpt_graph(), "linear", module)
    assert cost.flops_forward == 2 * B * T * inside * outside
    assert cost.flops_backward == 2 * cost.flops_forward
    elements = B * T * inside + inside * outside + B * T * outside + (outside if module != "head" else 0)
    assert cost.bytes_forward == 4 * elements


def test_flops_of_causal_attention():
    for cost in costs(gpt_graph(), "scaled_dot_product_attention"):
        assert cost.flops_forward == 0.5 * 2 * 2 * B * T * T * W  # half of: scores and weighted sum, 2 B T T W each
        assert cost.flops_backward == 2.5 * cost.flops_forward
        assert cost.extra_saved == 4 * B * H * T


def test_flops_of_full_attention_with_longer_keys():
    def attend(x):
        keys = torch.cat([x, x], 1)
        return F.scaled_dot_product_attention(x.unsqueeze(1), keys.unsqueeze(1), keys.unsqueeze(1))

    (cost,) = costs(net(attend)[0], "scaled_dot_product_attention")
    assert cost.flops_forward == 4 * 4 * 5 * 10 * 6


def test_flops_of_products():
    (cost,) = costs(net(lambda x: x @ x.transpose(1, 2))[0], "matmul")
    assert cost.flops_forward == 2 * 4 * 5 * 5 * 6
    (cost,) = costs(net(lambda x: torch.bmm(x, x.transpose(1, 2)))[0], "bmm")
    assert cost.flops_forward == 2 * 4 * 5 * 5 * 6


def test_all_flops_of_the_gpt():
    forward = sum(cost.flops_forward for cost in profile_graph(gpt_graph()).ops.values())
    per_layer = 2 * B * T * W * (4 * W + 8 * W) + 2 * B * T * T * W
    assert forward == 2 * per_layer + 2 * B * T * W * V


def test_what_has_no_gradient_has_no_backward():
    graph = gpt_graph()
    profile = profile_graph(graph)
    for name in graph.prologue:
        cost = profile.ops[name]
        assert (cost.flops_backward, cost.bytes_backward, cost.saves, cost.extra_saved) == (0.0, 0, (), 0)


def test_parameters_are_counted():
    profile = profile_graph(mlp_graph())
    assert profile.parameters == sum(p.numel() for p in mlp().parameters())
    assert profile.parameter_bytes == 4 * profile.parameters
    tied = profile_graph(gpt_graph(tie=True))
    assert tied.parameters == profile_graph(gpt_graph()).parameters - V * W


def test_every_op_is_priced():
    for graph in (gpt_graph(), mlp_graph()):
        profile = profile_graph(graph)
        assert set(profile.ops) == {op.name for op in graph.ops}
        assert set(profile.storage) == set(graph.values)


# ------------------------------------------------------------------------------------------------------- memory


def test_views_share_memory_and_are_free():
    graph, *_ = net(lambda x: x.view(4, 30).unsqueeze(1).transpose(1, 2).permute(0, 2, 1).squeeze(1))
    profile = profile_graph(graph)
    linear = next(op for op in graph.ops if op.target == "aten.linear.default").outputs[0]
    for op in graph.ops[1:-1]:
        assert profile.storage[op.outputs[0]] == linear, op.target
        assert profile.ops[op.name].free and profile.ops[op.name].saves == ()


def test_a_reshape_after_a_transpose_is_a_copy():
    graph, *_ = net(lambda x: x.transpose(1, 2).reshape(4, 30))
    storage = find_storage(graph)
    assert [storage[op.outputs[0]] == op.outputs[0] for op in graph.ops] == [True, False, True, True]
    graph, *_ = net(lambda x: x.reshape(4, 30).reshape(2, 60))
    assert [find_storage(graph)[op.outputs[0]] for op in graph.ops[:3]] == [graph.ops[0].outputs[0]] * 3


def test_contiguous_copies_only_what_is_permuted():
    graph, *_ = net(lambda x: x.contiguous().transpose(1, 2).contiguous())
    profile = profile_graph(graph)
    assert [op.target.split(".")[1] for op in graph.ops] == ["linear", "transpose", "contiguous", "mean"]
    assert [profile.ops[op.name].free for op in graph.ops] == [False, True, False, False]


def test_attention_writes_its_heads_as_the_queries_lie():
    """So that the reshape behind it, which joins the heads, is free; behind queries that lie in order it is a copy."""
    graph = gpt_graph()
    profile = profile_graph(graph)
    reshapes = [op for op in graph.ops if op.target == "aten.reshape.default"]
    assert reshapes and all(profile.ops[op.name].free for op in reshapes)

    def attend(x):
        heads = x.reshape(4, 2, 5, 3)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(4, 5, 6)

    graph, *_ = net(attend)
    (reshape,) = (op for op in graph.ops if op.target == "aten.reshape.default" and len(op.inputs[0]) > 7)
    assert not profile_graph(graph).ops[reshape.name].free


def kept_by_autograd(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of the memory that autograd saves, each shard once, without parameters and inputs."""
    given = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch.values())}
    kept: dict[int, int] = {}
    alive = []  # so that no address is used twice

    def pack(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch)
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize(
    ("graph", "model", "batch"),
    [
        (gpt_graph, gpt, gpt_batch),
        (lambda: gpt_graph(tie=True), lambda: gpt(tie=True), gpt_batch),
        (lambda: gpt_graph(4), lambda: gpt(4), gpt_batch),
        (mlp_graph, mlp, mlp_batch),
    ],
    ids=["gpt", "tied", "deep", "mlp"],
)
def test_saved_bytes_are_what_autograd_keeps(graph, model, batch):
    assert profile_graph(graph()).saved_bytes == pytest.approx(kept_by_autograd(model(), batch()), rel=0.02)


@pytest.mark.parametrize(
    "function",
    [
        torch.relu, torch.tanh, torch.sigmoid, torch.exp, F.gelu, F.silu, torch.neg,
        lambda x: torch.softmax(x, -1), lambda x: torch.log_softmax(x, 1),
        lambda x: x * x, lambda x: x * 2.0, lambda x: x + 1, lambda x: x - x.exp(), lambda x: x / 3,
        lambda x: torch.tanh(x) * torch.sigmoid(x), lambda x: x / torch.exp(x),
        lambda x: F.layer_norm(x, (6,)), lambda x: x @ x.transpose(1, 2),
        lambda x: torch.exp(x.transpose(1, 2)).transpose(1, 2).reshape(32, 30).exp(),
        lambda x: x.transpose(1, 2).reshape(32, 30).exp(),
        lambda x: x.permute(2, 0, 1).exp().permute(1, 0, 2).reshape(192, 5).exp(),
        lambda x: F.mse_loss(x, torch.sigmoid(x)),
        lambda x: torch.atan2(x * 2.0, torch.sigmoid(x)), lambda x: torch.maximum(x * 2.0, x / 3),
    ],
    ids=range(24),
)  # fmt: skip
def test_saved_bytes_op_by_op(function):
    """What is kept is a little more at most: an op that keeps a shape or a scalar is not told apart."""
    graph, model, batch = net(function, shape=(32, 5, 6))
    assert profile_graph(graph).saved_bytes == pytest.approx(kept_by_autograd(model, batch), rel=0.02, abs=16)


def test_a_tensor_that_two_ops_keep_counts_once():
    once = profile_graph(net(lambda x: torch.exp(x))[0]).saved_bytes
    twice = profile_graph(net(lambda x: torch.exp(x) * torch.exp(x).detach())[0])
    assert once == 4 * 4 * 5 * 6
    shared = profile_graph(net(lambda x: F.gelu(x) + F.silu(x) + F.silu(x.view(4, 30)).view(4, 5, 6))[0])
    assert shared.saved_bytes == 4 * 4 * 5 * 6
    assert twice.saved_bytes >= once


def test_an_op_without_a_rule_keeps_all_it_touches():
    graph, *_ = net(lambda x: torch.logcumsumexp(x, 1))
    profile = profile_graph(graph)
    (name,) = (op.name for op in graph.ops if op.target.startswith("aten.logcumsumexp"))
    assert set(profile.ops[name].saves) == {*graph.op(name).inputs, *graph.op(name).outputs}
    assert profile.saved_bytes == 2 * 4 * 4 * 5 * 6


def test_saved_values_are_activations_or_given():
    graph = gpt_graph()
    roles = {graph.values[name].role for cost in profile_graph(graph).ops.values() for name in cost.saves}
    assert Role.RESULT in roles and roles <= set(Role)
