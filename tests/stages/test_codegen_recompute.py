"""The program gives the model's loss and gradients, whatever is recomputed and carried past its links."""

from __future__ import annotations

import random
import re
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Region
from shardwright.pipeline.tracing.chain import find_chain
from tests.graphs import ladder_graph, shared_graph, trace
from tests.interpreter import run_graph
from tests.plans import random_regions, with_kept
from tests.programs import (
    ODD,
    SCHEDULES,
    everything,
    functions,
    kept,
    load,
    nested,
    odd,
    odd_graph,
    plan_for,
    uniform,
    write,
)
from tests.skips import SIZE, STEPS, Weights, random_ops

# ------------------------------------------------------------------------------------- common values and regions


def test_common_values_are_returned_beside_x_and_passed_on():
    graph = shared_graph()
    text = write(graph, plan_for(graph, uniform(graph, 1), 1))
    forward = text[text.index("def forward") :]
    assert "        x, tanh, exp, gt = model_a(x, inputs, self.whole)\n" in forward
    for n in range(3):
        assert f"        x = layers(x, tanh, exp, gt, self.layers_{n})  # layers.{n}\n" in forward
    assert (
        "def model_a(x: Tensor, inputs: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:" in text
    )
    assert functions(text) == ["encoder", "model_a", "layers", "model_b"]


def test_links_that_read_different_skips_share_a_function():
    graph = ladder_graph()
    text = write(graph, plan_for(graph, uniform(graph, 1), 1))
    calls = re.findall(r"^        x = (\w+)\(x, (tanh\w*)\)$", text, re.M)
    assert [skip for _, skip in calls] == ["tanh_2", "tanh_1", "tanh"]
    assert len({function for function, _ in calls}) == 1


def test_a_region_takes_what_it_reads_and_returns_what_is_read_after_it():
    graph = shared_graph()
    inner = (Region(1, 2, True, tuple(Region(i, i, False, ()) for i in (1, 2))), Region(3, 3, False, ()))
    outer = Region(1, 3, True, inner)
    text = write(graph, plan_for(graph, uniform(graph, 1), 1, (kept(graph)[0], outer, *kept(graph)[4:])))
    assert "        x, tanh, exp, gt = recompute(self.links_1_to_3, x, inputs)\n" in text
    assert "    def links_1_to_3(self, x: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:\n" in text
    assert "        x, tanh, exp, gt = recompute(self.links_1_to_2, x, inputs)\n" in text
    readers = write(graph, plan_for(graph, uniform(graph, 1), 1, (*kept(graph)[:2], *everything(graph)[2:])))
    assert "        x = recompute(self.links_2_to_2, x, tanh, exp, gt)\n" in readers
    whole = write(graph, plan_for(graph, uniform(graph, 1), 1, nested(graph)))
    assert "        x = recompute(self.links_0_to_4, inputs)\n" in whole  # written and read inside


# --------------------------------------------------------------------------------------------------- execution


def check_program(model: nn.Module, batch: dict, graph: OpGraph, regions: tuple[Region, ...]) -> None:
    """Loss and gradients are those of the user's module, with the same random numbers; sums may be in another order."""
    program = load(write(graph, plan_for(graph, uniform(graph, 1), 1, regions)))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(3)
    wanted = model(**batch)
    gradients = torch.autograd.grad(wanted, parameters)
    torch.manual_seed(3)
    found = program["Program"](tensors).forward(**batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    again = torch.autograd.grad(found, parameters)
    exact = found.dtype == torch.float64
    torch.testing.assert_close(again, gradients, rtol=1e-10 if exact else 1e-6, atol=1e-12 if exact else 1e-7)


@pytest.mark.parametrize("regions", SCHEDULES)
@pytest.mark.parametrize("name", ["gpt", "gpt_tied", "mlp", "ladder", "shared", *ODD])
def test_on_one_rank_the_program_is_the_model(name, regions):
    """No conversion is needed."""
    graph = odd_graph(name)
    check_program(*odd(name), graph, SCHEDULES[regions](graph))


@pytest.mark.parametrize("regions", SCHEDULES)
@pytest.mark.parametrize("name", ["ladder_dropout", "shared_dropout"])
def test_recompute_draws_the_same_random_numbers(name, regions):
    graph = odd_graph(name)
    assert graph.common and sum(op.target == "aten.dropout.default" for op in graph.ops) > 2
    check_program(*odd(name), graph, SCHEDULES[regions](graph))


@cache
def t5() -> tuple[nn.Module, dict[str, torch.Tensor], OpGraph]:
    """In double precision, so that the order of a sum does not show."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    from tests.plans import batch_of, module_of

    model, batch = module_of("t5"), batch_of("t5")
    return model, batch, trace(model, batch)


@pytest.mark.parametrize("regions", SCHEDULES)
def test_t5_under_recompute(regions):
    model, batch, graph = t5()
    check_program(model, batch, graph, SCHEDULES[regions](graph))


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 1000))
def test_any_graph_under_any_recompute(steps, seed):
    """Skips of any length from anywhere to anywhere, regions around any of them that keep any of their products."""
    ops = random_ops(steps)
    graph = find_chain(ops)
    draw = random.Random(seed)
    regions = random_regions(0, len(graph.chain) - 1, draw, draw.randint(0, 3))
    model = Weights(ops)
    batch = {"inputs": torch.randn(SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}
    program = load(write(graph, with_kept(graph, plan_for(graph, uniform(graph, 1), 1, regions), draw)))
    wanted = run_graph(graph, model, batch)
    found = program["Program"](dict(model.named_parameters())).forward(**batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(wanted, parameters, allow_unused=True, materialize_grads=True)
    again = torch.autograd.grad(found, parameters, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(again, gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("regions", [kept, nested], ids=["kept", "nested"])
def test_statistics_change_once_a_step(regions):
    """A recompute region runs batch norm twice, its running statistics move as if it ran once."""
    model, batch = odd("stateful")
    graph = odd_graph("stateful")
    program = load(write(graph, plan_for(graph, uniform(graph, 1), 1, regions(graph))))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(2):
        program["Program"]({**dict(model.named_parameters()), **buffers}).forward(**batch).backward()
        model(**batch)
    assert buffers["norm.num_batches_tracked"] == 2
    torch.testing.assert_close(buffers, dict(model.named_buffers()), rtol=0, atol=0)
