"""Schedules on two lines: held against a play of single kernels, one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.pipeline.cost.links import Lines, LinkCosts, LinkWay
from shardwright.pipeline.rates.compute import Seconds
from shardwright.stages.checkpoint.recompute.chain import LAST
from shardwright.stages.checkpoint.recompute.schedule import OpKind, ScheduledOp
from shardwright.stages.checkpoint.recompute.simulate import ExecutedOp, MemoryState, Outcome
from shardwright.stages.checkpoint.recompute.two_lines import played

NOTHING = MemoryState(frozenset(), frozenset(), None)
SECONDS = st.floats(0.0, 4.0)
PAIRS = st.tuples(SECONDS, SECONDS)


def way(host: tuple[float, float], device: tuple[float, float]) -> LinkWay:
    lines = Lines(Seconds(*device), Seconds(*host))
    return LinkWay(max(host[0], device[0]), max(host[1], device[1]), 0, 0, 0, lines=lines)


def link(number: int, host: tuple[float, float], device: tuple[float, float], dropped: float) -> LinkCosts:
    plain, last = way(host, device), way((host[0] + 1.0, host[1]), (0.5, device[1]))
    return LinkCosts(number, number, 0, 0, (plain,), last, max(dropped, device[0]), 0, dropped)


def outcome(*ops: ScheduledOp) -> Outcome:
    return Outcome(tuple(ExecutedOp(op, NOTHING, 0.0, 1.0) for op in ops), float(len(ops)), 0.0)


def all_kept(links: int) -> Outcome:
    return outcome(
        *(ScheduledOp(OpKind.F_ALL, n) for n in range(links - 1)),
        *(ScheduledOp(OpKind.B, n) for n in reversed(range(links))),
    )


def test_the_device_waits_where_the_host_is_slower() -> None:
    """Forward is issued in 2 s a link and runs in 1; backward is issued in 1 and runs in 3."""
    costs = [link(n, (2.0, 1.0), (1.0, 3.0), 2.0) for n in range(2)]
    found = played(all_kept(2), costs)
    # forward of link 0 until 2; the loss is issued until 5 and has 1 + 3 s of work; backward of link 0 follows it.
    assert [step.seconds for step in found.steps] == [2.0, 4.0, 3.0]
    assert found.time == 9.0 and found.waited == 9.0 - (1.0 + 4.0 + 3.0)


def test_a_host_that_takes_nothing_is_never_waited_for() -> None:
    costs = [link(n, (0.0, 0.0), (1.0, 2.0), 0.0) for n in range(3)]
    found = played(all_kept(3), costs)
    assert (found.time, found.waited) == (9.0, 0.0)


def test_without_a_host_the_times_stay() -> None:
    plain = LinkCosts(0, 0, 0, 0, (LinkWay(1.0, 1.0, 0, 0, 0),), LinkWay(1.0, 1.0, 0, 0, 0), 1.0, 0)
    before = all_kept(1)
    assert played(before, [plain]) is before


def test_links_of_a_region_take_the_hosts_seconds_of_both_runs() -> None:
    costs = [link(0, (1.0, 1.0), (2.0, 2.0), 7.0), link(1, (1.0, 1.0), (2.0, 2.0), 7.0)]
    found = played(
        outcome(
            ScheduledOp(OpKind.F_CK, 0),
            ScheduledOp(OpKind.B, 1),
            ScheduledOp(OpKind.F_ALL, 0, LAST),
            ScheduledOp(OpKind.B, 0, LAST),
        ),
        costs,
    )
    # issued until 7; the loss until 9, and 4 s of work from then on; the second run 0.5 s, then 2 s backward.
    assert [step.seconds for step in found.steps] == [7.0, 4.0, 0.5, 2.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(PAIRS, PAIRS), min_size=1, max_size=6))
def test_it_is_between_its_bounds_and_close_to_a_play_of_kernels(links: list) -> None:
    costs = [link(number, host, device, host[0]) for number, (host, device) in enumerate(links)]
    found = played(all_kept(len(costs)), costs)
    work = [(host[0], device[0]) for host, device in links[:-1]]
    work += [(sum(links[-1][0]), sum(links[-1][1])), *((host[1], device[1]) for host, device in reversed(links[:-1]))]
    hosts, devices = sum(host for host, _ in work), sum(device for _, device in work)
    assert max(hosts, devices) - 1e-9 <= found.time <= sum(max(pair) for pair in work) + 1e-9
    assert found.time == pytest.approx(sum(step.seconds for step in found.steps))
    issued = ended = 0.0
    count = 400  # equal kernels of each link
    for host, device in work:
        for _ in range(count):
            issued += host / count
            ended = max(ended, issued) + device / count
    assert found.time <= ended + 1e-6 and found.time >= ended - max(max(pair) for pair in work) - 1e-6
