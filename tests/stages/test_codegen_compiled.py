"""Programs whose blocks are compiled: their text, and that they compute what the plain ones do."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Region
from shardwright.pipeline.ops.blocks import blocks_of
from shardwright.pipeline.runtime import compiled
from shardwright.pipeline.runtime.programs.source import load_program
from tests.compiling import without_kernels
from tests.graphs import gpt_graph, trace
from tests.programs import plan_for, uniform, write
from tests.stages.test_codegen import ruff

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))


class Net(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(3))
        self.end = nn.Linear(8, 5)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.start(image)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.end(x.mean((2, 3))), label)


def given() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {"image": torch.randn(4, 3, 6, 6, generator=draw), "label": torch.randint(5, (4,), generator=draw)}


def regions(
    graph: OpGraph, keeps: tuple[float, ...], again: tuple[int, int] | None = None, cheapest: bool = False
) -> tuple[Region, ...]:
    """A leaf for each block, with what it keeps in turn; blocks `again` are recomputed together."""
    spans = blocks_of(graph)
    leaves = [Region(*span, False, (), (), keeps[n % len(keeps)], cheapest) for n, span in enumerate(spans)]
    if again is None:
        return tuple(leaves)
    first, last = again
    inside = tuple(leaves[first : last + 1])
    return (*leaves[:first], Region(inside[0].first, inside[-1].last, True, inside), *leaves[last + 1 :])


def test_blocks_are_the_modules_of_lists_and_what_lies_between():
    graph = gpt_graph()
    spans = blocks_of(graph)
    assert [first for first, _ in spans[1:]] == [last + 1 for _, last in spans[:-1]]
    assert spans[0][0] == 0 and spans[-1][1] == len(graph.chain) - 1
    assert [last - first + 1 for first, last in spans] == [2, 2, 2, 3]  # tables, two layers of two halves, the end


def test_equal_blocks_are_one_function_compiled_in_as_many_ways_as_it_is_called():
    graph = gpt_graph()
    text = write(graph, plan_for(graph, uniform(graph, 1), 1, regions(graph, (1.0, 0.5))))
    ruff(text)
    made = re.findall(r"^(\w+) = compiled\((\w+), keeps=(\S+)\)$", text, re.M)
    assert all(name == f"{function}_keeps_{round(100 * float(keeps))}" for name, function, keeps in made)
    functions = [function for _, function, _ in made]
    assert len(set(functions)) < len(functions) == len(set(made))
    called = re.findall(r"x = (\w+)\(", text[text.index("class Program") :])
    assert set(called) == {name for name, *_ in made}


def test_of_two_blocks_with_a_relu_between_the_second_masks_its_gradient():
    graph = trace(Net(), given())
    text = write(graph, plan_for(graph, uniform(graph, 1), 1, regions(graph, (1.0,))))
    ruff(text)
    made = dict(re.findall(r"^(\w+) = compiled\(\w+, keeps=1.0(.*)\)$", text, re.M))
    entering, leaving = ', after_relu="x"', ", before_relu=True"
    assert made == {
        "start_keeps_100": "",  # ends in no relu
        "blocks_before_relu_keeps_100": leaving,
        "blocks_between_relus_keeps_100": entering + leaving,
        "model_after_relu_keeps_100": entering,
    }


def test_a_relu_that_is_not_compiled_with_both_its_ends_is_left_as_it_is():
    graph = trace(Net(), given())
    spans = blocks_of(graph)
    first = (Region(*spans[1], False, (), (), 1.0),)
    others = tuple(Region(n, n, False, ()) for n in range(spans[2][0], len(graph.chain)))
    start = tuple(Region(n, n, False, ()) for n in range(spans[1][0]))
    text = write(graph, plan_for(graph, uniform(graph, 1), 1, (*start, *first, *others)))
    assert "compiled(blocks" in text and "_relu=" not in text


def test_counters_of_norms_are_counted_in_one_call():
    net, batch = Net(), given()
    graph = trace(net, batch)
    text = write(graph, plan_for(graph, uniform(graph, 1), 1, regions(graph, (1.0,))))
    ruff(text)
    (run,) = re.findall(r"torch\._foreach_add_\(\s*\[(.*?)\],\s*1,\s*\)", text, re.S)
    assert re.findall(r'"(\S+)"', run) == [f"blocks.{n}.norm.num_batches_tracked" for n in range(3)]
    assert "add_(1)" not in text


@pytest.mark.parametrize(
    ("calls", "on_card", "wanted"), [("c++", True, True), ("python", True, False), ("c++", False, False)]
)
def test_on_a_gpu_the_calls_of_kernels_are_compiled_too(monkeypatch, calls, on_card, wanted):
    """What the compiler is told is seen where it would begin; the GPU is a tensor that says it lies on one."""
    from torch._inductor import compile_fx, config

    seen = []
    monkeypatch.setenv("CXX", sys.executable)  # some program that is there
    names = ("cpp_wrapper", "shape_padding", "force_shape_pad", "conv_1x1_as_mm")
    monkeypatch.setattr(
        compile_fx,
        "compile_fx",
        lambda graph, inputs, **how: seen.append([getattr(config, name) for name in names]) or graph.forward,
    )
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: on_card))
    made = compiled(a_function(), 1.0, calls)
    assert torch.equal(made(torch.ones(2)), torch.full((2,), 2.0))
    assert seen == [
        [wanted, True, True, on_card]
    ]  # whether to pad products would be told by how long they take, each time anew


def a_function() -> FunctionType:
    """Of its own for each test: what was compiled is known by its code."""

    def double(x: Tensor) -> Tensor:
        return x + x

    torch._dynamo.reset()
    return double


Found = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]  # the loss, gradients and buffers


def step(text: str, module: nn.Module, batch: dict[str, Tensor], folder: Path) -> Found:
    parameters = {name: nn.Parameter(value.detach().clone()) for name, value in module.named_parameters()}
    buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
    torch.manual_seed(7)
    path = folder / "module.py"
    path.write_text(text)
    loss = load_program(str(path)).Program({**buffers, **parameters}).forward(**batch)
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in parameters.items()}, buffers


@pytest.mark.parametrize(
    ("keeps", "again", "cheapest", "kernels"),
    [
        ((1.0,), (1, 2), False, without_kernels),
        ((0.4, 0.0), None, False, without_kernels),
        ((0.5,), (1, 2), True, nullcontext),
    ],
)
def test_compiled_blocks_compute_the_same_inside_regions_and_out_of_them(keeps, again, cheapest, kernels, tmp_path):
    """Also batch-norm statistics, which change once a step though a region runs twice."""
    torch.manual_seed(0)
    net, batch = Net(), given()
    graph = trace(net, batch)
    plain = plan_for(graph, uniform(graph, 1), 1, tuple(Region(n, n, False, ()) for n in range(len(graph.chain))))
    ours = plan_for(graph, uniform(graph, 1), 1, regions(graph, keeps, again, cheapest))
    text = write(graph, ours)
    assert ("_keeps_50_cheapest = compiled(start, keeps=0.5, cheapest=True)" in text) == cheapest
    assert ("recompute(" in text) == (again is not None) and "channels_last(tensors)" in text
    with kernels():
        loss, gradients, buffers = step(text, net, batch, tmp_path)
    wanted = step(write(graph, plain), net, batch, tmp_path)
    torch.testing.assert_close(loss, wanted[0], rtol=1e-5, atol=1e-6)
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    for name, buffer in wanted[2].items():
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-4, atol=1e-6, msg=name)


def test_a_compiled_block_may_call_a_function_that_its_reader_added(tmp_path):
    torch.manual_seed(0)
    net, batch = Net(), given()
    graph = trace(net, batch)
    text = write(graph, plan_for(graph, uniform(graph, 1), 1, regions(graph, (1.0,))))
    own = "def twice_relu(x: Tensor) -> Tensor:\n    return F.relu(F.relu(x))\n\n\n"
    before, after = text.split("def ", 1)
    edited = before + own + "def " + after.replace("F.relu(", "twice_relu(")
    assert edited.count("twice_relu") > 1
    with without_kernels():
        (loss, gradients, _), wanted = step(edited, net, batch, tmp_path), step(text, net, batch, tmp_path)
    torch.testing.assert_close((loss, gradients), wanted[:2])
