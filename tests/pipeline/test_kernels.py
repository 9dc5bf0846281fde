"""Seconds of kernels on a card: what must be dearer is, and the queue of a host that runs ahead is counted right."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pipeline.ir.profile import Kernel
from shardwright.pipeline.rates.kernels import (
    ATTENTION,
    BATCH_NORM,
    CONVOLUTIONS,
    MOVES,
    PRODUCTS,
    Card,
    KernelRun,
    kernel_seconds,
    queue_seconds,
)

CARD = Card(products={"bfloat16": 700e12, "float32": 50e12}, memory=4e12)
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
SIZES = st.integers(1, 1 << 36)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "int64"])


def moved(name: str, read: int, written: int, dtype: str = "float32") -> Kernel:
    return Kernel(name, 0.0, read, written, dtype, ((64, 32),))


def product(rows: int, inner: int, columns: int, dtype: str = "bfloat16") -> Kernel:
    """Of two matrices that lie in order, so that rows begin on multiples of the inner size and of the columns."""
    size = 2 if dtype == "bfloat16" else 4
    shapes = ((rows, inner), (inner, columns), (rows, columns))
    read, written = size * (rows * inner + inner * columns), size * rows * columns
    return Kernel(
        "mm", 2.0 * rows * inner * columns, read, written, dtype, shapes, leading=gcd(inner, columns), transposed="nn"
    )


def attention(name: str, length: int = 1024, dtype: str = "bfloat16", **details: bool) -> Kernel:
    shape = (8, 16, length, 64)
    flops = 4.0 * 8 * 16 * length * length * 64
    nbytes = 2 * 8 * 16 * length * 64
    return Kernel(name, flops, 3 * nbytes, nbytes, dtype, (shape,) * 4, **details)


# ----------------------------------------------------------------------------------------------------- one kernel


@given(st.sampled_from([*MOVES, "add", "some_op_of_tomorrow", "_foreach_add"]), SIZES, SIZES, SIZES, DTYPES)
def test_more_bytes_take_no_less_time(name, read, written, more, dtype):
    before = kernel_seconds(moved(name, read, written, dtype), CARD)
    assert CARD.start <= before
    assert before <= kernel_seconds(moved(name, read + more, written, dtype), CARD)
    assert before < kernel_seconds(moved(name, read, written + (1 << 20), dtype), CARD)


@given(
    st.sampled_from([*PRODUCTS, *ATTENTION, *CONVOLUTIONS]),
    st.floats(1e6, 1e15),
    st.floats(1.5, 100),
    SIZES,
    DTYPES,
)
def test_more_flops_take_more_time(name, flops, times, nbytes, dtype):
    kernel = Kernel(name, flops, nbytes, nbytes, dtype, ((64, 64, 64, 64), (64, 64, 3, 3), (64, 64, 64, 64)))
    fewer, more, moving = (
        kernel_seconds(k, CARD)
        for k in (kernel, replace(kernel, flops=times * flops), replace(kernel, read=2 * nbytes))
    )
    assert CARD.start < fewer <= more and fewer <= moving
    if name in CONVOLUTIONS:
        assert fewer < more


@given(st.sampled_from(list(BATCH_NORM)), st.integers(1, 512), st.integers(1, 64), st.integers(2, 56))
def test_larger_images_take_longer_to_normalize(name, channels, samples, side):
    def seconds(size: int) -> float:
        shape = (samples, channels, size, size)
        nbytes = 4 * samples * channels * size * size
        return kernel_seconds(Kernel(name, 0.0, nbytes, nbytes, "float32", (shape,)), CARD)

    assert CARD.start < seconds(side) < seconds(side + 1)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.sampled_from(["bfloat16", "float32"]))
def test_no_product_is_faster_than_the_card(rows, inner, columns, dtype):
    kernel = product(64 * rows, 64 * inner, 64 * columns, dtype)
    assert kernel_seconds(kernel, CARD) > kernel.flops / CARD.products[dtype]


def test_half_precision_is_faster_and_float16_is_bfloat16():
    half, full = (kernel_seconds(product(4096, 4096, 4096, dtype), CARD) for dtype in ("bfloat16", "float32"))
    assert half < full / 5
    assert CARD.rate("float16") == CARD.rate("bfloat16") == 700e12
    assert CARD.rate("float64") == CARD.rate("float32"), "what was not measured is taken as float32"


def test_an_odd_vocabulary_is_slower_than_an_aligned_one():
    """50257 words against 50304: rows that do not begin on 16 bytes run an old kernel, in half precision only."""
    odd, aligned = (kernel_seconds(product(8192, 768, words), CARD) for words in (50257, 50304))
    assert odd > 3 * aligned
    four = replace(product(8192, 768, 50304), leading=4)
    assert aligned < kernel_seconds(four, CARD) < odd
    odd, aligned = (kernel_seconds(product(8192, 768, words, "float32"), CARD) for words in (50257, 50304))
    assert odd == pytest.approx(aligned, rel=0.01)


def test_a_thin_product_reaches_less_of_the_rate():
    wide, thin = product(4096, 1024, 4096), product(16, 1024, 4096)
    wide_rate, thin_rate = (k.flops / kernel_seconds(k, CARD) for k in (wide, thin))
    assert thin_rate < wide_rate / 4


@pytest.mark.parametrize("name", ATTENTION)
def test_causal_is_cheaper_and_dropout_dearer(name):
    """A causal kernel comes with half the FLOPs: that saves time, but not half of it."""
    full = attention(name)
    seconds = kernel_seconds(full, CARD)
    causal = kernel_seconds(replace(full, causal=True, flops=full.flops / 2), CARD)
    assert seconds / 2 < causal < seconds
    assert kernel_seconds(replace(full, dropout=True), CARD) > seconds


def test_the_efficient_kernel_is_slower_in_half_precision_than_flash():
    assert kernel_seconds(attention(EFFICIENT), CARD) > kernel_seconds(attention(FLASH), CARD)


def test_a_length_past_a_tile_pays_for_the_next():
    at, past = (kernel_seconds(replace(attention(FLASH, n), flops=1e12), CARD) for n in (1024, 1025))
    assert past > at


def test_scattered_and_broadcast_memory_is_slower():
    plain = Kernel("add", 0.0, 1 << 28, 1 << 28, "float32", ((1 << 13, 1 << 13), (1 << 13, 1 << 13)))
    seconds = kernel_seconds(plain, CARD)
    assert kernel_seconds(replace(plain, scattered=True), CARD) > seconds
    assert kernel_seconds(replace(plain, shapes=((1 << 13, 1 << 13), (1 << 13,))), CARD) > seconds


def test_a_kernel_without_tensors_takes_its_start():
    assert kernel_seconds(Kernel("add", 0.0, 0, 0, "float32", ()), CARD) == CARD.start


def test_the_tables_name_ops_of_torch():
    named = [*MOVES, *PRODUCTS, *ATTENTION, *CONVOLUTIONS, *BATCH_NORM]
    assert [name for name in named if not hasattr(torch.ops.aten, name)] == []
    assert len(named) == len(set(named)), "an op is priced in one way"


# ---------------------------------------------------------------------------------------------------------- queue

SECONDS = st.floats(1e-7, 1e-2)
PARTS = st.builds(KernelRun, st.lists(SECONDS, max_size=8).map(tuple), SECONDS)
PHASES = st.lists(st.lists(PARTS, max_size=4), min_size=1, max_size=4)


def test_a_slow_host_is_waited_for():
    parts = [KernelRun((1e-6, 2e-6, 3e-6), 1e-3), KernelRun((4e-6, 5e-6), 2e-3)]
    assert queue_seconds([parts]) == (pytest.approx(3 * 1e-3 + 2 * 2e-3 + 5e-6),)


def test_a_fast_host_is_not_seen_but_for_its_first_kernel():
    parts = [KernelRun((1e-3, 2e-3, 3e-3), 1e-9), KernelRun((4e-3,), 2e-9)]
    assert queue_seconds([parts]) == (pytest.approx(1e-9 + 10e-3),)


def test_a_host_that_has_run_ahead_gives_the_next_phase_a_start():
    """While the card is busy with the first phase, the host has issued the second."""
    first, second = KernelRun((1.0,), 0.1), KernelRun((0.01,) * 5, 0.1)
    assert queue_seconds([[first], [second]]) == (pytest.approx(1.1), pytest.approx(0.05))
    assert queue_seconds([[second]]) == (pytest.approx(0.51),)


def test_nothing_takes_no_time():
    assert queue_seconds([]) == () and queue_seconds([[], [KernelRun((), 1.0)]]) == (0.0, 0.0)


@given(PHASES)
def test_the_phases_add_up_to_the_whole(phases):
    found = queue_seconds(phases)
    (whole,) = queue_seconds([[part for phase in phases for part in phase]])
    assert len(found) == len(phases) and min(found) >= 0
    assert sum(found) == pytest.approx(whole)


@given(PHASES)
def test_neither_host_nor_card_is_outrun(phases):
    parts = [part for phase in phases for part in phase]
    card = sum(sum(part.kernels) for part in parts)
    host = sum(part.pace * len(part.kernels) for part in parts)
    whole = sum(queue_seconds(phases))
    assert max(card, host) <= whole * (1 + 1e-9) and whole <= (card + host) * (1 + 1e-9)


def test_a_host_that_waits_loses_its_lead():
    """Four kernels of a second, issued every tenth: ahead, the card is never idle; waiting, it is, for one pace."""
    ahead, waiting = (
        queue_seconds([[KernelRun((1.0,) * 4, 0.1, waits)]])[0] for waits in (frozenset(), frozenset({2}))
    )
    assert ahead == pytest.approx(4.1) and waiting == pytest.approx(4.2)
