"""The fastest schedule with several micro-batches in flight, against a search of every persistent schedule."""

from __future__ import annotations

import heapq
import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.stages.checkpoint.recompute import rotor
from shardwright.stages.checkpoint.recompute.chain import Chain, Option
from shardwright.stages.checkpoint.recompute.in_flight import drop_all, held, keep_all, run_partition, sent
from shardwright.stages.checkpoint.recompute.in_flight_dp import HoldTable, cut_chain
from shardwright.stages.checkpoint.recompute.kernels import contents_of, kinds_of
from shardwright.stages.checkpoint.recompute.schedule import OpKind
from shardwright.stages.checkpoint.recompute.simulate import start
from tests.schedules import Moves, moves, pins, recurrence


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# ------------------------------------------------------------------------------------------------------ the oracle


def fastest(chain: Chain, first: int, last: int, flight: int, memory: float) -> float:
    """Over every size of hold, Dijkstra over the simulator's states; as in test_rotor, activations left are pinned."""
    top = sum(option.saved for i in range(first, last + 1) for option in chain.options(i)) + sum(chain.a)
    holds = [h for h in range(int(top) + 1) if (flight - 1) * h <= memory]
    steps = moves(chain, first, last)
    return min((one_hold(chain, first, last, memory - (flight - 1) * h, h, steps) for h in holds), default=math.inf)


def one_hold(chain: Chain, first: int, last: int, memory: float, most: float, steps: Moves) -> float:
    """One micro-batch in `memory`, which holds no more than `most` after its forwards."""
    ticket = itertools.count()
    queue = [(0.0, next(ticket), (start(chain, first, last), frozenset({first}), False))]
    done = set()
    while queue:
        time, _, node = heapq.heappop(queue)
        if node in done:
            continue
        done.add(node)
        state, pinned, waited = node
        if state.gradient == first:
            return time
        ready = state.has(min(last + 1, chain.length))
        if not waited and ready and held(chain, sent(state, last)) <= most:
            after = sent(state, last)
            heapq.heappush(queue, (time, next(ticket), (after, pinned & after.activations, True)))
        for step in steps(state):
            if step.held > memory or (step.op.kind is OpKind.B and not waited):
                continue
            if (left := pins(pinned, step)) is not None:
                heapq.heappush(queue, (time + step.seconds, next(ticket), (step.state, left, waited)))
    return math.inf


# --------------------------------------------------------------------------------------------------------- chains


def several(strategy, n):
    return st.lists(strategy, min_size=n, max_size=n).map(tuple)


@st.composite
def chains(draw, most: int = 4, rich: bool = False) -> Chain:
    n = draw(st.integers(1, most))
    small, seconds = st.integers(0, 3), st.integers(0, 9)
    a = draw(several(small, n + 1))
    saved = tuple(size + draw(small) for size in a[1:])
    plain = dict(a=a, saved=saved, f=draw(several(seconds, n)), b=draw(several(seconds, n + 1)))
    plain |= dict(ft=draw(several(small, n)), bt=draw(several(small, n + 1)))
    if not rich:
        return Chain(**plain)
    more = tuple(
        tuple(Option(draw(seconds), draw(seconds), a[i + 1] + draw(small), draw(small), draw(small)) for _ in range(2))
        if draw(st.booleans())
        else ()
        for i in range(n)
    )
    spiky = st.sampled_from((0, 1, 3, 12))  # a link may need much more when it is passed over
    return Chain(**plain, f_none=draw(several(seconds, n)), ft_none=draw(several(spiky, n)), more=more)


@st.composite
def cases(draw, most: int = 4, rich: bool = False):
    chain = draw(chains(most, rich))
    first = draw(st.integers(0, chain.length))
    last = draw(st.integers(first, chain.length))
    flight = draw(st.integers(1, 4))
    top = int(run_partition(chain, keep_all(first, last), first, last).memory(flight))
    return chain, first, last, flight, draw(st.integers(top // 3, top + 1))


def solved(chain: Chain, first: int, last: int, flight: int, memory: int, step: int = 1):
    table = HoldTable(chain, max(memory, 1), max(memory, 1), step=step)
    best, extras = table.least((flight,), np.full((len(table.kinds.first), 1), float(memory)))
    kind = table.kinds.of[first, last]
    if best[kind, 0] == math.inf:
        return math.inf, None
    return best[kind, 0], table.region(first, last, flight, memory, int(extras[kind, 0]))


def agree(chain: Chain, first: int, last: int, flight: int, memory: int) -> None:
    best = fastest(chain, first, last, flight, memory)
    time, region = solved(chain, first, last, flight, memory)
    assert time == best
    if region is not None:
        passage = run_partition(chain, region, first, last)
        assert passage.time == best
        assert passage.memory(flight) <= memory
        assert (region.first, region.last) == (first, last)


@examples(120)
@given(cases())
def test_equals_the_search_of_all_persistent_schedules(case) -> None:
    agree(*case)


@examples(60)
@given(cases(most=3, rich=True))
def test_options_and_no_grad_forwards_equal_the_search_too(case) -> None:
    agree(*case)


@examples(60)
@given(chains(most=6, rich=True), st.integers(1, 40))
def test_a_hold_of_all_the_memory_is_none(chain: Chain, memory: int) -> None:
    """With nothing extra, T is C, as the recurrence of one micro-batch has it."""
    table, least = rotor.solve(chain, memory), recurrence(chain)
    rows = table.rows(0, memory)
    for i in range(chain.length + 1):
        for j in range(i, chain.length + 1):
            held = rows[:, table.kinds.of[i, j]].reshape(-1)[: memory + 1]
            assert list(held) == list(table.row(i, j)) == [least(i, j, m) for m in range(memory + 1)]


@examples(60)
@given(cases(most=6, rich=True), st.integers(1, 5))
def test_a_coarser_search_fits_and_wastes_less_than_its_step(case, step: int) -> None:
    chain, first, last, flight, memory = case
    time, region = solved(chain, first, last, flight, memory, step)
    if region is not None:
        assert run_partition(chain, region, first, last).time == pytest.approx(time)
        assert run_partition(chain, region, first, last).memory(flight) <= memory
    if memory >= step:
        assert time <= solved(chain, first, last, flight, memory - step + 1)[0]


@examples(60)
@given(cases(most=6, rich=True))
def test_a_cut_chain_has_the_schedules_that_its_links_had(case) -> None:
    chain, first, last, flight, memory = case
    if first < chain.length:
        time, region = solved(cut_chain(chain, first, last), 0, last - first, flight, memory)
        assert time == solved(chain, first, last, flight, memory)[0]
        assert region is None or (region.first, region.last) == (0, last - first)


def test_equal_links_share_their_tables() -> None:
    n = 40
    chain = Chain((1,) * (n + 1), (3,) * n, (1,) * n, (2,) * n + (0,), (0,) * n, (0,) * (n + 1))
    kinds = kinds_of(contents_of(chain))
    assert len(kinds.first) == 2 * n + 1  # by length, with the loss and without
    assert kinds.of[3, 9] == kinds.of[20, 26] != kinds.of[20, 27]
    assert kinds_of(contents_of(chain), 5).of[0, 5] == -1


def test_only_what_is_held_is_multiplied() -> None:
    """Six links with four in flight. Each its own Mth of the memory would need 4 * 7 units; together 10 do."""
    chain = Chain((1,) * 8, (3,) * 7, (1,) * 7, (2,) * 8, (0,) * 7, (0,) * 8)
    alone = rotor.tightest(chain, first=0, last=5).memory
    least = next(m for m in range(100) if solved(chain, 0, 5, 4, m)[0] < math.inf)
    assert (alone, least) == (7, 10)
    assert str(solved(chain, 0, 5, 4, 20)[1]) == "(0 1) (2 3) (4 5)"


def test_gpipes_way_holds_the_input_alone() -> None:
    chain = Chain((1, 2, 3, 4), (4, 5, 6), (1, 2, 3), (2, 4, 6, 1), (0,) * 3, (0,) * 4)
    assert str(drop_all(0, 1, 3)) == "(0 1)"
    assert run_partition(chain, drop_all(0, 1, 3), 0, 1).hold == 1
    assert str(drop_all(1, 3, 3)) == "(1 2) 3"
    assert run_partition(chain, drop_all(1, 3, 3), 1, 3).hold == 2 + 4


@pytest.mark.parametrize(("last", "flight"), [(1, 2), (2, 1)])
def test_what_is_passed_over_needs_room_though_it_is_dropped(last: int, flight: int) -> None:
    """The middle link needs much while it runs without saving: where all is dropped, and where some is."""
    chain = Chain((1,) * 4, (5,) * 3, (1,) * 3, (2, 2, 2, 1), (0,) * 3, (0,) * 4, ft_none=(0, 9, 0))
    for memory in range(8, 17, 2):
        agree(chain, 0, last, flight, memory)
