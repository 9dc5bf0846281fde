"""Compiled blocks with relus between them: gradients are those of the functions, and masked once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

from shardwright.pipeline.runtime import compiled
from shardwright.pipeline.runtime.compiler import partitioner
from tests.compiling import without_kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles


def start(x: Tensor, weight: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, weight))


def middle(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    inside = F.relu(F.conv2d(x, p["down"]))
    return F.relu(F.conv2d(inside, p["up"]) + x)


def in_two_parts(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    inside = F.relu(F.conv2d(x, p["down"]))
    torch._dynamo.graph_break()
    return F.relu(F.conv2d(inside, p["up"]) + x)


@torch.compiler.disable
def as_it_is(x: Tensor) -> Tensor:
    """Stands for a collective."""
    return x.clone()


def around_a_collective(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    inside = as_it_is(F.relu(F.conv2d(x, p["down"])))
    return F.relu(F.conv2d(inside, p["up"]) + x)


def end(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight).square().mean()


Blocks = tuple[Callable[..., Tensor], ...]


def gradients(blocks: Blocks) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    first, down, up, last = (
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
        for shape in ((6, 3, 1, 1), (4, 6, 1, 1), (6, 4, 1, 1), (2, 6, 1, 1))
    )
    x = torch.randn(2, 3, 5, 5, generator=draw, dtype=torch.float64)
    one, *inside, two = blocks
    x = one(x, first)
    for block in inside:
        x = block(x, {"down": down, "up": up})
    two(x, last).backward()
    return [tensor.grad for tensor in (first, down, up, last)]


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many masks each block was compiled without."""
    found: list[int] = []
    leave_out = partitioner._use_as_it_comes

    def counted(graph: Any, result: Any) -> None:
        before = len(graph.nodes)
        leave_out(graph, result)
        found.append(before - len(graph.nodes))

    monkeypatch.setattr(partitioner, "_use_as_it_comes", counted)
    torch._dynamo.reset()
    return found


def blocks_with(function: Callable[..., Tensor], keeps: tuple[float, ...]) -> Blocks:
    inside = (compiled(function, part, after_relu="x", before_relu=True) for part in keeps)
    return compiled(start, 1.0, before_relu=True), *inside, compiled(end, 1.0, after_relu="x")


def test_a_relu_between_blocks_is_masked_by_the_second_alone(left_out):
    with without_kernels():
        masked_by_the_second_alone(left_out)


def masked_by_the_second_alone(left_out: list[int]) -> None:
    found = gradients(blocks_with(middle, (1.0, 0.3)))
    assert left_out == [1, 1, 1]
    for own, wanted in zip(found, gradients((start, middle, middle, end)), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)
    blind = gradients((compiled(start, 1.0, before_relu=True), middle, middle, end))
    assert not torch.allclose(blind[0], found[0])  # nothing masks the first one's


@pytest.mark.long
@torch._functorch.config.patch(enable_autograd_cache=False)  # what it remembers is not compiled again
def test_kernels_mask_what_their_graphs_do(left_out):
    found = gradients((compiled(start, 1.0, before_relu=True), compiled(end, 1.0, after_relu="x")))
    assert left_out == [1]
    for own, wanted in zip(found, gradients((start, end)), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [in_two_parts, around_a_collective])
def test_a_block_that_is_no_single_graph_masks_what_leaves_it_itself(left_out, function):
    """The gradient that enters one of its parts is not the one that the next block masked."""
    with without_kernels():
        found = gradients(blocks_with(function, (1.0,)))
    assert left_out == [1]
    for own, wanted in zip(found, gradients((start, middle, end)), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)
