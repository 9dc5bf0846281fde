"""Orders as torch has them, pictures of them, and the closed forms against the simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.pipeline.cost.pipelines.play import Load, PlayedSchedule, simulate
from shardwright.pipeline.cost.pipelines.schedules import (
    Pipeline,
    ScheduleError,
    Sending,
    in_flight,
    orders,
    refusal,
    weights_of,
)
from tests.partition_cases import estimate

GPIPE, ONE, INTER, ZERO = Pipeline.GPIPE, Pipeline.ONE_F_ONE_B, Pipeline.INTERLEAVED, Pipeline.ZERO_BUBBLE


def gpipe_step(loads: list[Load], micro_batches: int) -> float:
    """GPipe's time to the last backward, exactly: two lines of equal jobs, each behind its transfer."""
    before = [0.0, *(load.send for load in loads)]
    forward = [load.forward + sent for load, sent in zip(loads, before, strict=False)]
    lines = [forward, [load.backward + load.send for load in loads]]
    return sum(sum(line) + (micro_batches - 1) * max(line) for line in lines)


def draw(timeline: PlayedSchedule, unit: float = 1.0) -> str:
    """A row for each device, a column for each unit of time: forwards as digits, backwards as letters, W as `-`."""
    width = max(round(row[-1].end / unit) for row in timeline.events)
    rows = [["."] * width for _ in timeline.events]
    for row, events in zip(rows, timeline.events, strict=True):
        for event in events:
            mark = {"F": str(event.task.micro % 10), "B": chr(97 + event.task.micro % 26), "W": "-"}[event.task.phase]
            for column in range(round(event.start / unit), round(event.end / unit)):
                row[column] = mark
    return "\n".join(map("".join, rows))


def idle(timeline: PlayedSchedule) -> float:
    """The share of all devices' time in which they wait."""
    busy = sum(event.end - event.start for row in timeline.events for event in row)
    return 1 - busy / (max(row[-1].end for row in timeline.events) * len(timeline.events))


def picture(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def equal(count: int, forward: float = 1, backward: float = 2, **more) -> list[Load]:
    return [Load(forward, backward, **more)] * count


# -------------------------------------------------------------------------------------------------------- pictures


def test_gpipe() -> None:
    assert draw(simulate(orders(GPIPE, 3, 4), equal(3))) == picture("""
        0123......aabbccdd
        .0123...aabbccdd..
        ..0123aabbccdd....
    """)
    assert in_flight(orders(GPIPE, 3, 4)) == (4, 4, 4)


def test_1f1b() -> None:
    timeline = simulate(orders(ONE, 3, 4), equal(3))
    assert draw(timeline) == picture("""
        012....aa3bb.cc.dd
        .01..aa2bb3cc.dd..
        ..0aa1bb2cc3dd....
    """)
    assert timeline.seconds == 3 * 3 + 3 * 3
    assert idle(timeline) == pytest.approx(1 - 36 / 54)
    assert in_flight(orders(ONE, 3, 4)) == (3, 2, 1)
    assert in_flight(orders(ONE, 3, 2)) == (2, 2, 1)


def test_zero_bubble_fills_what_was_idle() -> None:
    timeline = simulate(orders(ZERO, 3, 6), equal(3, 1, 2, weight=1))
    assert timeline.seconds == 6 * 3 + 2 * (3 - 2)
    assert in_flight(orders(ZERO, 3, 6)) == (3, 3, 3)


def test_interleaved_waits_a_chunk_where_1f1b_waits_a_partition() -> None:
    timeline = simulate(orders(INTER, 3, 6, 2), equal(6, 1, 2))
    assert timeline.seconds == (6 * 2 + 2) * 3
    assert in_flight(orders(INTER, 3, 6, 2)) == (6, 6, 4, 3, 3, 1)


# ---------------------------------------------------------------------------------------------------------- orders


def every_order():
    for pipeline in Pipeline:
        for devices in range(1, 5):
            for micro in range(1, 10):
                for chunks in (2, 3) if pipeline is INTER else (1,):
                    if refusal(pipeline, devices, chunks, micro) is None:
                        yield orders(pipeline, devices, micro, chunks)


def test_every_task_is_run_once_on_its_device() -> None:
    for order in every_order():
        phases = "FBW" if order.pipeline is ZERO else "FB"
        for device, tasks in enumerate(order.tasks):
            mine = range(device, order.partitions, len(order.tasks))
            want = {(phase, p, m) for phase in phases for p in mine for m in range(order.micro_batches)}
            assert len(tasks) == len(want) and {(t.phase, t.partition, t.micro) for t in tasks} == want
        assert simulate(order, equal(order.partitions, 1, 2, weight=1)).seconds >= order.micro_batches * 3


@pytest.mark.parametrize(("devices", "chunks", "micro"), [(3, 2, 6), (4, 2, 10), (4, 3, 3), (2, 2, 4), (4, 2, 4)])
def test_interleaved_orders_are_torchs(devices: int, chunks: int, micro: int) -> None:
    assert [list(map(str, tasks)) for tasks in orders(INTER, devices, micro, chunks).tasks] == torchs(
        devices, chunks, micro, False
    )


@pytest.mark.parametrize(("devices", "micro"), [(3, 6), (4, 10), (4, 3), (2, 4), (1, 2)])
def test_zero_bubble_orders_are_torchs(devices: int, micro: int) -> None:
    found = [list(map(str, tasks)) for tasks in orders(ZERO, devices, micro).tasks]
    assert found == torchs(devices, 1, micro, True)


def torchs(devices: int, chunks: int, micro: int, zero: bool) -> list[list[str]]:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = schedules.ScheduleInterleavedZeroBubble if zero else schedules.ScheduleInterleaved1F1B
    made = object.__new__(kind)  # its orders are made before any process is asked
    made.n_local_stages, made.pp_group_size, made._n_microbatches = chunks, devices, micro
    made.number_of_rounds = max(1, micro // devices)
    made.microbatches_per_round = micro // made.number_of_rounds
    names = {"F": "F", "I": "B", "B": "B", "W": "W"}
    return [
        [
            f"{names[action.computation_type.value]}{action.stage_index}.{action.microbatch_index}"
            for action in made._calculate_single_rank_operations(rank)
            if action is not None
        ]
        for rank in range(devices)
    ]


def test_what_torch_refuses_is_refused() -> None:
    with pytest.raises(ScheduleError, match="2 rounds, which do not divide 7"):
        orders(ZERO, 3, 7)
    with pytest.raises(ScheduleError, match="one partition on a device"):
        orders(ONE, 3, 7, 2)
    with pytest.raises(ScheduleError, match="at least two"):
        orders(INTER, 3, 6)


# ---------------------------------------------------------------------------------------------------- closed forms


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.booleans())
def test_gpipes_closed_form_is_exact_and_the_estimate_below_it_without_transfers(seed: int, sends: bool) -> None:
    loads, micro = random_loads(random.Random(seed), sends)
    seconds = simulate(orders(GPIPE, len(loads), micro), loads).seconds
    assert seconds == gpipe_step(loads, micro)
    assert sends or seconds >= estimate(weights_of(GPIPE, micro), loads)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 3))
def test_1f1b_takes_at_most_its_estimate_where_backward_is_to_forward_alike(seed: int, times: int) -> None:
    loads, micro = random_loads(random.Random(seed), False)
    loads = [replace(load, backward=times * load.forward) for load in loads]
    seconds = simulate(orders(ONE, len(loads), micro), loads).seconds
    assert least(loads, micro) <= seconds <= estimate(weights_of(ONE, micro), loads)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.booleans())
def test_1f1b_takes_at_most_what_gpipe_does(seed: int, sends: bool) -> None:
    loads, micro = random_loads(random.Random(seed), sends)
    seconds = simulate(orders(ONE, len(loads), micro), loads).seconds
    assert least(loads, micro) <= seconds <= gpipe_step(loads, micro)


def least(loads: list[Load], micro: int) -> float:
    """What no order can beat: the slowest partition's work, and one micro-batch's way."""
    return max(micro * max(load.time for load in loads), sum(load.time + 2 * load.send for load in loads))


def random_loads(rng: random.Random, sends: bool) -> tuple[list[Load], int]:
    count = rng.randint(1, 6)
    tenth = [Load(rng.randint(0, 20), rng.randint(0, 30), rng.randint(0, 9) * sends) for _ in range(count)]
    return [*tenth[:-1], Load(tenth[-1].forward, tenth[-1].backward)], rng.randint(1, 12)


@pytest.mark.parametrize("pipeline", Pipeline)
@pytest.mark.parametrize(("devices", "micro"), [(1, 4), (2, 4), (4, 8), (4, 32)])
def test_estimates_are_exact_for_equal_partitions(pipeline: Pipeline, devices: int, micro: int) -> None:
    chunks = 3 if pipeline is INTER else 1
    loads = equal(devices * chunks, 1, 2, weight=1, once=5)
    seconds = simulate(orders(pipeline, devices, micro, chunks), loads).seconds
    late = 2 if pipeline is ZERO else 5 * (chunks - 1)
    assert seconds - late == estimate(weights_of(pipeline, micro, chunks), loads)


@pytest.mark.parametrize(
    ("pipeline", "sending", "worst"),
    [
        (GPIPE, Sending.RUNTIME, 0.0),
        (ONE, Sending.RUNTIME, 0.01),
        (INTER, Sending.RUNTIME, 0.0),
        (INTER, Sending.EAGER, 0.0),
        (INTER, Sending.BLOCKING, 0.03),  # the two ends send once less
    ],
)
@pytest.mark.parametrize(("devices", "micro"), [(3, 12), (4, 8), (6, 24)])
def test_estimates_of_equal_partitions_with_transfers(
    pipeline: Pipeline, sending: Sending, worst: float, devices: int, micro: int
) -> None:
    chunks = 3 if pipeline is INTER else 1
    loads = [*equal(devices * chunks - 1, 3, 6, send=1), Load(3, 6)]
    seconds = simulate(orders(pipeline, devices, micro, chunks), loads, sending).seconds
    found = estimate(weights_of(pipeline, micro, chunks, sending), loads)
    assert seconds == pytest.approx(found, rel=worst or 1e-9) and seconds <= found * (1 + 1e-9)


def test_the_last_micro_batch_may_be_kept() -> None:
    loads = [Load(1, 3, last=Load(1, 2))] * 2
    assert simulate(orders(GPIPE, 2, 4), loads).seconds == gpipe_step([Load(1, 3)] * 2, 4) - 1
    drawn = draw(simulate(orders(ZERO, 2, 2), [Load(1, 3, last=Load(1, 2, weight=1))] * 2))
    assert (
        drawn
        == """\
01...aaab-
.0aaa1b-.."""
    )  # what is recomputed makes the gradients of its weights at once


def test_a_step_ends_when_the_last_device_has_done_its_part() -> None:
    early = simulate(orders(ONE, 2, 4), [Load(1, 2), Load(1, 2, once=1)])
    assert early.seconds == simulate(orders(ONE, 2, 4), equal(2)).seconds
    assert simulate(orders(ONE, 2, 4), [Load(1, 2, once=1), Load(1, 2)]).seconds == early.seconds + 1
