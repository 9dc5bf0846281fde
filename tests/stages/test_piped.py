"""From a frontier with submeshes to a pipeline: what is predicted is worked out again, by other means."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.base.stage import Inputs
from shardwright.pipeline.config import ClusterSettings, ClusterSource, Device, Preset, load_config
from shardwright.pipeline.cost.pipelines import schedules
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.buckets import bucket_members
from shardwright.pipeline.ir.cluster import Cluster, Mesh, Overlap
from shardwright.pipeline.ir.codec import decode, encode
from shardwright.pipeline.ir.layout import B, Layout, P, R, S
from shardwright.pipeline.ir.plan import Partition, Plan, Region
from shardwright.pipeline.ir.profile import Compiled, CompiledBlock, CompiledWay
from shardwright.pipeline.ops.blocks import blocks_of
from shardwright.pipeline.sharding.slices import sliced
from shardwright.stages.checkpoint import run as stage
from shardwright.stages.checkpoint.choose import choose
from shardwright.stages.checkpoint.describe import describe
from shardwright.stages.checkpoint.pipelines.partition import partition
from shardwright.stages.checkpoint.pipelines.pipelined import (
    PricedPipeline,
    find_pipelines,
    offered_slices,
    predict,
    slice_counts,
    usable_splits,
)
from shardwright.stages.checkpoint.pipelines.reshard import Resharding
from shardwright.stages.checkpoint.pipelines.submesh_costs import fill, readers
from shardwright.stages.checkpoint.pipelines.submesh_plans import SubmeshPlan
from shardwright.stages.checkpoint.recompute import schedule
from shardwright.stages.checkpoint.recompute.linearize import Linear, linearize_partitions
from shardwright.stages.checkpoint.recompute.simulate import MemoryState, apply, start
from shardwright.stages.checkpoint.run import figures
from shardwright.stages.checkpoint.timeline import waits
from shardwright.stages.cluster.run import from_preset
from tests.asked import mostly_long
from tests.graphs import GRAPHS, SILENT, profile_of
from tests.pipeline_plans import FILE, WHERE, pipelines_of, plan_with_pipelines, settings_of, with_submeshes

PROJECT = Path(__file__).parents[2]

SCHEDULES = tuple(own.value for own in schedules.Pipeline)
NAMES = ("gpt", "gpt_tied", "ladder", "shared", "mlp")


def least(name: str, **asked: object) -> int:
    """The tightest budget that the refusal names."""
    with pytest.raises(SolveError) as refused:
        plan_with_pipelines(name, budget=1000, **asked)
    line = refused.value.line()
    assert "\n" not in line and line.startswith("conf/solve/test.yaml: memory_budget_gb: no plan fits 1e-06 GB")
    return round(float(re.search(r"tightest feasible budget is (\S+) GB", line)[1]) * 1e9)


def covers(name: str, plan: Plan) -> None:
    """Partitions follow one another, and their regions hold every link once."""
    links = len(GRAPHS[name]().chain)
    assert (plan.partitions[0].first, plan.partitions[-1].last) == (0, links - 1)
    assert all(a.last + 1 == b.first for a, b in pairwise(plan.partitions))
    for part in plan.partitions:
        assert leaves(part.regions) == list(range(part.first, part.last + 1))


def leaves(regions: tuple[Region, ...]) -> list[int]:
    return [i for r in regions for i in (leaves(r.inner) if r.recompute else range(r.first, r.last + 1))]


# ------------------------------------------------------------------------------------------- time and memory again


def region_of(part: Partition, linear: Linear) -> schedule.Nesting:
    """What a partition runs; a link that keeps a part of itself is one of the link's options."""

    def step(region: Region) -> schedule.Keep | schedule.Nesting:
        if region.kept:
            numbers = [n for n, way in enumerate(linear.costs[region.first].ways) if way.kept == region.kept]
            return schedule.Keep(region.first, numbers[0])
        inner = tuple(map(step, region.inner))
        return schedule.Nesting(inner) if region.recompute else schedule.Keep(region.first)

    return schedule.Nesting(tuple(map(step, part.regions)))


def replayed(linear: Linear, part: Partition) -> tuple[float, float, float, float]:
    """Seconds forwards and backwards, bytes that wait and at the peak: op by op on the simulator."""
    chain = linear.chain
    region, loss = region_of(part, linear), chain.length
    ahead = list(schedule.forwards(region, loss))
    state, seconds, peak = start(chain, part.first, part.last), [0.0, 0.0], 0.0
    waiting = state
    for number, op in enumerate(schedule.flatten(region, loss)):
        if number == len(ahead):
            state = waiting = replace(state, activations=state.activations - {part.last + 1})
        step = apply(chain, state, op, part.first)
        seconds[number >= len(ahead)] += step.seconds
        state, peak = step.state, max(peak, step.held)
    assert state == MemoryState(frozenset(), frozenset(), part.first)
    return (*seconds, replace(waiting, gradient=None).bytes(chain), peak)


def played(
    order: schedules.DeviceOrder, loads: list[tuple[float, float, float, float]], sends: list[float]
) -> list[float]:
    """When each device is through: the longest path, by going round until nothing changes.

    Nothing is computed beside a transfer on the sender; on the reader, unless it posts receives ahead, neither.
    """
    ends: dict[str, float] = {}
    there: dict[str, float] = {}
    split = order.pipeline is schedules.Pipeline.ZERO_BUBBLE
    meet = order.pipeline not in (schedules.Pipeline.INTERLEAVED, schedules.Pipeline.ZERO_BUBBLE)
    for _ in range(2 * sum(map(len, order.tasks)) + 1):
        for device, row in enumerate(order.tasks):
            now = ended = 0.0
            for task in row:
                p, m = task.partition, task.micro
                forward, backward, weight, _ = loads[p]
                takes = {"F": forward, "B": backward - (weight if split else 0.0), "W": weight}[task.phase]
                before = {"F": p - 1, "B": p + 1}.get(task.phase, -1)
                if 0 <= before < order.partitions:
                    message = f"{task.phase}{before}.{m}"
                    there[message] = max(ends.get(message, 0.0), ended if meet else 0.0) + sends[min(before, p)]
                    now = max(now, there[message])
                ended = ends[str(task)] = now + takes
                now = max(ended, there.get(str(task), 0.0))
            ends[f"all of {device}"] = now
    return [ends[f"all of {device}"] for device in range(len(order.tasks))]


def sent(name: str, cluster: Cluster, piped: PricedPipeline, number: int, plan: Plan) -> float:
    """Seconds of one transfer after a partition: the larger share of a device, and half of what is laid out anew."""
    before, after = piped.fills[number], piped.fills[number + 1]
    cut, graph = plan.partitions[number].last + 1, GRAPHS[name]()
    value, sizes = graph.values[graph.chain[cut].input], []
    common = [v for v, writer in graph.common.items() if writer < cut and any(cut <= r for r in readers(graph)[v])]
    for one in (before, after):
        own = [
            graph.values[v].type.nbytes / one.priced.sharded.home[v].shards(one.sizes) for v in (value.name, *common)
        ]
        sizes.append(sum(own) * 4 / plan.micro_batches)
    moved = 0.0
    home, wanted = (one.priced.sharded.home[value.name] for one in (before, after))
    if (before.sizes, home) != (after.sizes, wanted):
        moved = Resharding(graph, {f.submesh.name: f for f in piped.fills}, cluster)(cut, before.submesh, after.submesh)
    return cluster.splits[0].link.seconds(max(sizes)) + moved


def again(name: str, piped: PricedPipeline, plan: Plan) -> tuple[float, list[float]]:
    """The step's seconds and every device's bytes, from prices made anew."""
    cluster, frontier = with_submeshes(name)
    graph, profile = sliced(GRAPHS[name](), profile_of(name), plan.slices)
    loads, sizes = [], []
    for part, filled in zip(plan.partitions, piped.fills, strict=True):
        on = cluster.part(Mesh(filled.priced.cluster.axes))
        workload = Workload(graph, profile, on, frontier.optimizer_copies, plan.micro_batches)
        priced = workload.priced(filled.priced.sharding)
        price, linear = priced.step, linearize_partitions(priced)
        chain = linear.chain
        forward, backward, hold, peak = replayed(linear, part)
        span = slice(part.first, part.last + 1)
        again = {link for region in part.regions if region.recompute for link in range(region.first, region.last + 1)}
        kept = set(range(part.first, part.last + 1)) - again
        weight = min(sum(filled.submesh.weight[link] for link in kept), backward)
        loads.append((forward, backward, weight, sum(filled.submesh.once[span])))
        k, loss = part.in_flight, chain.length
        every, before = plan.schedule in ("interleaved", "zero_bubble"), plan.micro_batches - k
        buffers = (before if every else min(before, 1)) * chain.a[part.first] if part.first else 0
        buffers += (plan.micro_batches - 1 if every else k - 1) * chain.a[part.last + 1] if part.last < loss else 0
        buffers += (k - 1) * price.links[-1].memory.kept if part.last == loss else 0
        own = buffers + sum(filled.submesh.resident[span]) + filled.submesh.everywhere + (k - 1) * hold + peak
        put_off = sum(filled.submesh.put_off[span]) if plan.schedule == "zero_bubble" else 0.0
        sizes.append(own + k * (sum(filled.submesh.held[span]) + put_off + filled.submesh.everywhere_held))
    sends = [sent(name, cluster, piped, number, plan) for number in range(len(plan.partitions) - 1)]
    devices = len(plan.partitions) // plan.chunks
    order = schedules.orders(schedules.Pipeline(plan.schedule), devices, plan.micro_batches, plan.chunks)
    ends = played(order, loads, sends)
    seconds = max(end + sum(load[3] for load in loads[d::devices]) for d, end in enumerate(ends))
    return seconds, [sum(sizes[d::devices]) for d in range(devices)]


@pytest.mark.parametrize(
    ("name", "kind"),
    mostly_long(
        [*(("gpt_tied", kind) for kind in SCHEDULES), *((n, "1f1b") for n in NAMES if n != "gpt_tied")],
        lambda case: case[0] in ("gpt_tied", "mlp"),
    ),
)
def test_the_predicted_step_and_peak_are_found_again(name: str, kind: str) -> None:
    tight = least(name, pipeline=kind)
    loose = pipelines_of(name, pipeline=kind).found[0]
    for budget in (None, tight, max(tight, (2 * tight + loose.peak_bytes) // 3)):
        piped = pipelines_of(name, budget, pipeline=kind).found[0]
        plan = plan_with_pipelines(name, budget, pipeline=kind)
        assert plan.schedule == kind and plan.pipelined and plan.micro_batches == 4
        covers(name, plan)
        seconds, sizes = again(name, piped, plan)
        assert plan.prediction.step_seconds == pytest.approx(seconds, rel=1e-9)
        assert max(sizes) == pytest.approx(plan.prediction.peak_bytes, abs=1) and max(sizes) <= plan.budget_bytes
        assert sum(prod(part.sizes) for part in plan.partitions) == 4 * plan.chunks


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_parts_of_the_prediction_add_up(kind: str) -> None:
    for budget in (None, least("gpt", pipeline=kind)):
        for piped in pipelines_of("gpt", budget, pipeline=kind).found:
            own = predict(piped)
            parts = own.compute_seconds + own.communication_seconds + own.recompute_seconds + own.optimizer_seconds
            assert own.step_seconds == pytest.approx(parts + own.bubble_seconds, rel=1e-9)
            assert own.resident_bytes < own.peak_bytes
            assert own.bubble_seconds == pytest.approx(min(total.seconds for total in waits(piped.plan)), abs=1e-15)


def test_the_links_prices_are_the_steps() -> None:
    """Where nothing is shared, what is given to the links is what the step has."""
    for name in ("gpt", "mlp"):
        cluster, frontier = with_submeshes(name)
        for point in (*frontier.points, *frontier.submesh_points):
            on = cluster.part(frontier.meshes[point.mesh])
            graph, profile = GRAPHS[name](), profile_of(name)
            priced = Workload(graph, profile, on, 2.0, 4).priced(point.sharding)
            price, submesh = priced.step, fill("x", priced, (1,), lambda nbytes: 1.0).submesh
            assert sum(submesh.resident) + submesh.everywhere == pytest.approx(
                price.resident_bytes + price.shared_bytes
            )
            assert sum(submesh.once) == pytest.approx(price.gradient_sum + price.optimizer + price.outside.total)
            assert not any(submesh.held) and not any(submesh.crosses) and not submesh.everywhere_held
            backward = [link.compute.backward + link.communication.backward for link in price.links]
            assert all(0 <= w <= b for w, b in zip(submesh.weight, backward, strict=True)) and any(submesh.weight)
            waiting = [bool(put_off) for put_off in submesh.put_off]  # only for gradients that are made later
            assert any(waiting) and all(w > 0 for w, waits in zip(submesh.weight, waiting, strict=True) if waits)
            assert submesh.putting_off().held == submesh.put_off


def first_submesh(name: str) -> SubmeshPlan:
    cluster, frontier = with_submeshes(name)
    on = cluster.part(frontier.meshes[frontier.submesh_points[0].mesh])
    priced = Workload(GRAPHS[name](), profile_of(name), on, 2.0, 4).priced(frontier.submesh_points[0].sharding)
    return fill("x", priced, (1,), lambda nbytes: 1.0).submesh


def test_what_links_share_counts_in_every_partition_that_needs_it() -> None:
    tied = first_submesh("gpt_tied")
    table = next(v for v in GRAPHS["gpt_tied"]().values.values() if v.origin == "token.weight")
    assert min(tied.resident[0], tied.resident[-2]) >= table.type.nbytes // 4  # both ends hold it, split or not
    assert min(tied.once[0], tied.once[-2]) > 1.0  # and sum its gradient over the link
    graph = GRAPHS["shared"]()
    read_by_many = first_submesh("shared")
    assert read_by_many.everywhere_held > 0 and not any(read_by_many.held)
    writer = min(graph.common.values())
    last = max(i for i, link in enumerate(graph.chain) if graph.reads_common(link))
    assert [i for i, nbytes in enumerate(read_by_many.crosses) if nbytes] == list(range(writer + 1, last + 1))
    ladder = GRAPHS["ladder"]()
    skips = first_submesh("ladder")
    ends = {link for name, writer in ladder.common.items() for link in (writer,)}
    ends |= {i for i, link in enumerate(ladder.chain) if ladder.reads_common(link)}
    assert {i for i, nbytes in enumerate(skips.held) if nbytes} == ends and not skips.everywhere_held


# ------------------------------------------------------------------------------------------------------ the user's hand


def test_boundaries_are_kept() -> None:
    plan = plan_with_pipelines("gpt", pipeline="1f1b", boundaries=["layers.1"])
    graph = GRAPHS["gpt"]()
    assert len(plan.partitions) == 2
    first = plan.partitions[1].first
    begun = [op for link in graph.chain[:first] for op in link.ops if graph.op(op).module.startswith("layers.1")]
    assert not begun and any(graph.op(op).module.startswith("layers.1") for op in graph.chain[first].ops)
    solved = plan_with_pipelines("gpt", pipeline="1f1b", partitions=2)
    assert solved.prediction.step_seconds <= plan.prediction.step_seconds


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_number_of_partitions_is_kept(count: int) -> None:
    assert len(plan_with_pipelines("gpt", pipeline="gpipe", partitions=count).partitions) == count


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["layers.7"], "the model has no module layers.7; near it: layers."),
        (["token"], "token lies in the first link"),
        (["layers.1", "layers.0"], "not in the order in which they run; write layers.0, layers.1"),
        (["layers.1.attention", "layers.1"], "layers.1.attention and layers.1 begin in the same link"),
    ],
)
def test_boundaries_that_cannot_be(names: list[str], told: str) -> None:
    with pytest.raises(SolveError) as refused:
        pipelines_of("gpt", pipeline="1f1b", boundaries=names)
    assert refused.value.line().startswith(f"{FILE}: boundaries: ") and told in refused.value.line()


def test_micro_batches_fixed_and_solved_for() -> None:
    graph = GRAPHS["gpt"]()  # of 4 samples
    asked = {n: slice_counts(4, settings_of(micro_batches=n), 4, 4, FILE) for n in (None, 8, 12, "solve")}
    assert asked == {None: (1,), 8: (2,), 12: (3,), "solve": (1, 2, 4)}
    assert slice_counts(4, settings_of(micro_batches="solve"), 4, 1, FILE) == (1, 2)  # 8 for each device
    assert slice_counts(10, settings_of(micro_batches="solve"), 1, 1, FILE) == (1, 2, 4, 5, 8)
    for wrong in (6, 3, 2, 32):
        with pytest.raises(SolveError, match=rf"micro_batches: got {wrong}, .* use a multiple of 4, and at most 16$"):
            slice_counts(4, settings_of(micro_batches=wrong), 4, 4, FILE)
    plans = {n: plan_with_pipelines("gpt", pipeline="1f1b", micro_batches=n) for n in (None, 8, 16, "solve")}
    assert [plans[n].micro_batches for n in (None, 8, 16)] == [4, 8, 16]
    assert [plans[n].slices for n in (None, 8, 16)] == [(4,), (2, 2), (1, 1, 1, 1)]
    for part in plans[16].partitions:  # of one sample each: no input can be split on it
        shapes = {name: (1, *graph.values[name].type.shape[1:]) for name in part.sharding.inputs}
        assert all(layout.fits(shapes[name], part.sizes) for name, layout in part.sharding.inputs.items())
    fixed = min(plans[n].prediction.step_seconds for n in (None, 8, 16))
    assert plans["solve"].prediction.step_seconds == pytest.approx(fixed)


def test_micro_batches_that_do_not_divide_the_batch() -> None:
    """Six samples in four; and in two, of which devices that split the batch take slices of even numbers."""
    asked = {"pipeline": "1f1b", "recompute": "never"}
    in_four = pipelines_of("shared", micro_batches=16, partitions=4, **asked).found
    assert {one.fills[0].slices for one in in_four} == {(2, 2, 1, 1)}
    with pytest.raises(SolveError, match=r"no pipeline fits, whatever the memory; .* or ask for fewer micro-batches"):
        pipelines_of("shared", micro_batches=16, partitions=2, **asked)  # two devices each, and three pairs of samples
    in_two = pipelines_of("shared", micro_batches=8, **asked).found
    assert {one.fills[0].slices for one in in_two} == {(3, 3), (4, 2)}
    fills = [fill for one in in_two for fill in one.fills]
    split = {fill.slices for fill in fills if "S(0)" in str(fill.priced.sharding.inputs["inputs"])}
    assert split == {(4, 2)}
    assert list(offered_slices(12, (1, 2, 4, 5), 3)) == [
        ((12,), (6, 6), (3, 3, 3, 3), (3, 3, 2, 2, 2)),
        ((4, 4, 2, 2), (4, 2, 2, 2, 2)),
    ]


@pytest.mark.parametrize("recompute", ["never", "off", "always", "except_last", "full", "every"])
def test_recompute_as_it_is_asked_for(recompute: str) -> None:
    plan = plan_with_pipelines("gpt", pipeline="1f1b", recompute=recompute, partitions=2)
    covers("gpt", plan)
    (first, second), loss = plan.partitions, len(GRAPHS["gpt"]().chain) - 1
    some = [[(r.first, r.last) for r in part.regions if r.recompute] for part in plan.partitions]
    if recompute in ("never", "off"):
        assert some == [[], []] and plan.prediction.recompute_seconds == pytest.approx(0)
        return
    assert plan.prediction.recompute_seconds > 0
    if recompute == "full":
        assert some[0] + some[1] == [(i, i) for i in range(loss)]
    elif recompute == "every":  # layers of two links each, as far as a partition has them
        layers = [(max(a, p.first), min(b, p.last)) for p in plan.partitions for a, b in ((2, 3), (4, 5))]
        assert some[0] + some[1] == [(a, b) for a, b in layers if a <= b]
    else:
        assert some == [[(0, first.last)], [(second.first, loss - 1)]]


def test_all_but_the_last_micro_batch() -> None:
    """It is faster than always, by what the last backward saves on its way."""
    plans = [
        plan_with_pipelines("gpt", pipeline="gpipe", recompute=how, partitions=2)
        for how in ("always", "except_last", "never")
    ]
    assert [plan.keeps_last for plan in plans] == [False, True, False]
    assert "2 recompute regions but in the last micro-batch; " in describe(GRAPHS["gpt"](), plans[1])
    always, except_last, never = (plan.prediction for plan in plans)
    assert never.step_seconds < except_last.step_seconds < always.step_seconds
    assert except_last.recompute_seconds == pytest.approx(always.recompute_seconds * 3 / 4, rel=0.3)
    assert always.peak_bytes < except_last.peak_bytes < never.peak_bytes


def test_the_last_micro_batch_keeps_everything_within_the_budget() -> None:
    """Between the peaks of `always` and `except_last` nothing is chosen that would not fit."""
    asked = {"pipeline": "gpipe", "partitions": 2, "boundaries": ["layers.1"]}
    free = plan_with_pipelines("gpt", recompute="except_last", **asked)
    always = plan_with_pipelines("gpt", recompute="always", **asked)
    tight = least("gpt", recompute="except_last", **asked)
    assert max(part.peak_bytes for part in always.partitions) < tight <= free.prediction.peak_bytes
    plan = plan_with_pipelines("gpt", tight, recompute="except_last", **asked)
    assert plan.keeps_last and plan.prediction.peak_bytes <= tight
    piped = pipelines_of("gpt", recompute="except_last", **asked).found[0]
    for part, filled in zip(free.partitions, piped.fills, strict=True):
        _, _, hold, peak = replayed(filled.linear, part)
        links = [Region(link, link, False, ()) for link in range(part.first, part.last + 1)]
        _, _, all_held, most = replayed(filled.linear, replace(part, regions=tuple(links)))
        own = part.peak_bytes - max(3 * hold + most, 2 * hold + all_held + peak)  # four in flight
        always_own = piped.plan.partitions[free.partitions.index(part)]
        assert own == pytest.approx(always_own.peak_bytes - always_own.fullest.memory, abs=1)


# ----------------------------------------------------------------------------------------------------- compiled blocks


NOT_MEASURED = Compiled("", (), ())


def measured(name: str, times: float = 1.0) -> Compiled:
    """Every block of a model alike: all kept, or a third in more time."""
    whole = CompiledWay(1.0, times * 1e-4, times * 2e-4, 100_000, 90_000, 120_000, 200_000)
    third = CompiledWay(0.3, times * 1e-4, times * 2.5e-4, 40_000, 30_000, 120_000, 200_000)
    blocks = tuple(CompiledBlock(*span, 0) for span in blocks_of(GRAPHS[name]()))
    return Compiled("a card", blocks, ((whole, third),))


def functions_in(regions: tuple[Region, ...]) -> list[Region]:
    return [leaf for r in regions for leaf in (functions_in(r.inner) if r.recompute else [r])]


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("recompute", ["optimal", "never", "always", "except_last"])
def test_compiled_blocks_are_compiled_in_partitions_too(recompute: str, kind: str) -> None:
    for compiled in (NOT_MEASURED, measured("gpt")):
        plan = plan_with_pipelines("gpt", compiled=compiled, pipeline=kind, recompute=recompute)
        covers("gpt", plan)
        found = [leaf for part in plan.partitions for leaf in functions_in(part.regions)]
        assert tuple((leaf.first, leaf.last) for leaf in found) == blocks_of(GRAPHS["gpt"]())
        assert all(leaf.compiled is not None for leaf in found)
        spans = {(part.first, part.last) for part in plan.partitions}
        assert {(event.first, event.last) for event in plan.timeline.events} == spans


@pytest.mark.parametrize("recompute", ["full", "every"])
def test_what_is_said_of_links_compiles_them_one_by_one(recompute: str) -> None:
    asked = {"pipeline": "1f1b", "recompute": recompute}
    plan, plain = (plan_with_pipelines("gpt", compiled=own, **asked) for own in (measured("gpt"), None))
    found = [leaf for part in plan.partitions for leaf in functions_in(part.regions)]
    assert all(leaf.first == leaf.last and leaf.compiled == 1.0 for leaf in found)
    assert plan.prediction == plain.prediction  # a link was not measured by itself


def test_partitions_take_what_their_blocks_were_measured_to() -> None:
    """As plans without a pipeline, beside which they are chosen."""
    for pipeline in ("1f1b", "off"):
        once, slower = (
            plan_with_pipelines("gpt", compiled=measured("gpt", times), pipeline=pipeline) for times in (1.0, 2.0)
        )
        assert once.pipelined is (pipeline == "1f1b")
        one, other = once.prediction, slower.prediction
        assert one.compute_seconds > 1e-4 and other.compute_seconds == pytest.approx(2 * one.compute_seconds, rel=0.05)
    two = plan_with_pipelines("gpt", compiled=measured("gpt"), pipeline="gpipe", partitions=2)
    tight = least("gpt", compiled=measured("gpt"), pipeline="gpipe", partitions=2)
    assert tight < two.prediction.peak_bytes
    small = plan_with_pipelines("gpt", tight, compiled=measured("gpt"), pipeline="gpipe", partitions=2)
    assert small.prediction.peak_bytes <= tight and small.prediction.step_seconds > two.prediction.step_seconds
    kept = {leaf.compiled for part in small.partitions for leaf in functions_in(part.regions)}
    again = any(region.recompute for part in small.partitions for region in part.regions)
    assert again or 0.3 in kept


def test_slices_take_their_part_of_what_blocks_were_measured_to() -> None:
    """Three of four samples: a third of the time each, and the bytes of the largest."""
    _, profile = sliced(GRAPHS["gpt"](), replace(profile_of("gpt"), compiled=measured("gpt"), kernels=None), (2, 1, 1))
    (whole, _), (part, _) = measured("gpt").runs[0], profile.compiled.runs[0]
    assert part.forward == pytest.approx(whole.forward / 3) and part.saved == whole.saved / 2
    shared, plain = (
        plan_with_pipelines("gpt", compiled=measured("gpt"), pipeline="1f1b", partitions=2, **more)
        for more in ({"micro_batches": 8}, {})
    )
    assert shared.slices == (2, 2)
    assert shared.partitions[0].seconds == pytest.approx(plain.partitions[0].seconds / 2, rel=0.1)


def test_gradients_of_compiled_products_are_not_put_off() -> None:
    for found in pipelines_of("gpt", compiled=measured("gpt"), pipeline="zero_bubble").found:
        assert not any(nbytes for fill in found.fills for nbytes in fill.submesh.put_off)


def test_a_boundary_inside_a_compiled_block_is_refused() -> None:
    asked = {"pipeline": "1f1b", "compiled": NOT_MEASURED}
    plan = plan_with_pipelines("gpt", boundaries=["layers.1"], **asked)
    assert [(part.first, part.last) for part in plan.partitions] == [(0, 3), (4, 8)]
    told = r"layers.1.up begins inside a block that is compiled as one function, links 4..5; name the module with which"
    with pytest.raises(SolveError, match=told):
        plan_with_pipelines("gpt", boundaries=["layers.1.up"], **asked)


def test_one_micro_batch_is_the_last() -> None:
    plan = plan_with_pipelines("gpt", passes=1, pipeline="1f1b", recompute="except_last")
    assert plan.micro_batches == 1 and not plan.keeps_last
    assert not any(region.recompute for part in plan.partitions for region in part.regions)


def test_a_last_micro_batch_needs_a_pipeline_or_to_be_the_only_one() -> None:
    cluster, frontier = with_submeshes("gpt")
    given = (GRAPHS["gpt"](), profile_of("gpt"), cluster, replace(frontier, submesh_points=()))
    told = "no plans of fewer devices .*, and `recompute: except_last` with 4 micro-batches needs one; set `recompute`"
    with pytest.raises(SolveError, match=told):
        find_pipelines(*given, settings_of("solve", "except_last"), FILE)
    alone = plan_with_pipelines("gpt", passes=1, pipeline="off", recompute="except_last")
    assert not alone.pipelined and not any(region.recompute for region in alone.regions)
    assert plan_with_pipelines("gpt", recompute="except_last").pipelined  # none else is looked at


def test_a_pipeline_that_is_solved_for_is_taken_where_it_is_faster() -> None:
    plan = plan_with_pipelines("gpt", micro_batches="solve")
    named = [plan_with_pipelines("gpt", pipeline=kind, micro_batches="solve") for kind in SCHEDULES]
    alone = plan_with_pipelines("gpt", pipeline="off")
    every = [alone, *named]
    assert plan.prediction.step_seconds == pytest.approx(min(p.prediction.step_seconds for p in every))
    assert not alone.pipelined and alone.schedule == "" and alone.chunks == 1 and all(p.pipelined for p in named)
    assert ("no pipeline" in " ".join(a.what for a in plan.alternatives)) is plan.pipelined


def test_no_pipeline_where_there_are_no_submeshes() -> None:
    cluster, frontier = with_submeshes("gpt")
    frontier = replace(frontier, submesh_points=())
    given = (GRAPHS["gpt"](), profile_of("gpt"), cluster, frontier)
    assert not find_pipelines(*given, settings_of("solve"), FILE).found
    with pytest.raises(SolveError, match=f"^{FILE}: pipeline: the frontier has no plans of fewer devices"):
        find_pipelines(*given, settings_of("1f1b"), FILE)
    one = replace(cluster, devices=1, splits=())
    with pytest.raises(SolveError, match="pipeline needs several devices, and the cluster has one"):
        find_pipelines(*given[:2], one, frontier, settings_of("1f1b"), FILE)


# ------------------------------------------------------------------------------------------------------------ budgets


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_the_budget_that_is_named_is_accepted_and_its_floor_told(kind: str) -> None:
    with pytest.raises(SolveError) as refused:
        plan_with_pipelines("gpt", budget=1000, pipeline=kind)
    line = refused.value.line()
    assert re.search(rf"in partition \d of \d \(links \d\.\.\d, {kind}, \d in flight\)", line)
    assert re.search(r"activations when link \d \([^)]+\) runs (forward|backward); raise the budget to that", line)
    tight = least("gpt", pipeline=kind)
    plan = plan_with_pipelines("gpt", budget=tight, pipeline=kind)
    assert plan.prediction.peak_bytes <= tight and plan.prediction.recompute_seconds > 0
    with pytest.raises(SolveError):
        plan_with_pipelines("gpt", budget=round(0.97 * tight), pipeline=kind)


def test_the_tightest_budget_is_that_of_all_plans() -> None:
    alone, piped = least("gpt", pipeline="off"), least("gpt", pipeline="1f1b")
    assert least("gpt", pipeline="solve") <= min(alone, piped) * 1.01


def test_pipelines_that_do_not_fit_are_told_as_an_alternative() -> None:
    alone, piped = (least("gpt", pipeline=kind, recompute="off") for kind in ("off", "1f1b"))
    budget = (alone + piped) // 2
    plan = plan_with_pipelines("gpt", budget=budget, recompute="off")
    (told,) = (a for a in plan.alternatives if a.what == "any pipeline")
    assert not plan.pipelined and told.seconds is None and told.peak_bytes == pytest.approx(piped, rel=0.01)
    assert told.lost == f"needs {(told.peak_bytes - budget) / 1e9:.4g} GB more than the budget of {budget / 1e9:.4g} GB"


# ------------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_timeline_is_that_of_the_step(kind: str) -> None:
    plan = plan_with_pipelines("gpt", pipeline=kind)
    events, step = plan.timeline.events, plan.prediction.step_seconds
    devices = len(plan.partitions) // plan.chunks
    assert max(e.start + e.seconds for e in events) == pytest.approx(step)
    for device in range(devices):
        own = sorted((e for e in events if e.partition % devices == device), key=lambda e: e.start)
        assert all(a.start + a.seconds <= b.start + 1e-12 for a, b in pairwise(own))
        waits = sum(t.seconds for t in plan.timeline.totals if t.partition == device and t.what == "waiting")
        assert sum(e.seconds for e in own) + waits == pytest.approx(step)
    for number, part in enumerate(plan.partitions):
        own = [e for e in events if e.partition == number and e.micro_batch is not None]
        assert sum(e.seconds for e in own) == pytest.approx(plan.micro_batches * part.seconds)
        assert {e.micro_batch for e in own} == set(range(4)) and {(e.first, e.last) for e in own} == {
            (part.first, part.last)
        }


@pytest.mark.parametrize("recompute", ["off", "full", "always"])
def test_the_timeline_of_a_plan_without_a_pipeline_sums_to_its_step(recompute: str) -> None:
    plan = plan_with_pipelines("gpt", pipeline="off", recompute=recompute)
    events = plan.timeline.events
    assert sum(e.seconds for e in events) == pytest.approx(plan.prediction.step_seconds)
    assert sum(t.seconds for t in plan.timeline.totals) == pytest.approx(plan.prediction.step_seconds)
    assert all(a.start + a.seconds == pytest.approx(b.start) for a, b in pairwise(events))
    assert max(e.held_bytes for e in events if e.held_bytes) == plan.prediction.peak_bytes
    spent = sum(e.seconds for e in events if e.what == "recompute")
    assert spent == pytest.approx(plan.prediction.recompute_seconds, abs=1e-15)
    assert (spent > 0) is (recompute != "off")


@pytest.mark.parametrize("kind", ["off", "1f1b"])
def test_a_long_timeline_leaves_out_what_is_in_the_middle(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from shardwright.stages.checkpoint import timeline

    whole = plan_with_pipelines("gpt", pipeline=kind).timeline
    monkeypatch.setattr(timeline, "MOST_EVENTS", len(whole.events) - 1)
    short = plan_with_pipelines("gpt", pipeline=kind).timeline
    assert short.events == tuple(event for event in whole.events if event.micro_batch != 2)
    assert short.totals == whole.totals
    assert short.note == f"{len(whole.events)} events are too many to list: micro-batches 2 to 2 of 4 are left out"


def test_a_long_timeline_keeps_its_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.stages.checkpoint import timeline

    whole = plan_with_pipelines("gpt", pipeline="1f1b").timeline
    monkeypatch.setattr(timeline, "MOST_EVENTS", 3)
    short = plan_with_pipelines("gpt", pipeline="1f1b").timeline
    assert not short.events and short.totals == whole.totals
    assert short.note.startswith(f"{len(whole.events)} events are too many")


def test_the_plan_is_written_and_read() -> None:
    plan = plan_with_pipelines("gpt", pipeline="interleaved")
    assert decode(Plan, encode(plan)) == plan
    for name in ("axes", "sharding", "regions", "sizes"):
        with pytest.raises(ValueError, match="the plan is a pipeline of 4 partitions: ask each of them"):
            getattr(plan, name)
    ops = {op for part in plan.partitions for op in part.sharding.strategies}
    assert ops == {op.name for op in GRAPHS["gpt"]().ops}
    links = [{op for link in GRAPHS["gpt"]().chain[p.first : p.last + 1] for op in link.ops} for p in plan.partitions]
    before = [set(part.sharding.strategies) - own for part, own in zip(plan.partitions, links, strict=True)]
    assert before == [{"arange"}, set(), set(), {"flatten_1"}]  # positions and labels, where they are read


def test_alternatives_say_why_they_lost() -> None:
    plan = plan_with_pipelines("gpt", micro_batches="solve")
    assert len(plan.alternatives) == 10
    assert [a.seconds for a in plan.alternatives] == sorted(a.seconds for a in plan.alternatives)
    scale = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    for other in plan.alternatives:
        slower, unit, parts = re.fullmatch(r"(\S+) (us|ms|s) slower: (.*)", other.lost).groups()
        assert other.seconds - plan.prediction.step_seconds == pytest.approx(float(slower) * scale[unit], rel=0.01)
        changes = [float(part.split()[0]) for part in parts.split(", ")]
        assert sum(changes) == pytest.approx(float(slower), rel=0.3, abs=0.1 * float(slower) + 0.1)
        assert "micro-batches" in other.what and "recompute" in other.what


def test_a_pipeline_in_one_line_and_in_figures() -> None:
    plan = plan_with_pipelines("gpt", pipeline="1f1b", partitions=2)
    line = describe(GRAPHS["gpt"](), plan)
    assert re.match(r"4 ranks; 1f1b of 2 partitions \(links 0\.\.\d on d0=2, \d\.\.8 on d0=2\); bubble \d+%; ", line)
    own = figures(plan)
    assert (own["partitions"], own["schedule"], own["micro_batches"]) == (2, "1f1b", 4) and own["bubble_ms"] > 0


def test_submeshes_of_unlike_sizes_may_follow_one_another_where_links_are_alike() -> None:
    cluster, _ = with_submeshes("gpt")
    (every,) = usable_splits(cluster)
    assert every.sizes == () and set(every.meshes) == {"1", "2"}
    found = {tuple(p.plan.devices) for p in pipelines_of("gpt", pipeline="1f1b").found}
    assert any(len(set(devices)) > 1 for devices in found) and all(sum(devices) == 4 for devices in found)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_on_eight_devices_all_are_used_within_the_budget(kind: str) -> None:
    tight = least("mlp", pipeline=kind, devices=8)
    for budget in (None, tight):
        plan = plan_with_pipelines("mlp", budget, devices=8, pipeline=kind)
        covers("mlp", plan)
        assert sum(prod(part.sizes) for part in plan.partitions) == 8 * plan.chunks
        assert plan.prediction.peak_bytes <= plan.budget_bytes


def test_where_links_differ_submeshes_are_those_of_a_split() -> None:
    """Two hosts of two: a submesh of two is a host, and its links are faster than those between hosts."""
    settings = ClusterSettings(
        source=ClusterSource.preset,
        device=Device.cpu,
        devices=2,
        nodes=2,
        memory_gb=4,
        preset=Preset(
            matmul_gflops=50,
            memory_gbytes_per_s=10,
            launch_us=0.01,
            latency_us=0.05,
            link_gbytes_per_s=8,
            network_latency_us=1,
            network_gbytes_per_s=1,
        ),
    )
    cluster = from_preset(settings)
    splits = usable_splits(cluster)
    assert [split.sizes for split in splits] == [split.sizes for split in cluster.splits] == [(2, 2), (1, 1, 1, 1)]
    _, frontier = with_submeshes("mlp")
    found = find_pipelines(GRAPHS["mlp"](), profile_of("mlp"), cluster, frontier, settings_of("1f1b"), FILE).found
    assert {piped.plan.devices for piped in found} == {(2, 2), (1, 1, 1, 1)}
    two = next(piped for piped in found if piped.plan.devices == (2, 2))
    assert two.fills[0].priced.cluster.axes[0].links == cluster.splits[0].meshes["2"][0].axes[0].links
    sends = [part.load.send for part in two.plan.partitions[:-1]]
    assert all(send >= cluster.splits[0].link.latency for send in sends)


# ----------------------------------------------------------------------------------------------------- between layouts


def test_what_it_costs_to_lay_out_an_activation_anew() -> None:
    graph = GRAPHS["gpt"]()
    cluster, frontier = with_submeshes("gpt")
    split = next(s for s in cluster.splits if s.sizes == (2, 2))
    mesh, one = split.meshes["2"][0], next(s for s in cluster.splits if len(s.sizes) == 4).meshes["1"][0]
    value = graph.values[graph.chain[3].input]
    points = {prod(frontier.meshes[p.mesh].sizes): p for p in frontier.submesh_points}

    def filled(name: str, on: Mesh, layout: Layout):
        point = points[prod(on.sizes)]
        priced = Workload(graph, profile_of("gpt"), cluster.part(on), 2.0, 4).priced(point.sharding)
        priced.sharded.home[value.name] = layout
        return fill(name, priced, (1,), lambda nbytes: 0.0)

    def seconds(a: tuple[Mesh, Layout], b: tuple[Mesh, Layout]) -> float:
        both = {"a": filled("a", *a), "b": filled("b", *b)}
        return Resharding(graph, both, cluster)(3, both["a"].submesh, both["b"].submesh)

    whole, halves, summands = Layout((R,)), Layout((S(0),)), Layout((P,))
    links = mesh.axes[0].links
    gather = links["all_gather"].seconds(value.type.nbytes)
    assert seconds((mesh, halves), (mesh, halves)) == seconds((mesh, whole), (mesh, whole)) == 0.0
    assert seconds((mesh, halves), (mesh, whole)) >= gather / 2  # gathered; its gradient is sliced
    assert seconds((one, whole), (mesh, halves)) == 0.0  # each gets its half
    assert seconds((one, whole), (mesh, whole)) >= gather / 2  # each gets half, and gathers
    reduce = links["all_reduce"].seconds(value.type.nbytes)
    assert seconds((mesh, summands), (one, whole)) >= reduce / 2  # summed before it is sent
    assert seconds((mesh, halves), (mesh, Layout((B,)))) > seconds((mesh, halves), (mesh, whole))


# ------------------------------------------------------------------------------------------------------------ the stage


@pytest.mark.parametrize("kind", ["off", "solve", "1f1b"])
def test_the_stage_writes_the_plan(tmp_path: Path, kind: str) -> None:
    cluster, frontier = with_submeshes("gpt")
    bodies = {"graph": GRAPHS["gpt"](), "profile": profile_of("gpt"), "cluster": cluster, "frontier": frontier}
    made = {name: artifacts.make(name, body, [], {}) for name, body in bodies.items()}
    config = replace(load_config(PROJECT), checkpoint=settings_of(kind))
    result = stage.run(Inputs(tmp_path, made, SILENT, None), config)
    assert replace(result.body, released=()) == plan_with_pipelines("gpt", pipeline=kind)
    assert result.figures["schedule"] == (result.body.schedule or "none")
    saved = artifacts.save(artifacts.make("plan", result.body, made.values(), {}), tmp_path)
    assert artifacts.load("plan", tmp_path).body == result.body and saved.name == "plan.json"


def test_partitions_of_the_mesh_that_the_user_fixes() -> None:
    """Solve kept plans of its submeshes alone: no plan without a pipeline is left."""
    cluster, frontier = with_submeshes("gpt")
    halves = tuple(p for p in frontier.submesh_points if frontier.meshes[p.mesh].sizes == (2,))
    frontier = replace(frontier, points=(), submesh_points=halves)
    given = (GRAPHS["gpt"](), profile_of("gpt"), cluster, frontier)
    for kind, count in (("1f1b", 2), ("interleaved", 4)):
        found = find_pipelines(*given, settings_of(kind), FILE)
        plan = choose([], cluster, frontier, WHERE, GRAPHS["gpt"](), found)
        assert [part.sizes for part in plan.partitions] == [(2,)] * count
    with pytest.raises(SolveError, match="the frontier has no plan for all devices, and a pipeline is not asked for"):
        choose([], cluster, frontier, WHERE, GRAPHS["gpt"]())
    with pytest.raises(SolveError, match=f"^{FILE}: partitions: there is no pipeline as asked for"):
        find_pipelines(*given, settings_of("1f1b", partitions=3), FILE)


def test_slots_per_link_is_obeyed(monkeypatch) -> None:
    efforts = []

    def noted(divisions, memory, wishes, effort, reshard):
        efforts.append(effort)
        return partition(divisions, memory, wishes, effort, reshard)

    monkeypatch.setattr("shardwright.stages.checkpoint.pipelines.pipelined.partition", noted)
    for per_link in (1, 300):
        assert pipelines_of("gpt", slots_per_link=per_link).found
    assert [effort.slots.of(10) for effort in efforts] == [500, 3000]


def test_what_partitions_send_behind_their_work_shortens_the_step() -> None:
    """Of each pipeline beside the same one with nothing hidden; where weights' gradients are deferred no sum is."""
    cluster, frontier = with_submeshes("gpt")
    for kind in SCHEDULES:
        settings = settings_of(pipeline=kind)
        plain, found = (
            find_pipelines(GRAPHS["gpt"](), profile_of("gpt"), on, frontier, settings, FILE).found
            for on in (replace(cluster, overlap=Overlap("runtime", hidden)) for hidden in (1e-9, 1.0))
        )  # of both the messages go as torch has it
        before = {
            (str(one.plan.firsts), one.plan.chunks, tuple(f.submesh.name for f in one.fills)): one for one in plain
        }
        assert len(before) == len(plain) == len(found)
        for one in found:
            other = before[str(one.plan.firsts), one.plan.chunks, tuple(f.submesh.name for f in one.fills)]
            assert one.plan.seconds <= other.plan.seconds * (1 + 1e-9)
            own, whole = predict(one), predict(other)
            parts = own.compute_seconds + own.communication_seconds + own.recompute_seconds + own.optimizer_seconds
            assert own.step_seconds == pytest.approx(parts + own.bubble_seconds, rel=1e-9)
            assert whole.hidden_seconds == pytest.approx(0.0, abs=1e-12) and own.hidden_seconds >= 0.0
            assert all(hidden.once == 0.0 for hidden in one.hidden) or kind != "zero_bubble"
        assert [one.plan.seconds for one in found] == sorted(one.plan.seconds for one in found)


def test_sums_of_a_partition_hide_behind_its_own_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into buckets as small as these models are: what is hidden is less than all sums, and taken off them."""
    monkeypatch.setattr(
        "shardwright.pipeline.cost.traffic.bucket_members", partial(bucket_members, first=1000, most=4000)
    )
    cluster, frontier = with_submeshes("gpt")
    hides = replace(cluster, overlap=Overlap("runtime", 1.0))
    found = find_pipelines(
        GRAPHS["gpt"](), profile_of("gpt"), hides, frontier, settings_of(pipeline="1f1b"), FILE
    ).found
    some = 0
    for one in found:
        for part, filled, hidden in zip(one.plan.partitions, one.fills, one.hidden, strict=True):
            first, last = one.fills[0].linear.spans[part.first][0], one.fills[0].linear.spans[part.last][1]
            own = filled.once[first : last + 1]
            assert part.load.once == pytest.approx(sum(each.total for each in own) - hidden.once)
            assert 0 <= hidden.once <= sum(each.communication for each in own) * (1 + 1e-9)
            some += hidden.once > 0
    assert some
