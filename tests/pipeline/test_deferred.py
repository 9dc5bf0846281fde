"""Running statistics that change once a step: those of all its micro-batches together, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.pipeline.runtime.compiler.compiled import compiled
from shardwright.pipeline.runtime.programs.local_ops import batch_norm
from shardwright.pipeline.runtime.recompute.regions import recompute
from shardwright.pipeline.runtime.step.running_stats import ChannelMoments, DeferredStatistics, combined, statistics_of
from tests.compiling import without_kernels

CHANNELS = 3
COUNTS = st.lists(st.integers(2, 7), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**16)
unhurried = settings(deadline=None, max_examples=40)


def numbers(counts: list[int], seed: int, *after: int) -> list[Tensor]:
    """Micro-batches of these sizes, each with a mean and a spread of its own."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, CHANNELS, *after, generator=draw, dtype=torch.float64) * (1 + n) + 3 * n
        for n, count in enumerate(counts)
    ]


class Norm:
    """A batch norm with what torch keeps of it."""

    def __init__(self) -> None:
        self.mean, self.var = (torch.rand(CHANNELS, dtype=torch.float64) for _ in range(2))
        self.weight, self.bias = (torch.rand(CHANNELS, dtype=torch.float64) for _ in range(2))
        self.counter = torch.tensor(5)
        named = {"a.running_mean": self.mean, "a.running_var": self.var, "a.num_batches_tracked": self.counter}
        self.deferred = DeferredStatistics(named.items())

    def __call__(self, x: Tensor, momentum: float = 0.1) -> Tensor:
        self.counter.add_(1)
        return batch_norm(x, self.weight, self.bias, self.mean, self.var, True, momentum, 1e-5)

    def after(self, batches: list[Tensor], momentum: float = 0.1) -> list[Tensor]:
        """What its statistics come to, of one batch of all."""
        whole, kept = (
            torch.cat([x.transpose(0, 1).flatten(1) for x in batches], 1),
            [self.mean.clone(), self.var.clone()],
        )
        F.batch_norm(whole.t(), *kept, None, None, True, momentum, 1e-5)
        return kept


@unhurried
@given(COUNTS, SEEDS)
def test_moments_of_parts_are_those_of_the_whole(counts: list[int], seed: int) -> None:
    parts = numbers(counts, seed)
    found = combined(ChannelMoments(len(x), x.mean(0), x.var(0, correction=0) * len(x)) for x in parts)
    whole = torch.cat(parts)
    assert found.numbers == len(whole)
    torch.testing.assert_close(found.mean, whole.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.squares / (found.numbers - 1), whole.var(0), rtol=1e-12, atol=1e-12)


@unhurried
@given(COUNTS, SEEDS, st.sampled_from([(), (4,), (2, 3)]))
def test_a_step_changes_statistics_once(counts: list[int], seed: int, after: tuple[int, ...]) -> None:
    norm, batches = Norm(), numbers(counts, seed, *after)
    expected, before = norm.after(batches, 0.3), norm.mean.clone()
    with norm.deferred.step():
        for x in batches:
            own = F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.3, 1e-5)
            torch.testing.assert_close(norm(x, 0.3), own, rtol=1e-12, atol=1e-12)
            assert torch.equal(norm.mean, before), "not before the step ends"
    torch.testing.assert_close([norm.mean, norm.var], expected, rtol=1e-12, atol=1e-12)
    assert int(norm.counter) == 6


def test_steps_follow_one_another_and_nothing_is_left_of_the_last() -> None:
    norm = Norm()
    for step in range(3):
        batches = numbers([4, 2, 3], step)
        expected = norm.after(batches)
        with norm.deferred.step():
            for x in batches:
                norm(x)
        torch.testing.assert_close([norm.mean, norm.var], expected, rtol=1e-12, atol=1e-12)
    assert int(norm.counter) == 8
    (x,) = numbers([4], 9)
    expected = norm.after([x])
    norm(x)  # outside a step they change at once
    torch.testing.assert_close([norm.mean, norm.var], expected, rtol=1e-12, atol=1e-12)


def test_a_norm_that_is_called_twice_counts_all_that_it_is_given() -> None:
    norm, batches = Norm(), numbers([4, 6], 0)
    expected = norm.after([*batches, *(2 * x for x in batches)])
    with norm.deferred.step():
        for x in batches:
            norm(x), norm(2 * x)
    torch.testing.assert_close([norm.mean, norm.var], expected, rtol=1e-12, atol=1e-12)
    assert int(norm.counter) == 6


@unhurried
@given(COUNTS, SEEDS)
def test_the_second_run_of_a_region_does_not_count(counts: list[int], seed: int) -> None:
    norm, batches = Norm(), numbers(counts, seed)
    expected = norm.after(batches)
    runs = 0

    def region(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return norm(x).exp().square()

    with norm.deferred.step():
        for x in batches:
            recompute(region, x.requires_grad_()).sum().backward()
    assert runs == 2 * len(batches)
    torch.testing.assert_close([norm.mean, norm.var], expected, rtol=1e-12, atol=1e-12)


def block(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return batch_norm(torch.tanh(x), None, None, mean, var, True, 0.1, 1e-5).square()


@pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
def test_blocks_that_are_compiled_collect_inside_regions_and_out_of_them() -> None:
    with without_kernels():
        collects_inside_regions_and_out_of_them(compiled(block, keeps=0.5))


def collects_inside_regions_and_out_of_them(called: Callable[..., Tensor]) -> None:
    norm = Norm()
    for step, again in enumerate((False, True, False, True)):
        batches = numbers([4, 4, 4], step)
        expected = norm.after([torch.tanh(x) for x in batches])
        with norm.deferred.step():
            for x in batches:
                given = x.requires_grad_(), norm.mean, norm.var
                (recompute(called, *given) if again else called(*given)).sum().backward()
        torch.testing.assert_close([norm.mean, norm.var], expected, rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_each_micro_batch() -> None:
    norm, batches = Norm(), numbers([4, 6], 0)
    plain = [x.clone().requires_grad_() for x in batches]
    for x in plain:
        F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.1, 1e-5).pow(3).sum().backward()
    with norm.deferred.step():
        for x in batches:
            norm(x.requires_grad_()).pow(3).sum().backward()
    torch.testing.assert_close([x.grad for x in batches], [x.grad for x in plain], rtol=1e-12, atol=1e-12)


def test_statistics_in_a_low_type_are_combined_in_a_wide_one() -> None:
    norm, batches = Norm(), numbers([8] * 40, 0)
    norm.mean, norm.var = norm.mean.bfloat16(), norm.var.bfloat16()
    norm.weight, norm.bias = norm.weight.bfloat16(), norm.bias.bfloat16()
    batches = [x.bfloat16() for x in batches]
    whole = torch.cat(batches).double()
    expected = [norm.mean.double().lerp(whole.mean(0), 0.1), norm.var.double().lerp(whole.var(0), 0.1)]
    with norm.deferred.step():
        for x in batches:
            norm(x)
    assert norm.mean.dtype is torch.bfloat16
    torch.testing.assert_close([norm.mean.double(), norm.var.double()], expected, rtol=0.02, atol=0.02)


def test_a_step_that_fails_changes_no_statistics() -> None:
    norm, (x,) = Norm(), numbers([4], 0)
    before = norm.mean.clone()
    with pytest.raises(KeyError), norm.deferred.step():
        norm(x)
        raise KeyError
    assert torch.equal(norm.mean, before)
    expected = norm.after([x])
    with norm.deferred.step():
        norm(x)
    torch.testing.assert_close([norm.mean, norm.var], expected, rtol=1e-12, atol=1e-12)


def test_the_setting_says_which() -> None:
    norm, (x,) = Norm(), numbers([4], 0)
    before = norm.mean.clone()
    with statistics_of("exact", [])():
        norm(x)
        assert not torch.equal(norm.mean, before)
    before = norm.mean.clone()
    with statistics_of("deferred", [])():
        norm(x)
        assert torch.equal(norm.mean, before)
    assert not torch.equal(norm.mean, before)
