"""Prices of layouts that are given: sizes, what a rank does, links, step, memory, search and calibration."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwright.pipeline.base.errors import ClusterError
from shardwright.pipeline.config import (
    DType,
    ModelSettings,
    Precision,
    TensorSpec,
    listing,
    load_config,
    load_part,
)
from shardwright.pipeline.config.schema import OverlapMode
from shardwright.pipeline.cost.lines import LineTask, played
from shardwright.pipeline.cost.pipelines.play import Load, simulate
from shardwright.pipeline.cost.pipelines.schedules import Pipeline, orders, sending_of
from shardwright.pipeline.ir.cluster import Overlap
from shardwright.pipeline.layouts.calibrate import FITTED, MeasuredStep, calibrated, predicted, with_shares
from shardwright.pipeline.layouts.conf_model import with_works
from shardwright.pipeline.layouts.machine import machine_of
from shardwright.pipeline.layouts.measured import AllWorks
from shardwright.pipeline.layouts.search import Wanted, candidates, search
from shardwright.pipeline.layouts.sizes import (
    KNOWN,
    AttentionKernel,
    LayoutError,
    ParallelLayout,
    Transformer,
    stage_layers,
    why_not,
)
from shardwright.pipeline.layouts.step import (
    LayoutPrices,
    StageSeconds,
    handovers,
    in_flight,
    optimizer_seconds,
    pipeline_seconds,
    state_bytes,
    visible,
)
from shardwright.pipeline.layouts.traced import module_settings
from shardwright.pipeline.layouts.words import ConfModel
from shardwright.pipeline.layouts.work import RecomputeMode
from shardwright.pipeline.models.conv import ConvNet
from shardwright.stages.commands import planner_stages

ROOT = Path(__file__).resolve().parents[2]
SMALL = Transformer(hidden=1024, layers=24, heads=16, sequence=1024, vocabulary=51200, batch=256)
GATED = Transformer(1024, 24, 16, 1024, 32000, 4, 2816, True, False, False, 256)
MIXED = Transformer(1024, 24, 16, 1024, 32000, 4, 1408, True, False, False, 256, 8, 2)
PLAIN = AttentionKernel.plain
PLANNER = planner_stages()
WORKS = AllWorks(load_config(ROOT), PLANNER)


def machine(nodes=8, cluster="dgx_a100_infiniband", **preset):
    settings = load_part(ROOT, "cluster", cluster, nodes=nodes)
    return machine_of(replace(settings, preset=replace(settings.preset, **preset)), PLANNER, cluster)


MACHINE = machine()


def prices(model=SMALL, own=MACHINE):
    return LayoutPrices(model, WORKS(model), own)


# --------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt_7.5b", 7.5),
        ("gpt_145b", 145.6),
        ("gpt3_175b", 175),
        ("gpt_1t", 1008),
        ("llama2_70b", 69),
        ("llama3_8b", 8),
    ],
)
def test_known_models_have_the_size_of_their_name(name, billions):
    assert KNOWN[name].parameters / 1e9 == pytest.approx(billions, rel=0.015)


def test_every_known_model_divides():
    for model in KNOWN.values():
        assert why_not(model, ParallelLayout(1, 1, 1, 1, model.batch)) is None and model.heads % model.keys == 0


def test_flops_are_those_that_are_published():
    """Narayanan et al.: 72 and 6 in their formula where nothing is computed twice, 96 and 16 with full recompute."""
    model = KNOWN["gpt_39b"]
    s, h, layers, words = model.sequence, model.hidden, model.layers, model.vocabulary
    assert model.sample_flops == pytest.approx(72 * s * layers * h**2 * (1 + s / (6 * h) + words / (12 * layers * h)))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tp": 3}, "tp=3 does not divide heads"),
        ({"pp": 32}, "pp=32 is more than layers=24"),
        ({"micro_batch": 3}, "micro_batch=3 does not divide batch=256"),
        ({"chunks": 2}, "schedule=1f1b with chunks=2"),
        ({"chunks": 2, "schedule": Pipeline.INTERLEAVED}, "pp of at least 2"),
        ({"chunks": 5, "schedule": Pipeline.INTERLEAVED, "pp": 2}, "chunks=5 does not divide layers=24"),
        ({"chunks": 2, "schedule": Pipeline.INTERLEAVED, "pp": 3}, "multiple of pp=3"),
    ],
)
def test_what_does_not_divide_is_named(changes, what):
    with pytest.raises(LayoutError, match=what):
        prices().price(replace(ParallelLayout(1, 1, 1, 1, 256), **changes))


# ------------------------------------------------------------------------------------------------- what a rank does


def parts(model=SMALL, tp=1, split=False, samples=4, attention=AttentionKernel.flash):
    return WORKS(model).parts(attention, tp, split, samples)


def flops(work):
    return sum(kernel.flops for kernel in work.kernels)


@pytest.mark.parametrize(
    "model", [SMALL, GATED, MIXED, replace(SMALL, experts=4)], ids=["gpt", "llama", "mixtral", "gpt with experts"]
)
@pytest.mark.parametrize("tp", [1, 4])
def test_a_layer_does_the_arithmetic_of_its_sizes(model, tp):
    """2 FLOPs for each parameter of a product and token, half of the pairs of attention; backward twice as much."""
    layer, tokens = parts(model, tp).layer, 4 * model.sequence
    products = 2 * tokens * model.passed_parameters / tp
    pairs = 2 * tokens * model.sequence * model.hidden / tp
    assert flops(layer.forward) == pytest.approx(products + pairs, rel=0.02)
    assert flops(layer.backward) == pytest.approx(2 * products + 2.5 * pairs, rel=0.03)
    assert sum(layer.parameters) == pytest.approx(2 * model.layer_parameters / tp, rel=0.01)


def test_every_token_meets_its_experts_in_one_product():
    """The rows of all experts together; tensor parallelism splits each of them, as a feed-forward."""
    rows = 2 * 4 * MIXED.sequence
    for tp, inner in ((1, 1408), (4, 352)):
        layer = parts(MIXED, tp).layer
        found = [kernel.shapes[:2] for kernel in layer.forward.kernels if kernel.name == "_grouped_mm"]
        assert found == [((rows, 1024), (8, 1024, inner))] * 2 + [((rows, inner), (8, inner, 1024))]
    plain, mixed = prices(GATED), prices(MIXED)
    layout = ParallelLayout(8, 1, 1, 1, 256)
    assert mixed.memory(layout) > plain.memory(layout) and 0 < mixed.price(layout).mfu < plain.price(layout).mfu


def test_the_size_of_a_mixture_is_the_published_one():
    """Mixtral 8x7B (Jiang et al.): 47 billion parameters, of which a token meets 13."""
    model = Transformer(4096, 32, 32, 4096, 32000, 8, 14336, True, False, False, 256, 8, 2)
    assert model.parameters == pytest.approx(46.7e9, rel=0.01)
    passed = model.parameters - model.layers * (model.layer_parameters - model.passed_parameters)
    assert passed == pytest.approx(12.9e9, rel=0.01)


def kinds(work):
    return sorted(one.kind for one in work.collectives)


def test_tensor_parallelism_is_megatrons():
    """Two all-reduces each way (Shoeybi et al.), or as many gathers and scatters (Korthikanti et al.)."""
    plain, split = parts(tp=4).layer, parts(tp=4, split=True).layer
    assert kinds(plain.forward) == kinds(plain.backward) == ["all_reduce"] * 2
    assert kinds(split.forward) == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
    assert kinds(split.backward) == kinds(split.forward)
    moved = {one.nbytes for one in (*plain.forward.collectives, *split.forward.collectives)}
    assert moved == {2 * 4 * SMALL.sequence * SMALL.hidden}
    assert kinds(parts().layer.forward) == []


@pytest.mark.parametrize("samples", [1, 5, 9])
def test_any_number_of_samples_is_as_if_it_were_traced(samples):
    """Twice what another trace is grown from, so that the line is held against kernels of a third size."""
    works = WORKS(SMALL)
    own = works.parts(AttentionKernel.flash, 2, False, samples).layer
    twice = works.parts(AttentionKernel.flash, 2, False, 2 * samples).layer
    assert flops(twice.forward) == pytest.approx(2 * flops(own.forward))
    outputs = [kernel.shapes[-1] for kernel in own.forward.kernels if kernel.name in ("mm", "addmm")]
    assert {shape[0] for shape in outputs} == {samples * SMALL.sequence}
    assert twice.output == 2 * own.output == 4 * samples * SMALL.sequence * SMALL.hidden


def test_activations_are_those_of_a_known_formula():
    """Korthikanti et al.: s b h (34 + 5 a s / h) bytes for a layer that keeps everything."""
    s, h, a = SMALL.sequence, SMALL.hidden, SMALL.heads
    kept = parts(attention=PLAIN).layer.held[RecomputeMode.none].saved
    assert kept == pytest.approx(4 * s * h * (34 + 5 * a * s / h), rel=0.12)


def test_selective_recompute_keeps_products_and_not_the_scores():
    layer = parts(attention=PLAIN).layer
    saved = {way: held.saved for way, held in layer.held.items()}
    assert saved[RecomputeMode.full] < saved[RecomputeMode.selective] < 0.4 * saved[RecomputeMode.none]
    again = [kernel.name for kernel in layer.again[RecomputeMode.selective].kernels]
    assert "_softmax" in again and "gelu" in again and "addmm" not in again and again.count("bmm") == 1
    assert (
        flops(layer.again[RecomputeMode.full]) > 0.9 * flops(layer.forward)
        and not layer.again[RecomputeMode.none].kernels
    )


# ------------------------------------------------------------------------------------------------------------- machine


def test_a_card_and_its_links_reach_what_the_preset_says():
    settings = load_part(ROOT, "cluster", "dgx_a100", nodes=1)
    reached = replace(settings.preset.reached, products=0.5, memory=0.6, links=0.25, collective_us=7.0, kernel_us=34.0)
    own = machine_of(replace(settings, preset=replace(settings.preset, reached=reached)), PLANNER, "here")
    assert own.card.products["bfloat16"] == pytest.approx(0.5 * 312e12) and own.card.memory == pytest.approx(
        0.6 * 2039e9
    )
    assert own.card.host.kernel == pytest.approx(34e-6) and own.card.host.op == pytest.approx(18e-6)
    gather = own.axis("tp", 8, 1).links["all_gather"]
    assert gather.bandwidth == pytest.approx(0.25 * 300e9 * 8 / 7)
    assert gather.latency == pytest.approx(7e-6 + 7 * 3.4e-6)


def test_links_of_an_axis_are_those_of_a_mesh_of_the_planner():
    group = PLANNER.group(MACHINE.settings)
    from shardwright.stages.cluster.meshes import candidate_meshes

    mesh = next(mesh for mesh in candidate_meshes(group) if mesh.sizes == (2, 4, 8))
    assert MACHINE.axis("tp", 8, 1).links == mesh.axes[2].links
    assert MACHINE.axis("dp", 4, 8).links == mesh.axes[1].links


def test_a_machine_of_other_sizes_has_whole_hosts_and_slower_links_are_slower_to_begin():
    assert [machine(1).sized(devices).devices for devices in (4, 8, 12, 64)] == [4, 8, 16, 64]
    late = machine(1, reached=replace(MACHINE.settings.preset.reached, collective_us=7.0))
    own, slower = (one.axis("tp", 8, 1).links["all_reduce"] for one in (late, late.with_links(0.5, 3.0)))
    assert slower.latency == pytest.approx(3 * own.latency) and slower.bandwidth == pytest.approx(own.bandwidth / 2)


def test_what_is_measured_or_uneven_is_refused():
    for name, what in (("local_cpu", "measured"), ("simulated", "differ")):
        with pytest.raises(ClusterError, match=what):
            machine_of(load_part(ROOT, "cluster", name), PLANNER, "here")


def test_every_described_cluster_has_a_price():
    for name in listing(ROOT, "cluster"):
        settings = load_part(ROOT, "cluster", name)
        if settings.source.value != "probe" and not settings.per_host:
            own = machine_of(settings, PLANNER, name)
            model = replace(SMALL, batch=256 * own.devices)
            priced = prices(model, own).price(ParallelLayout(own.devices, 1, 1, 1, model.batch))
            assert 0 < priced.mfu < 1, name


def test_cards_of_one_kind_reach_the_same():
    names = [name for name in listing(ROOT, "cluster") if "a100" in name]
    found = [load_part(ROOT, "cluster", name).preset.reached for name in names]
    assert len(names) == 5 and all(own == found[0] for own in found) and found[0].kernel_us is not None


# ---------------------------------------------------------------------------------------------------------------- step


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(1, 4, 1), (4, 8, 1), (4, 16, 3), (16, 64, 2)])
def test_the_bubble_of_equal_stages(stages, micro_batches, chunks):
    """(p - 1) / m of the busy time, over the chunks of each stage."""
    schedule = Pipeline.INTERLEAVED if chunks > 1 else Pipeline.ONE_F_ONE_B
    layout = ParallelLayout(1, 1, stages, 1, micro_batches, schedule=schedule, chunks=chunks)
    seconds, _ = pipeline_seconds([StageSeconds(1.0, 2.5, 0.0)] * stages, layout)
    busy = micro_batches * 3.5
    assert seconds - busy == pytest.approx(busy * (stages - 1) / micro_batches / chunks)


@pytest.mark.parametrize("overlap", list(OverlapMode))
@pytest.mark.parametrize(
    ("schedule", "chunks"), [(Pipeline.GPIPE, 1), (Pipeline.ONE_F_ONE_B, 1), (Pipeline.INTERLEAVED, 2)]
)
@pytest.mark.parametrize(("stages", "rounds"), [(2, 1), (2, 8), (4, 1), (4, 4), (8, 3)])
def test_transfers_of_equal_stages_take_what_the_planner_plays(overlap, schedule, chunks, stages, rounds):
    """Also where they take longer than what they run beside: then within a quarter."""
    layout = ParallelLayout(1, 1, stages, 1, stages * rounds, schedule=schedule, chunks=chunks, overlap=overlap)
    order = orders(schedule, stages, layout.micro_batches, chunks)
    for message, worst in ((0.0, 1e-9), (0.1, 0.04), (3.0, 0.25)):
        ends = [(stage == 0, stage == stages - 1) for stage in range(stages)]
        handed = [handovers(3.0 * chunks, layout, message, end, 1.0) for end in ends]
        found, _ = pipeline_seconds([StageSeconds(1.0 * chunks, 2.0 * chunks, 0.0, *own) for own in handed], layout)
        sending = sending_of(Overlap(overlap.value, 1.0), schedule)
        assert found == pytest.approx(
            simulate(order, [Load(1.0, 2.0, message)] * order.partitions, sending).seconds, worst
        )


def test_what_runs_again_may_wait_for_no_gradient():
    """GPipe's recompute: the last of 4 stages is through with its forward before the gradient is there."""
    order = orders(Pipeline.GPIPE, 4, 8)
    plain, early = ([Load(1.0, 3.0, early=own)] * 4 for own in (0.0, 1.0))
    assert simulate(order, plain).seconds == (8 + 3) * 4.0
    assert simulate(order, early).seconds == 8 * 4.0 + 3 * 3.0


def test_what_overlaps_costs_the_longer_and_a_part_of_the_shorter():
    """As the planner plays it."""
    for links, beside in ((0.0, 5.0), (2.0, 5.0), (5.0, 2.0)):
        for hidden in (0.0, 0.8, 1.0):
            both = played([LineTask("card", beside), LineTask("links", links, uses="links")], hidden).seconds
            assert visible(links, beside, hidden) == pytest.approx(both - beside)


LAYOUTS = [
    ParallelLayout(8, 1, 1, 4, 256),
    ParallelLayout(2, 4, 1, 4, 256, zero=1),
    ParallelLayout(4, 2, 1, 2, 256, zero=3, sequence_parallel=True),
    ParallelLayout(2, 2, 4, 4, 256, zero=2),
    ParallelLayout(2, 2, 4, 2, 256, schedule=Pipeline.INTERLEAVED, chunks=3, sequence_parallel=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("attention", list(AttentionKernel))
def test_the_laws_of_a_step(layout, attention):
    layout = replace(layout, attention=attention)
    own = prices().price(layout)
    assert 0 < own.mfu <= 1 and min(own.communication, own.bubble) >= 0 and own.communication + own.bubble < 1
    assert own.tokens_per_s == pytest.approx(256 * 1024 / own.seconds)
    overlaps = [
        prices().price(replace(layout, overlap=overlap)).seconds
        for overlap in (OverlapMode.none, OverlapMode.runtime, OverlapMode.megatron)
    ]
    assert overlaps == sorted(overlaps, reverse=True) and (overlaps[0] > overlaps[1] or layout.dp == 1)
    again = [prices().price(replace(layout, recompute=way)) for way in RecomputeMode]
    assert again[0].seconds < again[1].seconds < again[2].seconds
    preset = MACHINE.settings.preset
    for figure in ("half_gflops", "memory_gbytes_per_s", "link_gbytes_per_s", "network_gbytes_per_s"):
        faster = machine(8, **{figure: 2 * getattr(preset, figure)})
        assert prices(own=faster).price(layout).seconds <= own.seconds * (1 + 1e-9), figure
    assert own.seconds == pytest.approx(prices().seconds(layout))


def test_zero_gathers_and_scatters_what_its_level_splits_in_each_micro_batch():
    """ZeRO-2 the gradients after backward, ZeRO-3 also the parameters before both passes."""
    layout = ParallelLayout(8, 1, 1, 4, 256, overlap=OverlapMode.none)
    links, own = MACHINE.axis("dp", 8, 1).links, parts()
    gathered, scattered = (
        sum(
            links[kind].seconds(sum(part.parameters)) * times
            for part, times in ((own.before, 1), (own.layer, 24), (own.after, 1))
        )
        for kind in ("all_gather", "reduce_scatter")
    )
    (plain,), (first,), (second,), (third,) = (prices().stages(replace(layout, zero=zero)) for zero in range(4))
    assert first == plain and second.forward == plain.forward
    assert second.backward - plain.backward == pytest.approx(scattered)
    assert third.forward - plain.forward == pytest.approx(gathered)
    assert third.backward - plain.backward == pytest.approx(gathered + scattered)


@pytest.mark.parametrize(("dp", "zero"), [(1, 0), (8, 3)])
def test_the_optimizer_updates_each_parameter_once(dp, zero):
    """A tied embedding as well; with ZeRO each replica its own part. Nothing else is left for the end of the step."""
    layout = ParallelLayout(dp, 1, 1, 4, 256, zero=zero, overlap=OverlapMode.none)
    ends = prices().seconds(layout) - pipeline_seconds(prices().stages(layout), layout)[0]
    assert ends == pytest.approx(optimizer_seconds(SMALL.parameters / dp, MACHINE.card), rel=0.02)


def test_megatrons_overlap_hides_what_tensor_parallelism_sends():
    layout = ParallelLayout(1, 8, 1, 8, 256, sequence_parallel=True)
    runtime, megatron = (
        prices().price(replace(layout, overlap=own)) for own in (OverlapMode.runtime, OverlapMode.megatron)
    )
    assert megatron.communication < 0.8 * runtime.communication and megatron.seconds < runtime.seconds


def test_the_ends_and_uneven_layers():
    layout = ParallelLayout(1, 1, 4, 1, 8)
    found = prices().stages(layout)
    assert found[-1].total > found[0].total > found[1].total and found[1] is found[2]
    assert stage_layers(replace(SMALL, layers=26), layout) == (6, 7, 7, 6)


def test_rows_that_are_not_aligned_are_slower():
    odd, even = (replace(SMALL, vocabulary=words) for words in (51199, 51200))
    layout = ParallelLayout(1, 1, 1, 4, 256)
    assert prices(odd).price(layout).seconds > 1.1 * prices(even).price(layout).seconds


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_memory_falls_with_tp_and_zero(layout):
    one = prices().memory(layout)
    assert prices().memory(replace(layout, tp=2 * layout.tp)) < one
    none, first, second = (prices().memory(replace(layout, zero=zero)) for zero in range(3))
    assert second < first < none
    assert prices().memory(replace(layout, recompute=RecomputeMode.full)) < prices().memory(replace(layout, zero=0))


def test_bytes_of_a_parameter():
    of = [state_bytes(2.0, ParallelLayout(4, 1, 1, 1, 4, zero=zero)) for zero in range(4)]
    assert of == [16.0, 7.0, 5.5, 4.0]


def test_memory_is_what_stays_what_is_saved_and_the_largest_peak():
    layout, own = ParallelLayout(8, 1, 1, 4, 256), parts()
    weights = sum(own.before.parameters) + 24 * sum(own.layer.parameters)  # the last product has the first's table
    ends = [end.held[RecomputeMode.none] for end in (own.before, own.after)]
    block = own.layer.held[RecomputeMode.none]
    saved = 24 * block.saved + sum(end.saved for end in ends)
    expected = 8 * weights + saved + max(one.peak for one in (block, *ends))
    expected += MACHINE.compute.workspace + 2 * MACHINE.compute.workspace_biased
    assert max(end.peak for end in ends) > 2 * block.peak  # logits of all words
    assert prices().memory(layout) == pytest.approx(expected)
    second, third = (prices().memory(replace(layout, zero=zero)) for zero in (2, 3))
    assert second - third == pytest.approx(
        weights * 7 / 8 - 2 * sum(own.layer.parameters)
    )  # this block's and the next's


def test_an_interleaved_stage_holds_what_its_order_has_in_flight():
    for micro_batches, chunks in ((64, 2), (16, 3), (4, 2)):
        layout = ParallelLayout(1, 1, 4, 1, micro_batches, schedule=Pipeline.INTERLEAVED, chunks=chunks)
        now = most = 0
        for task in orders(Pipeline.INTERLEAVED, 4, micro_batches, chunks).tasks[0]:
            now += 1 if task.phase == "F" else -1
            most = max(most, now)
        assert in_flight(layout, 0) == most / chunks


def test_gpipe_holds_every_micro_batch():
    one = ParallelLayout(1, 1, 4, 1, 64)
    assert prices().memory(replace(one, schedule=Pipeline.GPIPE)) > 2 * prices().memory(one)


# -------------------------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("gigabytes", [6, 80])
def test_the_search_finds_the_fastest_that_fits(gigabytes):
    model, one = replace(SMALL, batch=64), machine(1)
    own = prices(model, one.with_settings(replace(one.settings, memory_gb=float(gigabytes))))
    best, priced = search(own)[0]
    everything = Wanted(zero=(0, 1, 2, 3), sequence_parallel=(False, True))
    every = [own.price(layout) for layout in candidates(model, 8, everything)]
    fastest = min(each.seconds for each in every if each.fits)  # ZeRO 1 and a split sequence are not asked for none
    assert fastest <= priced.seconds <= 1.005 * fastest
    assert best.devices == 8 and priced.fits


def test_the_search_keeps_what_is_wished_for():
    found = search(prices(), Wanted(tp=(2,), zero=(3,), micro_batch=(1,), chunks=(2,)))
    assert found and all((each.tp, each.zero, each.micro_batch, each.chunks) == (2, 3, 1, 2) for each, _ in found)
    assert [priced.seconds for _, priced in found] == sorted(priced.seconds for _, priced in found)


def test_a_search_without_a_result_says_what_is_nearest():
    with pytest.raises(LayoutError, match=r"nothing fits 80 GB: .* needs least"):
        search(prices(KNOWN["gpt_1t"], machine(1)))
    with pytest.raises(LayoutError, match="no layout of 64 devices"):
        search(prices(), Wanted(tp=(3,)))


# --------------------------------------------------------------------------------------------------------- calibration


def test_calibration_recovers_the_shares_that_made_the_steps():
    one = machine(1)
    true = with_shares(one, np.log([0.7, 0.5, 0.6, 30.0, 0.6, 40.0]))
    steps, draw = [], random.Random(3)
    for words in (50257, 51200):
        for tp in (1, 2, 4):
            for micro in (1, 4, 16):
                model = Transformer(1024, 12, 16, 1024, words)
                layout = ParallelLayout(8 // tp, tp, 1, micro, 512, attention=PLAIN)
                steps.append(MeasuredStep(model, layout, 1.0))
    times = predicted(steps, true, WORKS)
    steps = [replace(step, seconds=time * draw.uniform(0.98, 1.02)) for step, time in zip(steps, times, strict=True)]
    found = calibrated(steps, one, WORKS)
    own = predicted(steps, found, WORKS)
    assert np.mean([abs(time / step.seconds - 1) for time, step in zip(own, steps, strict=True)]) < 0.02
    reached, wanted = found.settings.preset.reached, true.settings.preset.reached
    for name in ("products", "memory", "kernel_us"):
        assert getattr(reached, name) == pytest.approx(getattr(wanted, name), rel=0.15), name
    assert reached.network == one.settings.preset.reached.network and set(FITTED) < set(vars(reached))


# ---- models of conf/model, as they are


@pytest.mark.parametrize(
    "sizes", [pytest.param(GATED, id="gated"), pytest.param(SMALL, id="plain", marks=pytest.mark.long)]
)
def test_a_model_of_conf_costs_what_its_sizes_cost(sizes):
    """The same module, six layers deep, without a word about what it is."""
    sizes = replace(sizes, layers=6, vocabulary=4096)
    settings = module_settings(sizes, AttentionKernel.flash)
    settings = replace(settings, module={**settings.module, "layers": sizes.layers})
    own, works = with_works(ConfModel("own", settings, sizes.batch), load_config(ROOT), PLANNER)
    assert (own.layers, own.sequence, own.tied) == (sizes.layers, sizes.sequence, sizes.tied)
    assert own.parameters == pytest.approx(sizes.parameters, rel=0.02)  # norms and biases are no sizes
    there, here = LayoutPrices(sizes, WORKS(sizes), MACHINE), LayoutPrices(own, works, MACHINE)
    for layout in (
        ParallelLayout(4, 2, 1, 2, sizes.batch),
        ParallelLayout(4, 2, 2, 2, sizes.batch, zero=1, recompute=RecomputeMode.full),
        ParallelLayout(2, 4, 3, 1, sizes.batch, zero=2, recompute=RecomputeMode.selective),
        ParallelLayout(2, 4, 1, 1, sizes.batch, zero=3, sequence_parallel=True),
        ParallelLayout(2, 2, 2, 4, sizes.batch, Pipeline.INTERLEAVED, 3),
    ):
        asked, found = there.price(layout), here.price(layout)
        assert found.seconds == pytest.approx(asked.seconds) and found.memory_bytes == pytest.approx(asked.memory_bytes)
        assert found.bubble == pytest.approx(asked.bubble)
        assert 0.9 < found.mfu / asked.mfu < 1  # of the kernels: half of the pairs of causal attention
    assert {layout.tp for layout in candidates(own, 16, Wanted())} == {1, 2, 4, 8, 16}
    assert why_not(own, ParallelLayout(1, 7, 1, 1, sizes.batch)) == "tp=7 divides no matrix of own"
    assert why_not(own, ParallelLayout(1, 128, 1, 1, sizes.batch)) is None


def test_a_model_without_equal_blocks_is_one_layer_but_for_its_loss():
    config = load_config(ROOT)
    own, works = with_works(ConfModel("conv_small", load_part(ROOT, "model", "conv_small"), 32), config, PLANNER)
    priced = LayoutPrices(own, works, MACHINE)
    once, split = (priced.price(ParallelLayout(dp, 1, 1, 4, 32)) for dp in (1, 8))
    assert split.seconds < once.seconds < 8 * split.seconds * 1.01
    assert own.sequence == 1 and once.tokens_per_s == once.samples_per_s
    count = sum(parameter.numel() for parameter in ConvNet(3, 16, 2, 10).parameters())
    assert str(own) == f"conv_small, {count:,} parameters"


def test_experts_that_are_views_of_weights_run_again_with_any_number_of_samples():
    """A product of rows and such a view is none of two activations, however many rows there are."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "num_local_experts": 4, "vocab_size": 32000, "use_cache": False}
    module = {
        "_target_": "transformers.MixtralForCausalLM",
        "config": {"_target_": "transformers.MixtralConfig", **sizes},
    }
    tokens = TensorSpec(shape=[32, 256], dtype=DType.int64)
    settings = ModelSettings(module, {"input_ids": tokens, "labels": tokens}, Precision.fp32)
    priced = LayoutPrices(*with_works(ConfModel("mixtral", settings, 32), load_config(ROOT), PLANNER), MACHINE)
    assert priced.model.layers == 3
    ways = [priced.price(ParallelLayout(4, 2, 1, 4, 32, recompute=own)) for own in RecomputeMode]
    none, selective, full = ways
    assert none.seconds < selective.seconds < full.seconds
    assert none.memory_bytes > selective.memory_bytes > full.memory_bytes
