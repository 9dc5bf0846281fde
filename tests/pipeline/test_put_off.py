"""Gradients of weights that are put off: the same as autograd's, made when they are asked for, and nothing is held."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from threading import get_ident
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.pipeline import runtime
from shardwright.pipeline.ops.families.matmul import RULES
from shardwright.pipeline.ops.products import PRODUCTS
from shardwright.pipeline.runtime import kept, recompute
from shardwright.pipeline.runtime.pipelining.deferred_weight_grads import DeferredGradients, split_products
from shardwright.pipeline.runtime.programs.mesh import MeshAxis
from shardwright.pipeline.runtime.step import buckets
from shardwright.pipeline.runtime.step.gradients import Gradients
from shardwright.pipeline.runtime.step.passes import StepCopies
from tests.meshes import Simulated, mesh, run_threads

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where the processor has no bf16
NEAR = {"rtol": 1e-12, "atol": 1e-12}


def program() -> Any:
    """What a generated program sees of torch, once its products can put off."""
    module = ModuleType("program")
    module.F, module.torch = F, torch
    split_products(module)
    return module


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def copy_of(tensors: list[Tensor]) -> list[Tensor]:
    kinds = {True: nn.Parameter, False: lambda t: t}
    return [kinds[isinstance(t, nn.Parameter)](t.detach().clone()).requires_grad_(t.requires_grad) for t in tensors]


# ---- one product

CALLS: dict[str, Callable[..., tuple[Any, list[Tensor]]]] = {
    # sizes -> what is called, and its arguments: the activation, the weight, and what is added
    "linear": lambda t, a, m, k, n: (lambda x, w, b: t.F.linear(x, w, b), [draw(a, m, k), draw(n, k), draw(n)]),
    "linear without": lambda t, a, m, k, n: (lambda x, w: t.F.linear(x, w), [draw(a, m, k), draw(n, k)]),
    "mm": lambda t, a, m, k, n: (lambda x, w: t.torch.mm(x, w), [draw(m, k), draw(k, n)]),
    "mm of a view": lambda t, a, m, k, n: (lambda x, w: t.torch.mm(x, w.t()), [draw(m, k), draw(n, k)]),
    "matmul": lambda t, a, m, k, n: (lambda x, w: t.torch.matmul(x, w), [draw(a, 2, m, k), draw(k, n)]),
    "matmul by batch": lambda t, a, m, k, n: (lambda x, w: t.torch.matmul(x, w), [draw(a, m, k), draw(a, k, n)]),
    "bmm": lambda t, a, m, k, n: (lambda x, w: t.torch.bmm(x, w), [draw(a, m, k), draw(a, k, n)]),
    "addmm": lambda t, a, m, k, n: (lambda x, w, b: t.torch.addmm(b, x, w), [draw(m, k), draw(k, n), draw(n)]),
    "baddbmm": lambda t, a, m, k, n: (
        lambda x, w, b: t.torch.baddbmm(b, x, w),
        [draw(a, m, k), draw(a, k, n), draw(1, m, n)],
    ),
}
sizes = st.integers(1, 4)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(CALLS)), sizes, sizes, sizes, sizes, st.booleans(), st.booleans())
def test_a_product_makes_its_weights_gradient_later(
    name: str, a: int, m: int, k: int, n: int, x_trained: bool, twice: bool
) -> None:
    call, (x, *weights) = CALLS[name](program(), a, m, k, n)
    own = [x.requires_grad_(x_trained), *map(nn.Parameter, weights)]
    put_off, again = DeferredGradients(), 1 + twice  # a weight may be read twice
    with put_off.recording():
        found = sum(torch.tanh(call(*own)) for _ in range(again))
    found.square().sum().backward()
    assert all(weight.grad is None for weight in own[1:]) and (own[0].grad is not None) == x_trained
    put_off.run()

    class Plain:
        F, torch = F, torch

    plain, expected = CALLS[name](Plain, a, m, k, n)[0], copy_of(own)
    result = sum(torch.tanh(plain(*expected)) for _ in range(again))
    result.square().sum().backward()
    torch.testing.assert_close(found, result, **NEAR)
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, **NEAR)


def test_the_products_are_those_that_programs_call() -> None:
    for target, product in PRODUCTS.items():
        (rule,) = [rule for rule in RULES if rule.target == target]
        assert rule.linear == ((product.x,), (product.weight,))
        assert rule.addends == (() if product.addend is None else (product.addend,))
        assert getattr({"F": F, "torch": torch}[product.module], product.name)


@pytest.mark.parametrize("trained", [True, False])
def test_products_of_activations_and_of_frozen_weights_are_as_ever(trained: bool) -> None:
    t, put_off = program(), DeferredGradients()
    x, y = draw(3, 4).requires_grad_(trained), draw(4, 2).requires_grad_()
    frozen = nn.Parameter(draw(5, 2), requires_grad=False)
    with put_off.recording():
        found = t.F.linear(t.torch.mm(x, y), frozen)
    assert not put_off.entries
    found.sum().backward()
    expected = [v.detach().clone().requires_grad_() for v in (x, y)]
    F.linear(torch.mm(*expected), frozen).sum().backward()
    torch.testing.assert_close(y.grad, expected[1].grad, **NEAR)
    assert not trained or torch.equal(x.grad, expected[0].grad)
    with torch.no_grad(), put_off.recording():
        assert not t.torch.mm(x, y).requires_grad and not put_off.entries


def test_shapes_that_are_not_split_and_named_arguments_are_torchs() -> None:
    t, put_off = program(), DeferredGradients()
    x, weight, wide = draw(2, 3, 4), nn.Parameter(draw(4)), nn.Parameter(draw(5, 1, 4, 3))
    bias, other = nn.Parameter(draw(3)), nn.Parameter(draw(4, 3))
    with put_off.recording():
        found = [
            t.torch.matmul(x, weight).sum(),
            t.torch.matmul(x, wide).sum(),
            t.torch.addmm(bias, x[0], other, beta=2.0).sum(),
        ]
    assert not put_off.entries
    sum(found).backward()
    assert all(tensor.grad is not None for tensor in (weight, wide, bias, other))


def test_under_autocast_the_parameter_gets_a_gradient_of_its_own_type() -> None:
    t, put_off = program(), DeferredGradients()
    x = draw(4, 6, dtype=torch.float32).requires_grad_()
    weight, bias = nn.Parameter(draw(5, 6, dtype=torch.float32)), nn.Parameter(draw(5, dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16), put_off.recording():
        found = t.F.linear(x, weight, bias)
    assert found.dtype == torch.bfloat16
    found.float().square().sum().backward()
    assert weight.grad is None
    put_off.run()
    own = copy_of([x, weight, bias])
    with torch.autocast("cpu", torch.bfloat16):
        F.linear(*own).float().square().sum().backward()
    for one, other in zip((x, weight, bias), own, strict=True):
        assert one.grad.dtype == torch.float32
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=2e-2)


# ---- a pass


def block(t: Any, x: Tensor, p: list[Tensor], call: Callable[..., Tensor]) -> Tensor:
    """A norm makes the gradients of its weights at once; the last product reads a weight once more."""
    h = F.layer_norm(x, (6,), p[0], p[1])
    h = F.gelu(call(t.F.linear, h, p[2], p[3]))
    return x + call(t.torch.matmul, call(t.F.linear, h, p[4]), p[2].t()[:, :6])


def parameters() -> list[Tensor]:
    return [nn.Parameter(draw(*shape)) for shape in ((6,), (6,), (12, 6), (12,), (6, 12))]


def plainly(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return function(*arguments)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("call", [plainly, kept])
def test_recompute_regions(again: bool, call: Callable[..., Tensor]) -> None:
    t, put_off = program(), DeferredGradients()
    x, own = draw(3, 6).requires_grad_(), parameters()
    runs: list[int] = []

    def region(x: Tensor) -> Tensor:
        runs.append(1)
        return block(t, x, own, call)

    with put_off.recording():
        y = recompute(region, x) if again else region(x)
        y = t.F.linear(y, own[4][:, :6])  # a part of a weight: made with the rest
    y.square().sum().backward()
    assert len(runs) == 1 + again
    assert own[0].grad is not None and (own[3].grad is None) != again, "a region drops what would be put off"
    put_off.run()
    assert len(runs) == 1 + again, "what is put off runs no region"
    expected, x_expected = copy_of(own), x.detach().clone().requires_grad_()
    truth = block(program(), x_expected, expected, plainly)
    F.linear(truth, expected[4][:, :6]).square().sum().backward()
    torch.testing.assert_close(x.grad, x_expected.grad, **NEAR)
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, **NEAR)


def test_memory_is_let_go() -> None:
    """After I: what the weights' gradients are made of and no more; after W nothing."""
    t, put_off, watched = program(), DeferredGradients(), {}
    weights = [nn.Parameter(draw(8, 8)) for _ in range(3)]

    def run() -> None:
        x = draw(4, 8).requires_grad_()
        with put_off.recording():
            for number, weight in enumerate(weights):
                watched[f"x{number}"] = StorageWeakRef(x.untyped_storage())
                x = torch.sigmoid(t.F.linear(x, weight))
                watched[f"y{number}"] = StorageWeakRef(x.untyped_storage())
        x.sum().backward()

    run()
    gc.collect()
    alive = {name for name, memory in watched.items() if not memory.expired()}
    assert alive == {"x0", "x1", "x2", "y0", "y1"}  # an x is the y before it
    put_off.run()
    gc.collect()
    assert all(memory.expired() for memory in watched.values()) and not put_off.entries


def test_the_last_pass_tells_when_a_parameter_is_done() -> None:
    t, put_off, told = program(), DeferredGradients(), []
    first, second, bias = nn.Parameter(draw(4, 4)), nn.Parameter(draw(4, 4)), nn.Parameter(draw(4))
    x = draw(2, 4).requires_grad_()
    with put_off.recording():
        y = t.F.linear(t.F.linear(t.F.linear(x, first, bias), second), first)
    y.sum().backward()
    assert put_off.leaves() == {id(first), id(second), id(bias)}
    names = {id(first): "first", id(second): "second", id(bias): "bias"}
    put_off.run(lambda leaves: told.append({names[id(leaf)] for leaf in leaves}))
    assert told == [set(), {"second"}, {"first", "bias"}]


def test_buckets_are_sent_as_the_pass_tells() -> None:
    tensors = [nn.Parameter(torch.zeros(200_000)) for _ in range(3)]
    with mock.patch.object(buckets, "axis_of", lambda name: MeshAxis(1, 0, None)):
        own = Gradients(tensors, [("R", "d0", "R")] * 3, ["d0"], first_mb=0.1, bucket_mb=0.1)
    own.start(armed=False)
    for tensor in (*tensors, *tensors):
        tensor.sum().backward()
    own.finish([tensors[0]])
    assert own.next == 0, "buckets go in one order: that of the last parameter is the first"
    own.finish([tensors[2], torch.empty(0)])
    assert own.next == 1
    own.finish([tensors[1]])
    assert own.next == 3
    own.wait()
    assert all(torch.equal(tensor.grad, torch.full_like(tensor, 2)) for tensor in tensors)


# ---- conversions of weights


def converted(recorded: bool) -> dict[tuple[int, ...], Any]:
    """Gathered weights and norms of a link, of which one collective brings all gradients; each rank has rows."""
    torch.default_generator.manual_seed(3)
    whole = [draw(6), draw(6), draw(8, 6), draw(8), draw(6, 8)]
    inputs = draw(2, 3, 6)
    calls: Counter[int] = Counter()  # of collectives that bring gradients, by thread
    scatter = Simulated.reduce_scatter

    def counted(*arguments: Any, **named: Any) -> None:
        calls[get_ident()] += 1
        scatter(*arguments, **named)

    def rank(at: tuple[int, ...]) -> Any:
        own = [nn.Parameter(w.chunk(2)[at[0]].clone()) for w in whole]
        x = inputs[at[0]].clone().requires_grad_()
        t, put_off, memory = program(), DeferredGradients(), []

        def forward() -> Tensor:
            with runtime.keep_shards():
                scale, shift, up, bias, down = runtime.regather_together(*((p, 0) for p in own), axis="d0")
                last = runtime.all_gather(own[4], axis="d0", dim=0)
                memory.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (up, down))
                h = F.layer_norm(x, (6,), scale, shift)
                h = t.F.linear(F.gelu(t.F.linear(h, up, bias)), down)
                return t.F.linear(F.gelu(t.F.linear(h, up, bias)), last).square().sum()

        with put_off.recording() if recorded else nullcontext():
            loss = forward()
        dropped = all(tensor.expired() for tensor in memory)
        loss.backward()
        before = calls[get_ident()], [p.grad is None for p in own]
        put_off.run()
        return x.grad, [p.grad for p in own], dropped, before, calls[get_ident()]

    with mock.patch.object(Simulated, "reduce_scatter", counted):
        return run_threads(rank, mesh(2))


def test_conversions_run_once_a_pass_with_what_is_put_off() -> None:
    plain, later = converted(False), converted(True)
    for at, (x, own, dropped, before, calls) in later.items():
        assert dropped, "a gathered weight is held after the forward pass"
        assert before[0] == 0 and all(before[1]) and calls >= 2
        for one, other in zip((x, *own), (plain[at][0], *plain[at][1]), strict=True):
            torch.testing.assert_close(one, other, **NEAR)
        assert calls == plain[at][4]


def test_copies_of_a_step_take_the_gradients_of_all_passes() -> None:
    """The last pass of a step undoes the making of copies, when all others have put theirs off and made them."""
    t, weight, table = program(), nn.Parameter(draw(4, 4)), nn.Parameter(draw(4, 4))
    copies = StepCopies({"doubled": weight * 2, "same": table})
    passes, inputs = [], [draw(3, 4) for _ in range(3)]
    for x in inputs:
        put_off = DeferredGradients(copies.stand_ins.values())
        with put_off.recording():
            y = t.F.linear(t.F.linear(x, copies.stand_ins["doubled"]), copies.stand_ins["same"])
        y.square().sum().backward()
        passes.append(put_off)
    assert copies.stand_ins["doubled"].grad is None
    for put_off in passes[:-1]:
        put_off.run()
    assert weight.grad is None and copies.stand_ins["doubled"].grad is not None
    passes[-1].entries.insert(0, copies)
    assert {id(weight), id(table)} <= passes[-1].leaves()
    done: list[int] = []
    passes[-1].run(lambda leaves: done.extend(map(id, leaves)))
    assert {id(weight), id(table)} == set(done[-2:])
    expected = copy_of([weight, table])
    for x in inputs:
        F.linear(F.linear(x, expected[0] * 2), expected[1]).square().sum().backward()
    torch.testing.assert_close([weight.grad, table.grad], [e.grad for e in expected], **NEAR)
