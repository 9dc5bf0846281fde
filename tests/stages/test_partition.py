"""Pipelines cut by dynamic programming, against every way to cut them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from shardwright.pipeline.cost.pipelines.schedules import DeviceOrder, Pipeline, in_flight, orders, refusal
from shardwright.stages.checkpoint.pipelines.partition import partition
from shardwright.stages.checkpoint.pipelines.partition_times import PartitionTimes
from shardwright.stages.checkpoint.pipelines.refine import PipelinePlan
from shardwright.stages.checkpoint.pipelines.search_inputs import Division, Effort, PartitionError, UserChoices
from shardwright.stages.checkpoint.pipelines.submesh_plans import Recompute, Sent, SubmeshPlan, Terms
from shardwright.stages.checkpoint.recompute.chain import Chain, ChainError, Slots
from shardwright.stages.checkpoint.recompute.in_flight import PartitionRun, fullest, run_partition
from tests.partition_cases import Case, least_estimate, random_case


def solve(case: Case) -> list[PipelinePlan]:
    effort = Effort(Slots(0, case.memory, 1), gap=0.0)
    return partition((case.division,), case.memory, case.wishes, effort, case.reshard)


@pytest.mark.parametrize("group", range(20))
def test_equals_the_search_of_all_cuts(group: int) -> None:
    for seed in range(10 * group, 10 * group + 10):
        case = random_case(seed)
        best = least_estimate(case)
        if best == math.inf:
            with pytest.raises(PartitionError):
                solve(case)
        else:
            plans = solve(case)
            assert min(plan.estimate for plan in plans) == pytest.approx(best, rel=1e-9), seed
            for plan in plans:
                check(case, plan)


def check(case: Case, plan: PipelinePlan) -> None:
    """Partitions follow one another, fit, and their schedules take what is said."""
    parts = plan.partitions
    assert parts[0].first == 0 and parts[-1].last == parts[-1].submesh.links - 1
    assert all(a.last + 1 == b.first for a, b in pairwise(parts))
    assert sum(plan.devices[: len(parts) // plan.chunks]) == case.division.devices
    for part in parts:
        assert (part.region.first, part.region.last) == (part.first, part.last)
        passage = run_partition(part.submesh.chain, part.region, part.first, part.last)
        assert passage.time == pytest.approx(part.load.time)
        span = slice(part.first, part.last + 1)
        owned = sum(part.submesh.resident[span]) + part.submesh.everywhere
        owned += part.flight * (sum(part.submesh.held[span]) + part.submesh.everywhere_held)
        assert owned + passage.memory(part.flight) == pytest.approx(part.peak_bytes)
        assert part.peak_bytes <= part.room_bytes == case.memory / plan.chunks


def test_the_cases_are_of_every_sort() -> None:
    cases = [random_case(seed) for seed in range(200)]
    counts = Counter(case.wishes.pipelines[0] for case in cases)
    assert min(counts[pipeline] for pipeline in Pipeline) > 10
    assert any(case.wishes.boundaries for case in cases) and any(case.division.sizes for case in cases)


# ------------------------------------------------------------------------------------------------- the user's hand


def layers(count: int = 8, size: int = 1, hold: int = 4, name: str = "") -> SubmeshPlan:
    chain = Chain(
        a=(1,) * (count + 1),
        saved=(hold,) * count,
        f=(2.0 / size,) * count,
        b=(4.0 / size,) * count + (1.0,),
        ft=(0,) * count,
        bt=(0,) * (count + 1),
    )
    return SubmeshPlan(name or f"on {size}", size, chain, (2.0,) * count + (0.0,), (0.5,) * (count + 1))


def four(micro: tuple[int, ...] = (8,), **more) -> Division:
    return Division(4, {m: (layers(**more),) for m in micro}, lambda nbytes: 0.0)


def first(division: Division, memory: int = 1000, **wishes) -> PipelinePlan:
    return partition((division,), memory, UserChoices(**wishes))[0]


def test_equal_layers_are_cut_evenly() -> None:
    plan = first(four())
    assert plan.firsts == (0, 2, 4, 6)
    assert [part.flight for part in plan.partitions] == [4, 3, 2, 1]
    assert [part.regions for part in plan.partitions] == ["0 1", "2 3", "4 5", "6 7 8"]
    assert plan.estimate == 4 * 12 + 1 + 7 * 13 + 1.5
    assert plan.seconds <= plan.estimate


def test_the_first_partitions_recompute_where_the_last_need_not() -> None:
    """Four in flight hold four times as much as one."""
    plan = first(four(), memory=25, boundaries=(2, 4, 6))
    assert [part.regions for part in plan.partitions] == ["(0 1)", "(2) 3", "4 5", "6 7 8"]
    assert all(part.peak_bytes <= 25 for part in plan.partitions)


def test_boundaries_are_kept() -> None:
    assert first(four(), boundaries=(1, 2, 3)).firsts == (0, 1, 2, 3)
    with pytest.raises(PartitionError, match=r"cannot begin with the links \[3, 2\].*ascending links from 1 to 8"):
        first(four(), boundaries=(3, 2))
    with pytest.raises(PartitionError, match="no pipeline fits, whatever the memory"):
        first(four(), boundaries=(4,))  # two plans of one device do not fill four
    with pytest.raises(PartitionError, match="there is no pipeline as asked for"):
        first(four(), partitions=(5,))


def test_micro_batches_and_partitions_are_solved_or_given() -> None:
    division = four((2, 4, 8))
    assert first(division).micro_batches == 2  # each costs the same here, whatever its size
    assert first(division, micro_batches=(8,)).micro_batches == 8
    pair = Division(4, {8: (layers(), layers(size=2))}, lambda nbytes: 0.0)
    assert first(pair, partitions=(2,)).devices == (2, 2)
    assert first(pair, partitions=(3,)).devices in ((1, 1, 2), (1, 2, 1), (2, 1, 1))
    assert first(replace(pair, sizes=(1, 2, 1))).devices == (1, 2, 1)


def test_a_slow_link_makes_fewer_partitions() -> None:
    pair = Division(4, {4: (layers(), layers(size=2), layers(size=4))}, lambda nbytes: 0.01)
    assert len(first(pair).partitions) == 1
    halves = {4: (layers(), layers(size=2), replace(layers(size=4), chain=layers(size=1).chain))}
    assert len(first(Division(4, halves, lambda nbytes: 0.01)).partitions) == 2


@pytest.mark.parametrize(
    ("recompute", "regions"),
    [(Recompute.NEVER, "0 1"), (Recompute.ALWAYS, "(0 1)"), (Recompute.EXCEPT_LAST, "(0 1)")],
)
def test_gpipes_recompute(recompute: Recompute, regions: str) -> None:
    plan = first(four(), pipelines=(Pipeline.GPIPE,), recompute=recompute)
    assert [part.flight for part in plan.partitions] == [8] * 4
    assert plan.partitions[0].regions == regions


def test_gpipes_last_micro_batch_is_shorter() -> None:
    always, but_last = (
        first(four(), pipelines=(Pipeline.GPIPE,), recompute=recompute, boundaries=(2, 4, 6)).seconds
        for recompute in (Recompute.ALWAYS, Recompute.EXCEPT_LAST)
    )
    assert always - but_last == 5


def test_the_schedules_differ_in_what_they_wait() -> None:
    submesh = replace(layers(16), weight=(2.0,) * 16 + (0.0,))
    division = Division(4, {8: (submesh,)}, lambda nbytes: 0.0)
    plain, inter, zero = (
        first(division, pipelines=(pipeline,))
        for pipeline in (Pipeline.ONE_F_ONE_B, Pipeline.INTERLEAVED, Pipeline.ZERO_BUBBLE)
    )
    assert zero.seconds < plain.seconds and inter.seconds < plain.seconds
    assert len(inter.partitions) == 8 and inter.chunks == 2
    best = partition((division,), 1000, UserChoices(tuple(Pipeline)))
    assert best[0].seconds == min(plain.seconds, inter.seconds, zero.seconds)
    assert [plan.seconds for plan in best] == sorted(plan.seconds for plan in best)


def test_what_is_sent_counts_if_asked() -> None:
    """One gradient, and outputs in flight; or all that has been sent."""
    none, last, every = (PartitionTimes(layers(), Terms(100, 8, sent=sent)) for sent in Sent)
    assert none.room(2, 3, 3) - last.room(2, 3, 3) == 1 + (3 - 1)
    assert none.room(2, 3, 8) - last.room(2, 3, 8) == 8 - 1  # no gradient has been sent while all are in flight
    assert none.room(0, 3, 3) - last.room(0, 3, 3) == 3 - 1
    assert none.room(2, 3, 3) - every.room(2, 3, 3) == (8 - 3) + (8 - 1)
    assert none.room(0, 3, 3) - every.room(0, 3, 3) == 8 - 1
    assert PartitionTimes(replace(layers(), loss_held=3), Terms(100, 8)).room(8, 8, 5) == 100 - 4 * 3


def test_slots_grow_with_the_longest_partition() -> None:
    """A hundred links: 500 slots waste a good part of the memory, 20 for each link do not."""
    size = 1041
    submesh = layers(100, hold=4 * size)
    submesh = replace(submesh, chain=replace(submesh.chain, a=(size,) * 101), resident=(0.0,) * 101)

    def seconds(slots: Slots, memory: int = 60 * size * 4) -> float:
        return float(PartitionTimes(submesh, Terms(memory, 1, slots=slots)).seconds((1,))[0, 100, 0])

    coarse, usual, fine = (seconds(Slots(per_link)) for per_link in (1, 20, 100))
    assert seconds(Slots(1), 10**9) < fine <= usual < coarse
    assert usual - fine < 0.2 * (coarse - fine)
    assert Slots().of(10) == 500 and Slots().of(101) == 2020 and Slots(7).of(101) == 707
    assert Slots().step_of(500) == 4 and Slots().step_of(2020) == 16


def test_refusals() -> None:
    with pytest.raises(PartitionError, match=r"no pipeline fits 2e-09 GB a device; 1.5e-08 GB would do") as refused:
        first(four(), memory=2)
    floor = refused.value.floor
    assert floor.memory == 15 and floor.first <= floor.op.link <= floor.last
    assert 14 <= max(part.peak_bytes for part in first(four(), memory=15).partitions) <= 15
    with pytest.raises(PartitionError):
        first(four(), memory=14)
    with pytest.raises(PartitionError, match="no pipeline fits, whatever the memory"):
        first(Division(4, {8: (layers(size=3),)}, lambda nbytes: 0.0))
    with pytest.raises(PartitionError, match="4 submeshes runs in 2 rounds, which do not divide 9"):
        first(four((9,)), pipelines=(Pipeline.ZERO_BUBBLE,))
    with pytest.raises(PartitionError, match=r"submeshes of \(1, 2\) devices are not 4"):
        Division(4, {}, lambda nbytes: 0.0, (1, 2))
    with pytest.raises(PartitionError, match="plans of one model"):
        first(Division(4, {8: (layers(), layers(7))}, lambda nbytes: 0.0))
    with pytest.raises(ChainError, match="resident needs 9 numbers"):
        replace(layers(), resident=(1.0,))


# ------------------------------------------------------------------------------------------------------ closed forms


def test_what_is_marked_is_recomputed_as_far_as_a_partition_has_it() -> None:
    timer = PartitionTimes(layers(), Terms(1000, 8, Recompute.MARKED, spans=((1, 2), (3, 3), (5, 8))))
    drawn = {(i, last): str(timer.schedule(i, last, 2)[0]) for i, last in ((0, 8), (2, 5), (4, 4), (6, 8), (0, 1))}
    assert drawn == {
        (0, 8): "0 (1 2) (3) 4 (5 6 7) 8",
        (2, 5): "(2) (3) 4 (5)",
        (4, 4): "4",
        (6, 8): "(6 7) 8",
        (0, 1): "0 (1)",
    }
    for i in range(9):
        for last in range(i, 9):
            kind, (_, passage) = timer.kinds.of[i, last], timer.schedule(i, last, 2)
            found = timer.fixed.time[kind], timer.fixed.hold[kind], timer.fixed.peak[kind]
            assert found == (passage.time, passage.hold, passage.peak)


@pytest.mark.parametrize("pipeline", Pipeline)
@pytest.mark.parametrize("seed", range(12))
def test_a_last_micro_batch_that_keeps_everything_is_part_of_the_peak(seed: int, pipeline: Pipeline) -> None:
    """Every partition's order, played with what each micro-batch holds: no moment has more than the peak."""
    for micro_batches, submeshes in random_case(seed).division.submeshes.items():
        devices = 3
        if refusal(pipeline, devices, 1 + (pipeline is Pipeline.INTERLEAVED), micro_batches):
            continue
        timer = PartitionTimes(submeshes[0], Terms(10**6, micro_batches, Recompute.EXCEPT_LAST))
        order = orders(pipeline, devices, micro_batches, 1 + (pipeline is Pipeline.INTERLEAVED))
        for number, flight in enumerate(in_flight(order)):
            for first, last in ((0, submeshes[0].links - 1), (1, 2)):
                (_, each), kept = timer.schedule(first, last, flight), timer.last_passage(first, last)
                moment = fullest(each, kept, flight)
                played = _most_held(order, number, each, kept or each)
                exact = pipeline in (Pipeline.GPIPE, Pipeline.ONE_F_ONE_B)
                assert played == moment.memory if exact else played <= moment.memory
                kind = timer.kinds.of[first, last]
                assert moment.memory == timer.fixed.memory(np.array([flight]))[kind, 0]


def _most_held(order: DeviceOrder, partition: int, each: PartitionRun, last: PartitionRun) -> float:
    end, waiting, most = "W" if order.pipeline is Pipeline.ZERO_BUBBLE else "B", dict[int, float](), 0.0
    for task in order.tasks[partition % len(order.tasks)]:
        if task.partition != partition:
            continue
        own = last if task.micro == order.micro_batches - 1 else each
        most = max(most, own.peak + sum(held for micro, held in waiting.items() if micro != task.micro))
        waiting[task.micro] = own.hold
        if task.phase == end:
            del waiting[task.micro]
    return most


def test_a_last_micro_batch_that_keeps_everything_fits_the_memory() -> None:
    asked = {"pipelines": (Pipeline.GPIPE,), "recompute": Recompute.EXCEPT_LAST, "boundaries": (2, 4, 6)}
    free = first(four(), **asked)
    need = int(max(part.peak_bytes for part in free.partitions))
    assert need > max(p.peak_bytes for p in first(four(), **asked | {"recompute": Recompute.ALWAYS}).partitions)
    assert first(four(), memory=need, **asked).seconds == free.seconds
    with pytest.raises(PartitionError, match="no pipeline fits") as refused:
        first(four(), memory=need - 1, **asked)
    floor = refused.value.floor
    assert floor.memory == need and floor.waiting_bytes > 0


@pytest.mark.parametrize("seed", range(40))
def test_fixed_recompute_is_what_the_simulator_says(seed: int) -> None:
    for submeshes in random_case(seed).division.submeshes.values():
        for mode in (Recompute.NEVER, Recompute.ALWAYS):
            timer = PartitionTimes(submeshes[0], Terms(10**6, 8, mode))
            form = timer.kept if mode is Recompute.NEVER else timer.dropped
            for i in range(submeshes[0].links):
                for last in range(i, submeshes[0].links):
                    kind, (_, passage) = timer.kinds.of[i, last], timer.schedule(i, last, 3)
                    found = form.time[kind], form.hold[kind], form.peak[kind]
                    assert found == (passage.time, passage.hold, passage.peak)


def test_the_last_micro_batch_waits_with_all_it_keeps() -> None:
    """One that is kept and one that is not: the kept one may wait while the other runs backwards."""
    timer = PartitionTimes(layers(), Terms(1000, 8, Recompute.EXCEPT_LAST))
    kept, dropped, kind = timer.kept, timer.dropped, timer.kinds.of[2, 4]
    need = 2 * dropped.hold[kind] + kept.hold[kind] + dropped.peak[kind] - dropped.hold[kind]
    seconds = [PartitionTimes(layers(), Terms(m, 8, Recompute.EXCEPT_LAST)).seconds((3,))[0, 4, 2] for m in range(60)]
    tightest = next(m for m in range(60) if seconds[m] < math.inf)
    assert tightest == need + 3 * 2  # the parameters


def test_the_likeliest_numbers_of_partitions_are_searched_where_there_are_many() -> None:
    submeshes = {8: (layers(), layers(size=2), layers(size=4))}
    division, wishes = Division(4, submeshes, lambda nbytes: 0.0), UserChoices((Pipeline.ZERO_BUBBLE,))
    every, few = (partition((division,), 1000, wishes, Effort(most_tasks=most)) for most in (8, 1))
    assert len({len(plan.partitions) for plan in every}) > len({len(plan.partitions) for plan in few}) == 1
    assert few[0].seconds == every[0].seconds


def test_the_same_numbers_give_the_same_plans() -> None:
    case = random_case(3)
    assert solve(case) == solve(case)
