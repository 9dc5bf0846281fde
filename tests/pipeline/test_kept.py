"""Results that a recompute region keeps: the step is the plain one, they are made once, and nothing else is held."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.pipeline import runtime
from shardwright.pipeline.ir.plan import Region
from shardwright.pipeline.runtime import kept, recompute
from shardwright.pipeline.runtime.context import step
from shardwright.pipeline.runtime.recompute.regions import replaying
from tests.meshes import mesh, run_threads
from tests.plans import random_regions

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where the processor has no bf16

BATCH, LENGTH, WIDTH, HEADS = 2, 4, 8, 2
Call = Callable[..., Any]  # how a block calls a function: by itself, or through `kept`


# ------------------------------------------------------------------------------------- blocks that are drawn at random


def linear(x: Tensor, p: list[Tensor], call: Call) -> Tensor:
    return call(F.linear, x, p[0], p[1])


def residual(x: Tensor, p: list[Tensor], call: Call) -> Tensor:
    h = F.gelu(call(F.linear, F.layer_norm(x, (WIDTH,), p[0], p[1]), p[2]))
    return x + call(F.linear, h, p[3])


def attention(x: Tensor, p: list[Tensor], call: Call, dropout: float = 0.0) -> Tensor:
    """Query, key and value are views of one result."""
    parts = call(F.linear, F.layer_norm(x, (WIDTH,)), p[0]).chunk(3, -1)
    query, key, value = (t.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for t in parts)
    mixed = call(F.scaled_dot_product_attention, query * 1.5, key, value, None, dropout, True)
    return x + call(F.linear, mixed.transpose(1, 2).reshape(x.shape), p[1])


def random_attention(x: Tensor, p: list[Tensor], call: Call) -> Tensor:
    return F.dropout(attention(x, p, call, 0.3), 0.2)


def product(x: Tensor, p: list[Tensor], call: Call) -> Tensor:
    """The same tensor twice, and by keyword."""
    scores = call(torch.matmul, x, x.transpose(1, 2))
    return x + call(torch.bmm, scores.tanh(), mat2=F.linear(x, p[0]))


def statistics(x: Tensor, p: list[Tensor], call: Call) -> Tensor:
    """Of an op that keeps its result and more."""
    return call(F.layer_norm, call(torch.tanh, x), (WIDTH,), p[0], p[1])


def several(x: Tensor, p: list[Tensor], call: Call) -> Tensor:
    """Results that are views of the argument, and one that has no gradient."""
    left, right = call(torch.split, x, WIDTH // 2, -1)
    largest, places = call(F.max_pool1d_with_indices, torch.cat((right, left.tanh()), -1) * p[0], 2)
    return largest.repeat_interleave(2, -1) + places.sum(-1, keepdim=True)


def dropped(x: Tensor, p: list[Tensor], call: Call) -> Tensor:
    return F.dropout(call(F.dropout, x * p[0], 0.3), 0.2)


PRODUCTS = (linear, residual, attention, random_attention)  # what autocast casts, and plans keep
BLOCKS = (*PRODUCTS, product, statistics, several, dropped)
SHAPES: dict[Callable[..., Tensor], list[tuple[int, ...]]] = {
    linear: [(WIDTH, WIDTH), (WIDTH,)],
    residual: [(WIDTH,), (WIDTH,), (2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)],
    attention: [(3 * WIDTH, WIDTH), (WIDTH, WIDTH)],
    random_attention: [(3 * WIDTH, WIDTH), (WIDTH, WIDTH)],
    product: [(WIDTH, WIDTH)],
    statistics: [(WIDTH,), (WIDTH,)],
    several: [(WIDTH,)],
    dropped: [(WIDTH,)],
}


@dataclass
class Model:
    """Blocks one after another; each call of a block is kept or not as it is drawn."""

    blocks: list[Callable[..., Tensor]]
    keeps: list[bool]
    dtype: torch.dtype
    counts: dict[int, int] = field(default_factory=dict)  # number of a call in the model -> how often it was made

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.parameters = [
            [torch.randn(shape, generator=draw, dtype=self.dtype).mul(0.5).requires_grad_() for shape in SHAPES[block]]
            for block in self.blocks
        ]
        self.x = torch.randn(BATCH, LENGTH, WIDTH, generator=draw, dtype=self.dtype).requires_grad_()

    def block(self, number: int, x: Tensor, keep: bool) -> Tensor:
        calls = iter(range(10 * number, 10 * number + 10))  # a block has fewer

        def call(function: Call, *arguments: Any, **named: Any) -> Any:
            own = next(calls)

            def counted(*arguments: Any, **named: Any) -> Any:
                self.counts[own] = self.counts.get(own, 0) + 1
                return function(*arguments, **named)

            chosen = keep and self.keeps[own % len(self.keeps)]
            return kept(counted, *arguments, **named) if chosen else counted(*arguments, **named)

        return self.blocks[number](x, self.parameters[number], call)

    def forward(self, regions: tuple[Region, ...], x: Tensor, keep: bool) -> Tensor:
        for region in regions:
            if region.recompute:
                x = recompute(lambda x, inner=region.inner: self.forward(inner, x, keep), x)
            else:
                x = self.block(region.first, x, keep)
        return x

    def step(self, regions: tuple[Region, ...], keep: bool, autocast: bool = False) -> list[Tensor]:
        """The loss, and the gradients of everything."""
        self.counts.clear()
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            loss = self.forward(regions, self.x, keep).pow(2).mean()
        leaves = [self.x, *(p for own in self.parameters for p in own)]
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def plainly(count: int) -> tuple[Region, ...]:
    return tuple(Region(n, n, False, ()) for n in range(count))


def check(model: Model, regions: tuple[Region, ...], autocast: bool = False) -> None:
    plain = model.step(plainly(len(model.blocks)), keep=False, autocast=autocast)
    found = model.step(regions, keep=True, autocast=autocast)
    for number, (one, other) in enumerate(zip(found, plain, strict=True)):
        assert torch.equal(one, other), f"result {number} differs by {(one - other).abs().max()}"
    for region in regions:
        if region.recompute and any(inner.recompute for inner in region.inner):
            continue
        for call, count in model.counts.items():
            if region.first <= call // 10 <= region.last:
                own = model.keeps[call % len(model.keeps)]
                assert count == 1 or (region.recompute and not own), f"call {call} was made {count} times"


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=7),
    st.sampled_from([torch.float64, torch.float32]),
    st.integers(0, 10_000),
)
def test_the_step_is_the_plain_one(blocks, keeps, dtype, seed):
    """To the bit: what is kept is what the first run made, what is computed again is the same."""
    draw = random.Random(seed)
    check(Model(blocks, keeps, dtype), random_regions(0, len(blocks) - 1, draw, draw.randint(1, 3)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(PRODUCTS), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.integers(0, 10_000),
)
def test_the_step_is_the_plain_one_under_autocast(blocks, keeps, seed):
    draw = random.Random(seed)
    regions = random_regions(0, len(blocks) - 1, draw, draw.randint(1, 2))
    check(Model(blocks, keeps, torch.float32), regions, autocast=True)


def test_the_random_blocks_do_what_they_are_for():
    """One region around all of them: every call is kept, and made once; without `kept` it is made twice."""
    whole = (Region(0, len(BLOCKS) - 1, True, plainly(len(BLOCKS))),)
    model = Model(list(BLOCKS), [True], torch.float64)
    check(model, whole)
    assert len(model.counts) == 16 and set(model.counts.values()) == {1}
    model.step(whole, keep=False)
    assert sum(model.counts.values()) > 1.9 * len(model.counts)  # the second run ends before the last calls


# --------------------------------------------------------------------------------------------------- what is in memory


class Watched:
    """Layers whose tensors are watched by name; those of the second run have a prime."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.weights = [torch.randn(WIDTH, WIDTH, dtype=dtype, requires_grad=True) for _ in range(2)]
        self.x = torch.randn(BATCH, WIDTH, dtype=dtype, requires_grad=True)
        self.memory: dict[str, StorageWeakRef] = {}

    def watch(self, name: str, tensor: Tensor) -> Tensor:
        self.memory[f"{name}'" if replaying() else name] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def alive(self) -> set[str]:
        return {name for name, memory in self.memory.items() if not memory.expired()}

    def region(self, x: Tensor) -> Tensor:
        given = self.watch("given", torch.tanh(x * 2))
        made = self.watch("made", kept(F.linear, given, self.weights[0]))
        passed = self.watch("passed", torch.sigmoid(made * 2))
        last = self.watch("last", kept(F.linear, passed, self.weights[1]))
        return self.watch("end", torch.tanh(last * 2))


def test_arguments_go_and_results_stay_until_backward_has_used_them():
    model = Watched()
    y = recompute(model.region, model.x).sum()
    assert model.alive() == {"made", "last"}
    y.backward()
    assert model.alive() == set()
    assert all(w.grad is not None for w in (model.x, *model.weights))


def test_casts_of_arguments_go_too():
    model = Watched(torch.float32)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = recompute(model.region, model.x).float().sum()
    assert model.alive() == {"made", "last"}
    y.backward()
    assert model.alive() == set()


def test_what_another_region_holds_is_dropped_with_it():
    model = Watched()
    y = recompute(lambda x: torch.tanh(recompute(model.region, x)), model.x).sum()
    assert model.alive() == set()
    y.backward()
    assert model.alive() == set()


@pytest.mark.parametrize("nested", [False, True])
def test_without_a_backward_nothing_stays(nested):
    """A loss that is dropped, as one that is only looked at: no circle holds what was kept."""
    model = Watched()
    x = model.watch("x", torch.randn(BATCH, WIDTH, dtype=torch.float64).requires_grad_())
    y = recompute((lambda x: recompute(model.region, x)) if nested else model.region, x)
    del x, y
    gc.collect()
    assert model.alive() == set()


def test_results_that_nobody_uses_go_with_the_step():
    model = Watched()
    x = model.watch("x", torch.randn(BATCH, WIDTH, dtype=torch.float64).requires_grad_())

    def region(x: Tensor) -> Tensor:
        model.region(x)
        return torch.tanh(x * 3)

    recompute(region, x).sum().backward()
    del x
    gc.collect()
    assert model.alive() == set()


def test_a_second_run_lets_go_of_an_argument_with_its_backward():
    """The arguments of the last call are gone when the gradients of the first come."""
    model, seen = Watched(), []

    def region(x: Tensor) -> Tensor:
        x.register_hook(lambda _: seen.append(model.alive()))
        return model.region(x)

    recompute(region, model.x * 1.0).sum().backward()
    assert seen and all("passed'" not in alive and "last" not in alive for alive in seen)


def test_a_second_run_lets_go_of_a_result_with_its_name():
    """What is computed of it does not keep it, as it would keep a leaf."""
    weight, expired = torch.randn(WIDTH, WIDTH, requires_grad=True), []

    def region(x: Tensor) -> Tensor:
        made = kept(F.linear, torch.tanh(x), weight)
        memory = StorageWeakRef(made.untyped_storage())
        passed = made * 2
        del made
        expired.append(memory.expired())
        return torch.tanh(passed)

    recompute(region, torch.randn(BATCH, WIDTH)).sum().backward()
    assert expired == [False, True]


def test_an_error_in_a_region_leaves_no_region_behind():
    model = Watched()

    def broken(x: Tensor) -> Tensor:
        model.region(x)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        recompute(broken, model.x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # outside of a region it is a plain call
        y = kept(F.linear, model.x, model.weights[0])
    assert y.grad_fn is not None and model.alive() == set()


# --------------------------------------------------------------------------------------------------- without gradients


def test_without_gradients_it_is_a_plain_call():
    calls: list[str] = []
    weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64, requires_grad=True)

    def product(name: str, x: Tensor) -> Tensor:
        calls.append(name)
        return F.linear(x, weight)

    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = kept(product, "inside", x)
        return torch.tanh(kept(product, "kept", x) * scale)

    with torch.no_grad():
        plain = recompute(region, x)
    assert calls == ["inside", "kept"] and not plain.requires_grad
    calls.clear()
    y = recompute(region, x)
    assert torch.equal(y, plain)
    found = torch.autograd.grad(y.sum(), (x, weight))
    assert sorted(calls) == ["inside", "inside", "kept"]
    for one, other in zip(found, torch.autograd.grad(region(x).sum(), (x, weight)), strict=True):
        assert torch.equal(one, other)


def test_frozen_weights_and_inputs_without_gradients():
    """Nothing of the first product needs a gradient, of the second only the weight."""
    frozen, trained = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True)
    x, calls = torch.randn(BATCH, WIDTH), []

    def region(x: Tensor, call: Call) -> Tensor:
        def counted(*arguments: Tensor) -> Tensor:
            calls.append(1)
            return F.linear(*arguments)

        return torch.tanh(call(counted, torch.tanh(call(counted, x, frozen)), trained))

    (found,) = torch.autograd.grad(recompute(lambda x: region(x, kept), x).sum(), trained)
    assert len(calls) == 2
    (plain,) = torch.autograd.grad(region(x, lambda function, *a: function(*a)).sum(), trained)
    assert torch.equal(found, plain)


# -------------------------------------------------------------------------------- gathered weights and kept collectives


def gathered_layers(x: Tensor, shards: list[Tensor], call: Call, watch: list[StorageWeakRef], counts: list[int]):
    """Each weight is gathered, its product summed over the ranks as Megatron's, both kept where `call` keeps."""

    def summed(x: Tensor, axis: str) -> Tensor:
        counts.append(1)
        return runtime.all_reduce(x, axis=axis)

    for shard in shards:
        whole = runtime.regather(shard, axis="d0", dim=0)
        watch.append(StorageWeakRef(whole.untyped_storage()))
        x = torch.tanh(call(summed, call(F.linear, x, whole), axis="d0"))
    return x


def run_gathered(keep: bool, regions: int) -> dict:
    torch.default_generator.manual_seed(3)
    whole = torch.randn(2, 6, 6, dtype=torch.float64)
    inputs = torch.randn(2, BATCH, 6, dtype=torch.float64)

    def rank(at):
        shards = [w.chunk(2, 0)[at[0]].clone().requires_grad_() for w in whole]
        x, watched, counts = inputs[at[0]].clone().requires_grad_(), [], []

        def links(x: Tensor, own: list[Tensor]) -> Tensor:
            call = kept if keep else lambda function, *a, **named: function(*a, **named)
            return gathered_layers(x, own, call, watched, counts)

        with runtime.keep_shards():
            if regions == 2:
                y = recompute(lambda x: links(recompute(lambda x: links(x, shards[:1]), x), shards[1:]), x)
            else:
                y = recompute(lambda x: links(x, shards), x) if regions else links(x, shards)
        alive = sum(not memory.expired() for memory in watched)
        y.sum().backward()
        left = sum(not memory.expired() for memory in watched)
        return alive, left, len(counts), [x.grad, *(s.grad for s in shards)]

    return run_threads(rank, mesh(2))


@pytest.mark.parametrize(("regions", "sums"), [(0, 2), (1, 2), (2, 3)])
def test_gathered_weights_and_kept_collectives(regions, sums):
    """Of a kept product's weight backward has the shard alone, and the collective is not run again."""
    plain, found = run_gathered(False, 0), run_gathered(True, regions)
    for at, (alive, left, count, gradients) in found.items():
        assert (alive, left, count) == (0, 0, sums)
        for one, other in zip(gradients, plain[at][3], strict=True):
            assert torch.equal(one, other)
    assert not step.gathered


def test_whether_a_region_runs_again_is_a_matter_of_its_thread():
    """Two that run again at once, and end in the other order than they began."""
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    told: list[bool] = []

    def region(meet):
        def run(x):
            if replaying():
                meet()
            return x.exp()

        x = torch.ones(2, requires_grad=True)
        recompute(run, x).sum().backward()
        told.append(replaying())

    def one() -> None:
        first_in.set()
        second_in.wait(600)

    def two() -> None:
        first_in.wait(600)
        second_in.set()
        first_out.wait(600)

    other = threading.Thread(target=region, args=(two,))
    other.start()
    region(one)
    first_out.set()
    other.join()
    assert told == [False, False] and not replaying()


def test_autocast_does_what_it_would_without_kept():
    """It runs a softmax in float32: an argument is not made less precise because its result is kept."""
    x = torch.linspace(-3, 3, 12).view(3, 4).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain = torch.softmax(x.exp(), -1)
        found = recompute(lambda x: kept(torch.softmax, x.exp(), -1), x)
    assert torch.equal(found, plain) and found.dtype == torch.float32
    wanted = torch.autograd.grad(plain.square().sum(), x)
    assert torch.equal(torch.autograd.grad(found.square().sum(), x)[0], wanted[0])
