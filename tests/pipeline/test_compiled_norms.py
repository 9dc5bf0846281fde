"""Norms in compiled blocks: variances by sums, batch norm as a line, gradients that are written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._functorch import config as functorch
from torch._inductor import config as inductor

from shardwright.pipeline.runtime import compiled
from shardwright.pipeline.runtime.compiler import partitioner
from shardwright.pipeline.runtime.compiler.graph_passes import written
from tests.compiling import without_kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
ATEN = torch.ops.aten
CHANNELS = 6


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """What torch is given to part into forward and backward."""
    found: list[fx.Graph] = []
    inner = partitioner.min_cut_rematerialization_partition

    def partition(graph: fx.GraphModule, inputs: Any, **named: Any) -> Any:
        graph.graph.lint()
        found.append(graph.graph)
        return inner(graph, inputs, **named)

    monkeypatch.setattr(partitioner, "min_cut_rematerialization_partition", partition)
    torch._dynamo.reset()
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield found


@pytest.fixture
def graphs_alone(graphs: list[fx.Graph]) -> Iterator[list[fx.Graph]]:
    """These are run as they are: other tests run the same kernels."""
    with without_kernels():
        yield graphs


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


# --------------------------------------------------------------------------------------------------------- variances


def spread(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)


def bessel(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x, (0, 2, 3), keepdim=True)


@pytest.mark.parametrize(
    ("function", "middle", "kernels"),
    [(spread, 0.0, nullcontext), (bessel, -3.0, without_kernels), (spread, 1e5, nullcontext)],
)
def test_variances_by_sums_are_as_exact_as_the_values(graphs, function, middle, kernels):
    x = torch.randn(8, CHANNELS, 32, 32, generator=torch.Generator().manual_seed(0)) + middle
    with kernels():
        found = compiled(function, 1.0)(x.requires_grad_())
    (graph,) = graphs
    assert not calls(graph, ATEN.var_mean.correction) and len(calls(graph, ATEN.sum.dim_IntList)) == 2
    for own, wanted in zip(found, function(x.double()), strict=True):
        torch.testing.assert_close(own.double(), wanted, rtol=5e-5, atol=2e-6)  # of sums of 8192 numbers


@pytest.mark.parametrize("value", [0.1, -7e4])
def test_equal_values_have_no_variance(graphs, value):
    var, mean = compiled(spread, 1.0)(torch.full((8, CHANNELS, 32, 32), value).requires_grad_())
    assert not calls(graphs[0], ATEN.var_mean.correction)
    assert not var.any() and (mean == value).all()


def test_what_is_no_number_stays_none(graphs):
    x = torch.randn(8, CHANNELS, 32, 32)
    x[0, 0, 0, 0], x[3, 1, 4, 5], x[2, 2, 6, 6] = float("nan"), float("nan"), float("inf")
    var, mean = (one.flatten() for one in compiled(spread, 1.0)(x.requires_grad_()))
    assert var[:3].isnan().all() and not mean[:3].isfinite().any()
    assert var[3:].isfinite().all() and mean[3:].isfinite().all()


def test_few_values_are_left_to_torch(graphs_alone):
    compiled(spread, 1.0)(torch.randn(4, CHANNELS, 5, 5).requires_grad_())
    assert len(calls(graphs_alone[0], ATEN.var_mean.correction)) == 1


# -------------------------------------------------------------------------------------------------------- batch norm


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.2)


def evaluated(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, training=False)


def outcome(function: Callable[..., Tensor], x: Tensor, *weights: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """The result, all gradients, and the running statistics after it."""
    own = [None if weight is None else weight.to(dtype).requires_grad_() for weight in weights]
    x = x.clone().requires_grad_()
    running = torch.linspace(-1, 1, CHANNELS, dtype=dtype), torch.linspace(1, 2, CHANNELS, dtype=dtype)
    result = function(x, *own, *running)
    given = torch.randn(result.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(result.dtype)
    trained = [x, *(weight for weight in own if weight is not None)]
    return [result.detach(), *torch.autograd.grad(result, trained, given), *running]


@pytest.mark.parametrize(
    ("shape", "middle", "affine", "kernels"),
    [
        ((8, CHANNELS, 24, 24), 30.0, (True, True), nullcontext),
        ((8, CHANNELS, 24, 24), 0.0, (False, False), without_kernels),  # a factor and a deviation that are one
        ((16, CHANNELS, 300), 0.0, (True, False), without_kernels),
        ((64, CHANNELS), 30.0, (True, True), without_kernels),
    ],
)
def test_batch_norm_of_coarse_values_is_a_line(graphs, shape, middle, affine, kernels):
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=draw) + middle).bfloat16()
    weights = [torch.rand(CHANNELS, generator=draw) if there else None for there in affine]
    with kernels():
        found = outcome(compiled(norm, 1.0), x, *weights, dtype=torch.float32)
    assert len(calls(graphs[0], written)) == 5  # factor and summand; two factors and the summand of backward
    exact = outcome(norm, x.double(), *weights, dtype=torch.float64)
    for own, wanted in zip(found, exact, strict=True):
        fine = 8e-3 if own.dtype == torch.bfloat16 else 1e-4
        assert own.shape == wanted.shape and torch.isfinite(own).all()
        assert (own.double() - wanted).abs().max() <= fine * wanted.abs().max()


@pytest.mark.parametrize(
    ("function", "dtype"), [(norm, torch.float32), (norm, torch.float64), (evaluated, torch.float32)]
)
def test_batch_norm_of_fine_values_is_torchs(graphs_alone, dtype, function):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, CHANNELS, 24, 24, generator=draw, dtype=dtype) + 30
    weights = [torch.rand(CHANNELS, generator=draw) for _ in range(2)]
    found = outcome(compiled(function, 1.0), x, *weights, dtype=dtype)
    assert not calls(graphs_alone[0], written)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    wanted = outcome(function, x, *weights, dtype=dtype)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------------- gradients


def residual(x: Tensor, scale: Tensor) -> Tensor:
    def scaled(value: Tensor) -> Tensor:
        return F.batch_norm(value, None, None, scale, None, training=True)

    inside = F.relu(scaled(x) + x)  # read twice: its gradient is a sum
    return F.relu(scaled(inside.square()) + inside)


def of_one_kernel(x: Tensor) -> Tensor:
    inside = F.relu(x.exp() - 1)
    return inside.sin() + inside.cos()


def test_a_masked_sum_of_gradients_is_written_once(graphs_alone):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, CHANNELS, 8, 8, generator=draw, dtype=torch.float64).requires_grad_()
    scale = torch.rand(CHANNELS, generator=draw, dtype=torch.float64).requires_grad_()
    found = torch.autograd.grad(compiled(residual, 1.0)(x, scale).square().sum(), [x, scale])
    (own,) = calls(graphs_alone[0], written)
    assert own.args[0].target is ATEN.where.self and list(own.args[0].users) == [own] and len(own.users) > 1
    wanted = torch.autograd.grad(residual(x, scale).square().sum(), [x, scale])
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_what_one_kernel_reads_is_not_written_for_it(graphs_alone):
    x = torch.randn(4, CHANNELS, dtype=torch.float64).requires_grad_()
    (found,) = torch.autograd.grad(compiled(of_one_kernel, 1.0)(x).sum(), [x])
    assert calls(graphs_alone[0], ATEN.where.self) and not calls(graphs_alone[0], written)
    torch.testing.assert_close(found, *torch.autograd.grad(of_one_kernel(x).sum(), [x]))
