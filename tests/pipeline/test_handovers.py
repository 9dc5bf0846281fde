"""Messages of a pipeline: the play held against torch's own schedules with clocks, and by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.pipeline.cost.pipelines.handovers import Doing, programs
from shardwright.pipeline.cost.pipelines.play import Load, simulate
from shardwright.pipeline.cost.pipelines.schedules import Pipeline, Sending, orders, refusal, sending_of
from shardwright.pipeline.ir.cluster import Overlap
from tests.torch_pipelines import run_torch

GPIPE, ONE, INTER, ZERO = Pipeline.GPIPE, Pipeline.ONE_F_ONE_B, Pipeline.INTERLEAVED, Pipeline.ZERO_BUBBLE


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(Pipeline), st.integers(0, 10**9))
def test_it_is_as_torchs_schedules_with_clocks(pipeline: Pipeline, seed: int) -> None:
    """Every task of every device begins and ends when it does in torch's own loop."""
    rng = random.Random(seed)
    devices, micro = rng.randint(2, 4), rng.randint(1, 9)
    chunks = rng.randint(2, 5) if pipeline is INTER else 1
    if refusal(pipeline, devices, chunks, micro):
        return
    loads = [
        Load(rng.randint(1, 9), rng.randint(6, 20), rng.choice([0, 1, 3, 9]), rng.randint(0, 5))
        for _ in range(devices * chunks)
    ]
    found = simulate(orders(pipeline, devices, micro, chunks), loads)
    ranks = run_torch(pipeline.value, devices, loads, micro)
    for row, rank in zip(found.events, ranks, strict=True):
        assert [(str(event.task), event.start, event.end) for event in row] == rank.ran
    assert found.seconds == max(rank.now for rank in ranks)


def test_a_reader_of_gpipe_waits_for_every_transfer() -> None:
    """Two partitions with tasks of 1 s, transfers of 2 s: each begins when its reader comes to it.

    device 0   |F0|F1|F2|                             |-2-|B0|-2-|B1|-2-|B2|
    device 1      |-2-|F0|-2-|F1|-2-|F2|B0|B1|B2|
    """
    loads = [Load(1, 1, send=2), Load(1, 1)]
    late, free = (simulate(orders(GPIPE, 2, 3), loads, sending) for sending in (Sending.RUNTIME, Sending.EAGER))
    assert [[event.start for event in row] for row in late.events] == [[0, 1, 2, 13, 16, 19], [3, 6, 9, 10, 11, 12]]
    assert late.seconds == 20
    assert [event.start for event in free.events[1]][:3] == [3, 5, 7]  # the links carry one after another


def test_1f1b_meets_both_ways_at_once() -> None:
    """After the first, of 2 s: an activation and a gradient cross together, while neither device computes.

    device 0   |F0|F1|      |-2-|B0|F2|-2-|B1|   |-2-|B2|
    device 1      |-2-|F0|B0|-2-|F1|B1|  |-2-|F2|B2|
    """
    found = simulate(orders(ONE, 2, 3), [Load(1, 1, send=2), Load(1, 1)])
    assert [[event.start for event in row] for row in found.events] == [[0, 1, 7, 8, 11, 15], [3, 4, 7, 8, 11, 12]]


@pytest.mark.parametrize("pipeline", Pipeline)
@pytest.mark.parametrize("sending", Sending)
def test_without_transfers_all_ways_to_send_are_one(pipeline: Pipeline, sending: Sending) -> None:
    loads = [Load(2, 3, weight=1)] * (8 if pipeline is INTER else 4)
    order = orders(pipeline, 4, 12, len(loads) // 4)
    assert simulate(order, loads, sending) == simulate(order, loads, Sending.EAGER)
    assert not any(
        action.doing is Doing.WAIT and action.task.phase == "W" for own in programs(order, sending) for action in own
    )


def test_whose_way_it_is() -> None:
    """Megatron's pipelines send beside computation where they are interleaved; on a CPU nothing does."""
    ways = {
        overlap: [sending_of(Overlap(overlap, 0.8), pipeline) for pipeline in (GPIPE, ONE, INTER, ZERO)]
        for overlap in ("none", "runtime", "megatron")
    }
    assert set(ways["none"]) == {Sending.BLOCKING} and set(ways["runtime"]) == {Sending.RUNTIME}
    assert ways["megatron"] == [Sending.BLOCKING, Sending.BLOCKING, Sending.EAGER, Sending.EAGER]
    assert sending_of(Overlap("runtime", 0.0), GPIPE) is Sending.BLOCKING


def test_what_is_waited_for_takes_longer() -> None:
    loads = [Load(3, 6, send=1, weight=2)] * 8
    for pipeline in Pipeline:
        order = orders(pipeline, 4, 12, 2) if pipeline is INTER else orders(pipeline, 4, 12)
        seconds = {sending: simulate(order, loads, sending).seconds for sending in Sending}
        assert seconds[Sending.EAGER] <= seconds[Sending.RUNTIME] <= seconds[Sending.BLOCKING]
