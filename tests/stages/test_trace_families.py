"""Models as their authors wrote them: the graph alone gives the same loss and gradients, to the last bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Container
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from shardwright.pipeline.base.errors import TraceError
from shardwright.pipeline.cost.unsplit import step_seconds
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.profile import Kernel, LinkKernels
from shardwright.pipeline.ir.verify import verify_graph
from shardwright.pipeline.rates.kernels import Card
from shardwright.pipeline.tracing import simplify as simplify_module
from shardwright.pipeline.tracing.autocast import device_autocast
from shardwright.pipeline.tracing.build import fake_mode, to_fake
from shardwright.pipeline.tracing.chain import find_chain
from shardwright.pipeline.tracing.export import export_loss
from shardwright.pipeline.tracing.lower import Ops, lower
from shardwright.pipeline.tracing.simplify import simplify
from shardwright.pipeline.user.loss import pick_loss
from shardwright.stages.profile.costs import all_kernels, op_costs, value_types
from shardwright.stages.profile.step import profile_step
from tests.asked import mostly_long
from tests.families import FAMILIES, LENGTH, bert, gpt2, llama, mixtral, resnet, t5, tokens, vit
from tests.interpreter import run_graph
from tests.made import made_once


def trace(build, batch, device: str = "cpu", *, amp: bool = False, stay: Container[str] = ()) -> OpGraph:
    mode = fake_mode()
    with torch.device("meta"):
        model = build()
    to_fake(model.train(), mode)
    with mode:
        fakes = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in batch.items()}
    program = export_loss(model, fakes, device, amp=amp)
    graph = find_chain(simplify(lower(program, model, tuple(fakes), amp=amp, stay=stay)))
    verify_graph(graph)
    return graph


def check_equal(graph: OpGraph, model: nn.Module, batch, around=nullcontext) -> None:
    """Loss, gradients and buffers after one step, with the same random numbers, to the last bit."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with around():
        loss = pick_loss(model(**batch))
    loss.backward()
    torch.manual_seed(1)
    with around():
        again = run_graph(graph, other, batch)
    again.backward()
    assert torch.equal(again, loss)
    for (name, ours), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert torch.equal(ours.grad, theirs.grad), name
    for (name, ours), theirs in zip(other.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


@made_once
def graph_of(build) -> OpGraph:
    return trace(build, FAMILIES[build])


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda build: build.__name__)
def family(request):
    build = request.param
    return build, FAMILIES[build], graph_of(build)


def test_the_graph_alone_is_the_model(family):
    build, batch, graph = family
    torch.manual_seed(0)
    check_equal(graph, build().train(), batch)


SHORT = {"cpu": (gpt2, resnet), "cuda": (gpt2, bert, llama, t5, mixtral, vit, resnet)}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without units for bfloat16
@pytest.mark.parametrize(
    ("build", "device"), mostly_long(itertools.product(FAMILIES, SHORT), lambda case: case[0] in SHORT[case[1]])
)
def test_under_autocast_the_graph_alone_is_the_model(build, device):
    """The types of its values too (tests/interpreter.py); a GPU's autocast as the CPU's does it for the export."""
    torch.manual_seed(0)
    model, graph = build().train(), trace(build, FAMILIES[build], device, amp=True)
    check_equal(graph, model, FAMILIES[build], lambda: device_autocast(device, amp=True))
    assert not value_types(graph, profile_step(graph, device, "amp")), "the simulated step has other types"


def test_nothing_of_export_is_left(family):
    _, _, graph = family
    kinds = {op.target.split(".")[1] for op in graph.ops}
    assert not kinds & {"_assert_tensor_metadata", "alias", "lift_fresh_copy", "copy_", "wrap_with_set_grad_enabled"}
    assert all(op.mutates for op in graph.ops if op.target.split(".")[1].endswith("_"))


def test_equal_layers_have_equal_numbers(family):
    build, _, graph = family
    numbers = [link.block for link in graph.chain]
    if build.__name__ != "swin":  # its two stages have layers of different sizes
        assert len(set(numbers)) < len(numbers), numbers


def test_only_long_skips_change_the_chain(family, monkeypatch):
    """A residual is no common value: without these, every chain but T5's is the same."""
    build, _, graph = family
    monkeypatch.setattr("shardwright.pipeline.tracing.chain.find_common", lambda ops: set())
    before = find_chain(Ops(graph.values, graph.ops, graph.output))
    if build.__name__ == "t5":
        assert graph.common and len(before.chain) < len(graph.chain)
    else:
        assert before == graph and not graph.common


def test_every_layer_of_t5_is_a_link():
    layers = 4
    graph = trace(lambda: t5(layers), tokens())
    shards = [graph.op(link.ops[0]).module for link in graph.chain if len(link.ops) > 5]
    first = [f"{side}.block.{n}.layer.{k}.layer_norm" for side, parts in (("encoder", 2), ("decoder", 3))
             for n in range(layers) for k in range(parts)]  # fmt: skip
    assert shards == first
    blocks = {name: link.block for name, link in zip(first, (x for x in graph.chain if len(x.ops) > 5), strict=True)}

    def of(side, shard, start=0):
        return {blocks[f"{side}.block.{n}.layer.{shard}.layer_norm"] for n in range(start, layers)}

    for side in ("encoder", "decoder"):
        assert len(of(side, 0, start=1)) == 1 and len(of(side, 0)) == 2  # the first makes the position bias
    assert len(of("decoder", 1)) == 1 and len(of("decoder", 2) | of("encoder", 1)) == 1
    # the encoder's output, and a position bias on each side
    reads = [
        len({n for n, link in enumerate(graph.chain) if name in graph.reads_common(link)}) for name in graph.common
    ]
    assert reads == [layers - 1, layers, layers - 1]


def test_causal_attention_has_no_mask(family):
    build, _, graph = family
    attention = [op for op in graph.ops if op.target == "aten.scaled_dot_product_attention.default"]
    masked = [op.args.get(3, "attn_mask", None) is not None for op in attention]
    causal = [bool(op.args.get(5, "is_causal", False)) for op in attention]
    wanted = {
        "gpt2": (False, True), "llama": (False, True), "qwen2": (False, True), "mixtral": (False, True),
        "opt": (False, True), "bert": (False, False), "vit": (False, False),
    }.get(build.__name__)  # fmt: skip
    if wanted:
        assert attention and set(zip(masked, causal, strict=True)) == {wanted}


class Biased(nn.Module):
    """A position bias as T5 has it: written by the first layer, read by all, and laid out anew or not."""

    def __init__(self, contiguous: bool) -> None:
        super().__init__()
        self.table, self.contiguous = nn.Parameter(torch.ones(LENGTH, LENGTH, 4)), contiguous
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x, y):
        bias = self.table.permute(2, 0, 1)[None]
        for layer in self.layers:
            q = layer(x).view(*x.shape[:2], 4, 8).transpose(1, 2)
            mask = bias.contiguous() if self.contiguous else bias
            x = F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).reshape(x.shape) + x
        return F.mse_loss(x, y)


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_bias_that_was_permuted_crosses_links_as_it_lies(contiguous):
    """No layer can give it to a fused kernel, unless the model lays it out anew."""
    graph = trace(lambda: Biased(contiguous), {name: torch.ones(2, LENGTH, 32) for name in "xy"})
    kernels = [k.name for run in profile_step(graph, "cuda", "native").runs for k in run.forward]
    assert kernels.count("_safe_softmax") == (0 if contiguous else 3)


@pytest.mark.parametrize(
    ("device", "precision"),
    mostly_long([("cpu", "native"), ("cuda", "native"), ("cuda", "amp")], lambda case: case == ("cuda", "native")),
)
def test_the_step_is_simulated_without_memory(family, device, precision):
    _, _, graph = family
    step = profile_step(graph, device, precision)
    assert step.memory.resident < step.memory.after_forward < step.memory.peak
    costs = op_costs(graph, step)
    assert set(costs) == {op.name for op in graph.ops}
    assert sum(cost.flops_backward for cost in costs.values()) > sum(cost.flops_forward for cost in costs.values()) > 0


def test_the_host_waits_where_it_counts_the_rows_of_experts():
    """Once in each pass of each grouped product, and nowhere else; that takes time."""
    graph = graph_of(mixtral)
    step = profile_step(graph, "cuda", "native")
    kernels = all_kernels(graph, step)
    waiting = [k.op for run in step.runs for k in (*run.forward, *run.backward) if k.waits]
    grouped = [op.name for op in graph.ops if op.target == "transformers.grouped_mm_fallback.default"]
    assert len(waiting) == 2 * len(grouped) > 0 and set(waiting) <= set(grouped)
    ahead = replace(kernels, links=tuple(LinkKernels(_ahead(k.forward), _ahead(k.backward)) for k in kernels.links))
    card = Card({"float32": 1e9}, 1e9)  # so slow that the host is far ahead
    assert step_seconds(graph, ahead, card).step < step_seconds(graph, kernels, card).step


def _ahead(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    return tuple(replace(kernel, waits=False) for kernel in kernels)


def test_casts_that_change_nothing_cost_nothing():
    """Where they stay, they are links without a kernel; what goes through them is one block of memory."""
    casts = {"to", *(f"to_{number}" for number in range(1000))}
    with_casts, without = trace(llama, FAMILIES[llama], stay=casts), graph_of(llama)
    assert len(with_casts.ops) > len(without.ops)
    ours, wanted = (profile_step(graph, "cuda", "native") for graph in (with_casts, without))
    assert any(not run.forward for run in ours.runs)
    assert (ours.memory, ours.timeline.length) == (wanted.memory, wanted.timeline.length)


def test_a_bias_of_attention_is_not_repeated_for_every_sample():
    """T5: the encoder, which hides nothing, takes the bias itself; the decoder's is masked once for all samples."""
    graph = graph_of(t5)
    writers = {name: op for op in graph.ops for name in op.outputs}
    found = {}
    for op in graph.ops:
        if op.target == "aten.scaled_dot_product_attention.default":
            mask = op.args.get(3, "attn_mask", None)
            writer = writers[mask.value] if mask else None
            if writer and writer.target == "aten.contiguous.default":  # since transformers 5.22
                assert graph.values[writer.inputs[0]].type.shape == graph.values[mask.value].type.shape
                writer = writers[writer.inputs[0]]
            kind = writer.target.split(".")[1] if writer else None
            found[op.module] = (kind, graph.values[mask.value].type.shape if mask else None)
    shape = (1, 4, LENGTH, LENGTH)
    for layer in range(2):
        kind, size = found[f"encoder.block.{layer}.layer.0.SelfAttention"]
        assert kind != "where" and size == shape
        assert found[f"decoder.block.{layer}.layer.0.SelfAttention"] == ("where", shape)
        assert found[f"decoder.block.{layer}.layer.1.EncDecAttention"] == (None, None)


def test_a_hundred_billion_parameters_cost_no_memory():
    import transformers as hf

    sizes = {"hidden_size": 32768, "intermediate_size": 131072, "num_hidden_layers": 6, "num_attention_heads": 128}
    config = hf.LlamaConfig(**sizes, vocab_size=128256, use_cache=False)
    batch = {name: torch.zeros(1, 8, dtype=torch.int64) for name in ("input_ids", "labels")}
    graph = trace(lambda: hf.LlamaForCausalLM(config), batch)
    assert sum(v.type.numel for v in graph.of_role(Role.PARAMETER)) > 100e9


class InPlace(nn.Module):
    """Every way in which a tensor can be changed behind another's back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        y = self.layer(x)
        y.mul_(2)
        rows, first = y.view(2, -1), y[:, :4]
        rows[0].relu_()
        z = torch.zeros_like(y)
        z[:, 1:] = y[:, :-1]
        z[:, 0] = 3.0
        flipped = z.t()
        flipped[0].add_(1)
        table = torch.tensor([1.0, 2.0, 3.0, 4.0])
        table += 1
        return (z * y).mean() + first.sum() + rows.exp().sum() + table.sum() * y.mean() + flipped.pow(2).sum()


def test_in_place_changes_are_seen_by_every_view():
    batch = {"x": torch.randn(4, 8)}
    check_equal(trace(InPlace, batch), InPlace(), batch)


class Branch(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.probability = probability

    def forward(self, x):
        y = self.layer(x)
        if torch.rand([]) < self.probability:
            y = y * 2
        if torch.rand(()) >= 1.0:
            y = y * 3
        return F.dropout(y, 0.5).mean()


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_a_branch_that_is_certain_is_followed(probability):
    batch = {"x": torch.randn(4, 4)}
    check_equal(trace(lambda: Branch(probability), batch), Branch(probability), batch)


def test_a_branch_that_is_not_certain_is_refused_with_its_line():
    with pytest.raises(TraceError, match=r"test_trace_families\.py:\d+: the model cannot be exported"):
        trace(lambda: Branch(0.5), {"x": torch.randn(4, 4)})


def test_a_mask_that_all_layers_share_is_looked_at_once(monkeypatch):
    """Of a large batch it has billions of elements."""
    seen = []
    monkeypatch.setattr(simplify_module, "_shown", lambda mask: seen.append(mask.shape) or simplify_module.Shown.PAST)
    graph = trace(llama, tokens())
    attention = [op for op in graph.ops if op.target == simplify_module.ATTENTION]
    assert len(attention) == 2 and len(seen) == 1
    assert all(op.args.get(simplify_module.CAUSAL, "is_causal", False) for op in attention)
