"""Compiled blocks that make again what takes least to make: which that is, and that they compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch

from shardwright.pipeline.runtime import compiled
from shardwright.pipeline.runtime.compiler import partitioner
from tests.compiling import without_kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
Tensors = dict[str, Tensor]


def bottleneck(x: Tensor, p: Tensors) -> Tensor:
    """Few channels inside: the widest product reads little, and the narrow one much."""
    inside = F.relu(F.batch_norm(F.conv2d(x, p["down"]), None, None, p["scale"], p["shift"], training=True))
    inside = F.relu(F.conv2d(inside, p["along"], padding=1))
    return F.relu(F.conv2d(inside, p["up"]).square() + x)


def of_bottleneck(draw: torch.Generator) -> tuple[Tensor, Tensors]:
    shapes = {"down": (4, 16, 1, 1), "along": (4, 4, 3, 3), "up": (16, 4, 1, 1), "scale": (4,), "shift": (4,)}
    x = torch.randn(2, 16, 6, 6, generator=draw, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    return x, {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def layer(x: Tensor, p: Tensors) -> Tensor:
    """Attention, dropout, views and a norm."""
    read = F.layer_norm(x, (16,), p["scale"], p["shift"])
    q, k, v = F.linear(read, p["qkv"]).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    x = x + F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 16), p["out"])
    return x + F.dropout(F.linear(F.gelu(F.linear(x, p["up"])), p["down"]), 0.3)


def of_layer(draw: torch.Generator) -> tuple[Tensor, Tensors]:
    shapes = {"scale": (16,), "shift": (16,), "qkv": (48, 16), "out": (16, 16), "up": (64, 16), "down": (16, 64)}
    x = torch.randn(2, 6, 16, generator=draw)  # torch 2.11 compiles attention on a CPU for float32 alone
    return x, {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


Given = Callable[[torch.Generator], tuple[Tensor, Tensors]]


def run(function: Callable[..., Tensor], given: Given) -> tuple[list[Tensor], int]:
    """The result and all gradients, and the bytes that are kept for backward beside what is given."""
    x, p = given(torch.Generator().manual_seed(0))
    tensors = [x.requires_grad_(), *(value.requires_grad_() for value in p.values())]
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(x, p)
    known.add(result.untyped_storage().data_ptr())
    gradients = torch.autograd.grad(result.square().sum(), tensors)
    return [result.detach(), *gradients], sum(size for place, size in kept.items() if place not in known)


@pytest.mark.parametrize(
    ("function", "given", "least"),
    [(bottleneck, of_bottleneck, 0.0), (layer, of_layer, 0.35)],  # attention is kept
)
def test_the_less_is_kept_the_same_is_computed(function, given, least):
    with without_kernels():
        wanted, most = run(compiled(function, 1.0), given)
    sizes = [most]
    for keeps in (0.7, 0.4, 0.15):
        with without_kernels():
            found, size = run(compiled(function, keeps, cheapest=True), given)
        near = {"rtol": 1e-9, "atol": 1e-11} if wanted[0].dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(found, wanted, **near)
        assert size <= max(keeps, least) * most + 1300  # means and the like, weights in another order
        sizes.append(size)
    assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.long
def test_kernels_of_what_is_made_again_compute_the_same():
    torch._dynamo.reset()
    torch.testing.assert_close(
        run(compiled(bottleneck, 0.15, cheapest=True), of_bottleneck)[0], run(bottleneck, of_bottleneck)[0]
    )


class Chosen(Exception):
    """Ends compiling when it is known what is dropped."""


def chosen(monkeypatch: Any, function: Callable[..., Tensor], given: Given, keeps: float) -> list[str]:
    """What is dropped, in that order."""
    cheapest = partitioner.cheapest

    def watched(*args: Any) -> Any:
        dropped = cheapest(*args)
        raise Chosen([str(node.target).split(".")[1] + str(list(node.meta["val"].shape)) for node in dropped])

    torch._dynamo.reset()
    monkeypatch.setattr(partitioner, "cheapest", watched)
    with functorch.patch(enable_autograd_cache=False), pytest.raises(BackendCompilerFailed) as ended:
        run(compiled(function, keeps, cheapest=True), given)
    assert isinstance(ended.value.inner_exception, Chosen)
    return list(ended.value.inner_exception.args[0])


def test_a_product_that_reads_little_is_made_again_before_what_is_free_to_torch(monkeypatch):
    found = chosen(monkeypatch, bottleneck, of_bottleneck, 0.01)
    narrow, wide = "[2, 4, 6, 6]", "[2, 16, 6, 6]"
    assert found[:2] == [f"convolution{wide}", f"relu{narrow}"]
    assert found[-1] == f"convolution{narrow}"  # of 16 channels, for 4


def test_products_that_compute_much_come_last_and_attention_is_not_made_again(monkeypatch):
    monkeypatch.setattr(partitioner, "FLOPS_PER_BYTE", 1)
    found = chosen(monkeypatch, layer, of_layer, 0.01)
    kinds = [name.split("[")[0] for name in found]
    assert kinds[:2] == ["mul", "add"] and "mm" in kinds[2:]  # gelu and the norm, before
    assert not any("attention" in kind or kind == "getitem" for kind in kinds)


def test_nothing_is_dropped_where_all_may_be_kept(monkeypatch):
    assert chosen(monkeypatch, bottleneck, of_bottleneck, 1.0) == []
