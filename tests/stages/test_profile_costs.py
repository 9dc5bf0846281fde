"""The cost of each op, read from the links that were run: against hand formulas, and against the op table."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.profile import OpCost
from shardwright.pipeline.models.gpt import GPT
from shardwright.pipeline.models.mlp import MLP
from shardwright.stages.profile.by_table import find_storage, profile_graph
from shardwright.stages.profile.costs import all_kernels, op_costs, value_types
from shardwright.stages.profile.run import make_profile
from shardwright.stages.profile.step import profile_step
from shardwright.stages.profile.symbolic import rounded
from tests.graphs import SILENT, gpt_graph, mlp_graph, trace

B, T, W, H, V = 8, 32, 64, 4, 512  # batch, length, width, heads, vocabulary


@pytest.fixture(scope="module")
def gpt() -> OpGraph:
    return trace(GPT(V, T, W, 2, H), {name: torch.randint(V, (B, T)) for name in ("input_ids", "labels")})


@pytest.fixture(scope="module")
def mlp() -> OpGraph:
    batch = {"inputs": torch.randn(256, 64), "targets": torch.randint(10, (256,))}
    return trace(MLP(64, 256, 10, 4), batch)


def costs_of(graph: OpGraph, device: str = "cuda", precision: str = "native") -> dict[str, OpCost]:
    return op_costs(graph, profile_step(graph, device, precision))


def find(graph: OpGraph, costs: dict[str, OpCost], kind: str, module: str | None = None) -> list[OpCost]:
    return [
        costs[op.name]
        for op in graph.ops
        if op.target.split(".")[1] == kind and (module is None or op.module == module)
    ]


class Net(nn.Module):
    """A layer before and a mean after a function of one's choosing."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(32, 64), function

    def forward(self, x):
        return self.function(self.linear(x)).mean()


def net(function, *shape: int) -> OpGraph:
    return trace(Net(function), {"x": torch.randn(*(shape or (16, 32)))})


# ---------------------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("module", "inside", "outside"),
    [("layers.0.attention.query", W, W), ("layers.1.up", W, 4 * W), ("layers.1.down", 4 * W, W), ("head", W, V)],
)
def test_flops_and_bytes_of_a_linear_layer(gpt, device, module, inside, outside):
    (cost,) = find(gpt, costs_of(gpt, device), "linear", module)
    assert cost.flops_forward == 2 * B * T * inside * outside
    assert cost.flops_backward == 2 * cost.flops_forward
    elements = B * T * inside + inside * outside + B * T * outside + (outside if module != "head" else 0)
    assert cost.bytes_forward == 4 * elements and cost.kernels_forward == 1
    assert cost.bytes_backward > 2 * 4 * elements - 8 * outside and cost.kernels_backward >= 2


def test_the_first_layer_passes_no_gradient_on(mlp):
    costs = costs_of(mlp)
    layers = [costs[op.name] for op in mlp.ops if op.target == "aten.linear.default"]
    first, *others = layers
    assert first.flops_backward == first.flops_forward
    assert all(cost.flops_backward == 2 * cost.flops_forward for cost in others)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_flops_of_causal_attention(gpt, device):
    for cost in find(gpt, costs_of(gpt, device), "scaled_dot_product_attention"):
        assert cost.flops_forward == 0.5 * 2 * 2 * B * T * T * W
        assert cost.flops_backward == 2.5 * cost.flops_forward


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_flops_are_those_of_the_table(gpt, mlp, device):
    for graph in (gpt, mlp):
        ours, table = costs_of(graph, device), profile_graph(graph).ops
        for name, cost in ours.items():
            assert cost.flops_forward == table[name].flops_forward, name
            assert cost.flops_backward in (table[name].flops_backward, table[name].flops_backward / 2), name


def test_a_view_is_free_and_a_copy_is_not():
    graph = net(lambda x: x.view(4, 4, 64).transpose(0, 1).reshape(16, 64))
    costs = costs_of(graph)
    assert [costs[op.name].free for op in graph.ops] == [False, True, True, False, False]
    (copy,) = find(graph, costs, "reshape")
    assert (copy.kernels_forward, copy.bytes_forward) == (1, 2 * 4 * 16 * 64)


def test_what_needs_no_gradient_has_no_backward(gpt):
    costs = costs_of(gpt)
    for name in gpt.prologue:
        cost = costs[name]
        assert (cost.flops_backward, cost.kernels_backward, cost.saves, cost.extra_saved) == (0.0, 0, (), 0)
    labels = next(op.name for op in gpt.ops if op.inputs == ("labels",))
    assert labels in gpt.prologue and costs[labels].free, "a view of an input"


# ---------------------------------------------------------------------------------------------- kept for backward


def test_queries_keys_and_values_keep_their_input_once(gpt):
    """Each of the three names it; it is one value, so together they keep it once."""
    costs = costs_of(gpt)
    kept = [find(gpt, costs, "linear", f"layers.0.attention.{name}")[0] for name in ("query", "key", "value")]
    read = [{v for v in cost.saves if gpt.values[v].role is Role.RESULT} for cost in kept]
    assert read[0] == read[1] == read[2] and len(read[0]) == 1
    assert all(cost.extra_saved == 0 for cost in kept)
    (norm,) = (op for op in gpt.ops if op.module == "layers.0.norm_attention")
    assert read[0] == set(norm.outputs)


def test_saved_names_are_places_of_the_op(gpt):
    """An equal layer is run once for all; each of them names its own values."""
    for name, cost in costs_of(gpt, "cuda", "amp").items():
        assert set(cost.saves) <= {*gpt.op(name).inputs, *gpt.op(name).outputs}
        assert len(set(cost.saves)) == len(cost.saves)


def test_a_dropout_mask_is_extra():
    graph = net(lambda x: F.dropout(x, 0.5))
    (gpu,), (cpu,) = (find(graph, costs_of(graph, device), "dropout") for device in ("cuda", "cpu"))
    assert gpu.extra_saved == 16 * 64, "a byte for each element"
    assert cpu.extra_saved == 4 * 16 * 64, "scaled, in the type of the data"
    assert gpu.saves == () and cpu.saves == ()


def test_row_sums_and_the_seed_of_attention_are_extra(gpt):
    costs = costs_of(gpt, "cuda", "amp")
    for cost in find(gpt, costs, "scaled_dot_product_attention"):
        assert 4 * B * H * T <= cost.extra_saved <= 4 * B * H * T + 2 * 512
        assert len(cost.saves) == 4, "queries, keys, values and what it gives"


def test_statistics_of_a_norm_are_extra(gpt):
    for cost in find(gpt, costs_of(gpt), "layer_norm"):
        assert cost.extra_saved == 2 * rounded(4 * B * T)


def test_cast_copies_are_extra_under_autocast(gpt):
    """Of a weight, and of an input that is in float32; one that is in half precision already is kept itself."""
    native, mixed = costs_of(gpt), costs_of(gpt, "cuda", "amp")
    for module in ("layers.0.attention.query", "layers.0.up", "head"):
        (plain,), (cast,) = (find(gpt, costs, "linear", module) for costs in (native, mixed))
        weight = 2 * W * {"query": W, "up": 4 * W, "head": V}[module.rpartition(".")[2]]
        assert plain.extra_saved == 0 and plain.saves
        assert cast.extra_saved == weight + 2 * B * T * W and cast.saves == ()
        assert cast.kernels_forward >= plain.kernels_forward + 2 and cast.flops_forward == plain.flops_forward
    (down,) = find(gpt, mixed, "linear", "layers.0.down")
    assert down.extra_saved == 2 * 4 * W * W and len(down.saves) == 1


class Twice(nn.Module):
    """A weight that is read twice within a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x):
        x = self.first(x)
        return (x + self.layer(torch.relu(self.layer(x)))).mean()


def test_a_weight_that_is_read_twice_is_cast_once():
    graph = trace(Twice(), {"x": torch.randn(16, 32)})
    once, again = find(graph, costs_of(graph, "cuda", "amp"), "linear", "layer")
    assert (once.extra_saved, again.extra_saved) == (2 * 32 * 32, 0)
    assert once.kernels_forward == again.kernels_forward + 1
    assert len(once.saves) == len(again.saves) == 1


def test_plain_attention_keeps_its_scores():
    def attend(x):
        heads = x.view(2, 8, 4, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)

    graph = net(attend)
    (cpu,), (gpu,) = (
        find(graph, costs_of(graph, device), "scaled_dot_product_attention") for device in ("cpu", "cuda")
    )
    heads, scores = 4 * 2 * 4 * 8 * 16, 4 * 2 * 4 * 8 * 8
    kept = "scaled queries and keys, values in order; softmax, dropout mask and their product"
    assert cpu.extra_saved == 3 * heads + 3 * scores, kept
    assert gpu.extra_saved < cpu.extra_saved / 4 and gpu.kernels_forward == 1


# ---------------------------------------------------------------------------------------------------- temporaries


def test_the_loss_keeps_log_probabilities_and_needs_their_gradient(gpt):
    """Backward of the likelihood makes a gradient as large as the logits, from which that of the softmax is made."""
    (cost,) = find(gpt, costs_of(gpt), "cross_entropy_loss")
    logits = 4 * B * T * V
    assert cost.extra_saved == pytest.approx(logits, abs=1024)
    assert cost.temporary_backward == pytest.approx(logits, abs=1024)  # what it kept of the sums of weights goes first
    assert cost.temporary_forward == 0
    (mixed,) = find(gpt, costs_of(gpt, "cuda", "amp"), "cross_entropy_loss")
    why = "the gradient of float32 log probabilities beside that in half, less the half that it kept and has let go of"
    assert mixed.temporary_backward == logits // 2, why


def test_the_value_that_leaves_a_link_is_no_temporary(gpt, mlp):
    for graph in (gpt, mlp):
        assert {cost.temporary_forward for cost in costs_of(graph).values()} == {0}


# ------------------------------------------------------------------------------------------------ the whole graph


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_saved_bytes_are_those_of_the_table(gpt, mlp, device):
    for graph in (gpt, mlp):
        profile, why = make_profile(graph, device, "fp32", torch.optim.AdamW, SILENT)
        assert (profile.source, why) == ("symbolic", "")
        assert profile.saved_bytes == pytest.approx(profile_graph(graph).saved_bytes, rel=0.03)
        assert profile.storage == find_storage(graph)


@pytest.mark.parametrize(("device", "precision"), [("cpu", "native"), ("cuda", "native"), ("cuda", "amp")])
def test_every_op_has_a_cost(device, precision):
    for graph in (gpt_graph(4), gpt_graph(tie=True), mlp_graph()):
        costs = costs_of(graph, device, precision)
        assert set(costs) == {op.name for op in graph.ops}
        for name, cost in costs.items():
            assert min(vars(cost)[key] for key in vars(cost) if key != "saves") >= 0, name
            assert cost.free == (cost.kernels_forward == 0)


def test_kernels_of_equal_links_are_written_once(gpt):
    step = profile_step(gpt, "cuda", "native")
    kernels = all_kernels(gpt, step)
    assert len(kernels.links) == len({id(run) for run in step.runs}) < len(kernels.chain) == len(gpt.chain)
    for number, run in zip(kernels.chain, step.runs, strict=True):
        assert (kernels.links[number].forward, kernels.links[number].backward) == (run.forward, run.backward)
    assert kernels.optimizer == step.optimizer.kernels and kernels.prologue == step.prologue


def test_a_step_that_cannot_be_simulated_is_priced_by_the_table():
    def broken(parameters):
        raise RuntimeError("no step today")

    graph = gpt_graph()
    profile, why = make_profile(graph, "cpu", "fp32", broken, SILENT)
    assert profile == profile_graph(graph) and "no step today" in why
    assert profile.source == "table" and profile.step is None and profile.kernels is None


def test_an_optimizer_that_looks_at_values_does_not_cost_the_whole_profile():
    profile, why = make_profile(gpt_graph(), "cpu", "fp32", torch.optim.Adafactor, SILENT)
    assert not why and profile.source == "symbolic" and profile.step is not None and profile.kernels is not None


def test_under_autocast_values_are_sized_as_they_run():
    """In whatever the graph says; what is kept in bfloat16 counts half, so that a plan is not too careful."""
    model = GPT(vocab_size=500, context=64, width=64, layers=2, heads=4)
    batch = {name: torch.randint(500, (8, 64)) for name in ("input_ids", "labels")}
    graph = trace(model, batch)
    step = profile_step(graph, "cuda", "amp")
    types = value_types(graph, step)
    products = [op.outputs[0] for op in graph.ops if op.target == "aten.linear.default"]
    assert products and all(types[name] == "bfloat16" for name in products)
    assert not any(name in types for name, value in graph.values.items() if value.role is Role.PARAMETER)
    full, mixed = (
        make_profile(graph, "cuda", precision, torch.optim.AdamW, SILENT)[0] for precision in ("fp32", "amp")
    )
    assert mixed.types == types and not full.types
    kept = step.memory.after_forward - step.memory.resident
    assert mixed.saved_bytes == pytest.approx(kept, rel=0.1) and mixed.saved_bytes < full.saved_bytes
    as_traced = trace(model, batch, "cuda", amp=True)
    again = profile_step(as_traced, "cuda", "amp")
    assert again.memory == step.memory and not value_types(as_traced, again)
