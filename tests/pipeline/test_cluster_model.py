"""The cost model at cluster scale: sizes, links, memory, the step, the search and the calibration."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.calibrate import FITTED, MeasuredStep, calibrated, with_shares
from pipeline.base.errors import ClusterError
from pipeline.cluster_model.machine import Efficiency, Machine, machine_of
from pipeline.cluster_model.memory import device_bytes, state_bytes
from pipeline.cluster_model.search import Wanted, candidates, search
from pipeline.cluster_model.step import MicroBatchSeconds, pipeline_seconds, price, stage_seconds
from pipeline.cluster_model.transformer import (
    KNOWN,
    AttentionKernel,
    LayoutError,
    ParallelLayout,
    PipelineSchedule,
    RecomputeMode,
    Transformer,
    stage_layers,
    why_not,
)
from pipeline.config import listing, load_part

ROOT = Path(__file__).resolve().parents[2]
REACHED = Efficiency(0.8, 0.4, 0.7, 10e-6, 0.75, 0.8, 30e-6)
SMALL = Transformer(hidden=1024, layers=24, heads=16, sequence=1024, vocabulary=51200, batch=256)


def machine(hosts: int = 8, **figures: float) -> Machine:
    known = Machine(8, hosts, 312e12, 2e12, round(80e9), 108, 300e9, 200e9, REACHED)
    return replace(known, **figures)


POWERS = st.sampled_from([1, 2, 4, 8])
LAYOUTS = st.builds(
    ParallelLayout,
    dp=POWERS,
    tp=POWERS,
    pp=st.sampled_from([1, 2, 3, 4, 8]),
    micro_batch=st.sampled_from([1, 2, 4]),
    batch=st.just(256),
    recompute=st.sampled_from(RecomputeMode),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    attention=st.sampled_from(AttentionKernel),
)


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


def test_flops_are_those_that_megatron_counts():
    """72 B s l h^2 (1 + s / 6h + V / 12lh), and 96, 6 and 16 with full recompute."""
    model = KNOWN["gpt_39b"]
    s, h, layers, words = model.sequence, model.hidden, model.layers, model.vocabulary
    assert model.sample_flops == pytest.approx(72 * s * layers * h**2 * (1 + s / (6 * h) + words / (12 * layers * h)))
    layout = ParallelLayout(8, 8, 2, 4, 1536, recompute=RecomputeMode.full)
    counted = 96 * s * layers * h**2 * (1 + s / (6 * h) + words / (16 * layers * h))
    priced = price(model, layout, machine(16))
    assert priced.flops * priced.seconds * 128 == pytest.approx(1536 * counted)


# --------------------------------------------------------------------------------------------------------------- links


def test_groups_share_the_network_of_a_host():
    """As in docs/clusters.md: 4 hosts of 8 devices with 50 GB/s."""
    shared = machine(4, network=50e9, reached=replace(REACHED, links=1.0, network=1.0))
    assert shared.around(4, 8) == pytest.approx(6.25e9)
    assert shared.around(8, 4) == pytest.approx(12.5e9)
    assert shared.around(32, 1) == pytest.approx(50e9)
    assert shared.around(8, 1) == shared.around(2, 4) == 300e9


def test_an_all_reduce_is_a_scatter_and_a_gather():
    own = machine()
    start = REACHED.collective
    assert own.all_reduce(1e9, 8, 1) - start == pytest.approx(2 * (own.gather(1e9, 8, 1) - start))
    assert own.all_reduce(1e9, 1, 1) == own.gather(1e9, 1, 1) == 0.0


def test_stages_send_over_the_network_where_they_lie_in_several_hosts():
    own = machine(reached=replace(REACHED, links=1.0, network=1.0, collective=0.0))
    assert own.send(3e9, 4, 8) == pytest.approx(0.01)  # all in one host
    assert own.send(3e9, 1, 16) == pytest.approx(0.015)  # one device of a host sends to the next
    assert own.send(3e9, 4, 16) == pytest.approx(0.06)  # four of them
    assert own.send(3e9, 64, 512) == pytest.approx(0.12)  # all eight


def test_what_is_measured_or_uneven_is_refused():
    with pytest.raises(ClusterError, match="measured"):
        machine_of(load_part(ROOT, "cluster", "local_cpu"), "here")
    with pytest.raises(ClusterError, match="differ"):
        machine_of(load_part(ROOT, "cluster", "simulated"), "here")


def test_every_described_cluster_has_a_price():
    for name in listing(ROOT, "cluster"):
        cluster = load_part(ROOT, "cluster", name)
        if cluster.source.value != "probe" and not cluster.per_host:
            own = machine_of(cluster, name)
            priced = price(SMALL, ParallelLayout(own.devices, 1, 1, 1, 256 * own.devices), own)
            assert 0 < priced.mfu < 1, name


def test_cards_of_one_kind_reach_the_same():
    names = [name for name in listing(ROOT, "cluster") if "a100" in name]
    found = [load_part(ROOT, "cluster", name).preset.reached for name in names]
    assert len(names) == 5 and all(own == found[0] for own in found) and found[0].kernel_us is not None


# ---------------------------------------------------------------------------------------------------------------- step


@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 4))
def test_the_bubble_of_equal_stages(stages, micro_batches, chunks):
    """(p - 1) / m of the busy time, over the chunks of each stage."""
    schedule = PipelineSchedule.interleaved if chunks > 1 else PipelineSchedule.one_f_one_b
    layout = ParallelLayout(1, 1, stages, 1, micro_batches, schedule=schedule, chunks=chunks)
    busy, idle = pipeline_seconds((MicroBatchSeconds(1.0, 2.0, 0.5, 0.25),) * stages, layout)
    assert busy == pytest.approx(micro_batches * 3.75)
    assert idle / busy == pytest.approx((stages - 1) / micro_batches / chunks)


def test_gpipe_computes_again_while_it_waits():
    stages = (MicroBatchSeconds(1.0, 2.0, 1.0, 0.0),) * 4
    one = sum(pipeline_seconds(stages, ParallelLayout(1, 1, 4, 1, 8)))
    gpipe = sum(pipeline_seconds(stages, ParallelLayout(1, 1, 4, 1, 8, schedule=PipelineSchedule.gpipe)))
    assert (one, gpipe) == (11 * 4.0, 8 * 4.0 + 3 * 3.0)


@given(LAYOUTS)
@settings(deadline=None)
def test_shares_are_shares(layout):
    if why_not(SMALL, layout) is None:
        priced = price(SMALL, layout, machine())
        assert 0 < priced.mfu <= 1 and priced.mfu * 312e12 <= priced.flops * (1 + 1e-9)
        assert min(priced.communication, priced.bubble) >= 0 and priced.communication + priced.bubble < 1
        assert priced.tokens_per_s == pytest.approx(256 * 1024 / priced.seconds)


@given(LAYOUTS, st.sampled_from(["rate", "memory_rate", "link", "network"]))
@settings(deadline=None)
def test_a_faster_machine_is_never_slower(layout, figure):
    if why_not(SMALL, layout) is None:
        own = machine()
        faster = replace(own, **{figure: 2 * getattr(own, figure)})
        assert price(SMALL, layout, faster).seconds <= price(SMALL, layout, own).seconds


@given(LAYOUTS)
@settings(deadline=None)
def test_twice_the_replicas_are_never_slower_where_links_cost_nothing(layout):
    more = replace(layout, dp=2 * layout.dp)
    if why_not(SMALL, layout) is None and why_not(SMALL, more) is None:
        free = machine(64, link=inf, network=inf, reached=replace(REACHED, collective=0.0))
        assert price(SMALL, more, free).seconds <= price(SMALL, layout, free).seconds


@given(LAYOUTS)
@settings(deadline=None)
def test_more_recompute_is_slower_and_smaller(layout):
    if why_not(SMALL, layout) is None:
        found = [price(SMALL, replace(layout, recompute=way), machine()) for way in RecomputeMode]
        assert found[0].seconds <= found[1].seconds < found[2].seconds
        none, selective = found[0].memory_bytes, found[1].memory_bytes
        assert selective <= none


def test_the_last_stage_has_the_loss_and_uneven_layers_lie_in_the_middle():
    layout = ParallelLayout(1, 1, 4, 1, 8)
    stages = stage_seconds(SMALL, layout, machine())
    assert stages[-1].total > stages[0].total > stages[1].total == pytest.approx(stages[2].total)
    assert stage_layers(replace(SMALL, layers=26), layout) == (6, 7, 7, 6)


def test_rows_that_are_not_aligned_are_slower():
    layout = ParallelLayout(1, 1, 1, 4, 256)
    odd, even = (price(replace(SMALL, vocabulary=words), layout, machine()).seconds for words in (51199, 51200))
    assert odd > 1.1 * even


def test_the_bubble_is_a_share_of_the_step():
    layout = ParallelLayout(1, 1, 4, 1, 8)
    _, idle = pipeline_seconds(stage_seconds(SMALL, layout, machine()), layout)
    priced = price(SMALL, layout, machine())
    assert priced.bubble == pytest.approx(idle / priced.seconds)


def test_interleaving_shortens_the_bubble_and_sends_more():
    plain = ParallelLayout(1, 1, 4, 1, 256)
    woven = replace(plain, schedule=PipelineSchedule.interleaved, chunks=3)
    one, other = (price(SMALL, layout, machine()) for layout in (plain, woven))
    assert other.bubble * other.seconds == pytest.approx(one.bubble * one.seconds / 3, rel=0.1)
    assert other.communication > one.communication


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tp": 3}, "tp=3 does not divide heads"),
        ({"pp": 32}, "pp=32 is more than layers=24"),
        ({"micro_batch": 3}, "micro_batch=3 does not divide batch=256"),
        ({"chunks": 2}, "schedule=1f1b with chunks=2"),
        ({"chunks": 2, "schedule": PipelineSchedule.interleaved}, "pp of at least 2"),
        ({"chunks": 5, "schedule": PipelineSchedule.interleaved, "pp": 2}, "chunks=5 does not divide layers=24"),
        ({"chunks": 2, "schedule": PipelineSchedule.interleaved, "pp": 3}, "multiple of pp=3"),
    ],
)
def test_what_does_not_divide_is_named(changes, what):
    with pytest.raises(LayoutError, match=what):
        price(SMALL, replace(ParallelLayout(1, 1, 1, 1, 256), **changes), machine())


# -------------------------------------------------------------------------------------------------------------- memory


@given(LAYOUTS)
def test_memory_falls_with_tp_pp_and_zero(layout):
    one = device_bytes(SMALL, layout)
    assert device_bytes(SMALL, replace(layout, tp=2 * layout.tp)) < one
    none, first, second = (device_bytes(SMALL, replace(layout, zero=zero)) for zero in range(3))
    assert second < first < none or layout.dp == 1
    assert layout.dp < 8 or device_bytes(SMALL, replace(layout, zero=3)) < second or layout.pp > 1
    if layout.pp in (1, 2, 4):
        assert device_bytes(SMALL, replace(layout, pp=2 * layout.pp)) <= one


def test_bytes_of_a_parameter():
    of = [state_bytes(1.0, ParallelLayout(4, 1, 1, 1, 4, zero=zero)) for zero in range(4)]
    assert of == [16.0, 7.0, 5.5, 4.0]


def test_activations_are_those_of_a_known_formula():
    """Korthikanti et al.: s b h (10 + 24 / t + 5 a s / h t) for each layer, with everything kept."""
    plain = ParallelLayout(1, 4, 1, 2, 256, attention=AttentionKernel.plain)
    s, b, h, a = SMALL.sequence, 2, SMALL.hidden, SMALL.heads
    more = device_bytes(replace(SMALL, layers=25), plain) - device_bytes(SMALL, plain)
    kept = s * b * h * (10 + 24 / 4 + 5 * a * s / h / 4)
    assert more == pytest.approx(1.03 * (kept + 16 * 12 * h**2 / 4))


def test_gpipe_holds_every_micro_batch():
    one = ParallelLayout(1, 1, 4, 1, 64)
    assert device_bytes(SMALL, replace(one, schedule=PipelineSchedule.gpipe)) > 2 * device_bytes(SMALL, one)


# -------------------------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("gigabytes", [8, 12, 20, 80])
def test_the_search_finds_the_fastest_that_fits(gigabytes):
    own = machine(1, memory_bytes=round(gigabytes * 1e9))
    best, priced = search(SMALL, own, 64, Wanted(attention=tuple(AttentionKernel)))[0]
    everything = Wanted(
        recompute=tuple(RecomputeMode),
        zero=(0, 1, 2, 3),
        sequence_parallel=(False, True),
        attention=tuple(AttentionKernel),
    )
    all_of_them = [price(SMALL, layout, own) for layout in candidates(SMALL, own, 64, everything)]
    assert priced.seconds == min(each.seconds for each in all_of_them if each.fits)
    assert best.devices == 8 and priced.fits


def test_the_search_keeps_what_is_wished_for():
    found = search(SMALL, machine(), 256, Wanted(tp=(2,), zero=(3,), micro_batch=(1,), chunks=(2,)))
    assert found and all((each.tp, each.zero, each.micro_batch, each.chunks) == (2, 3, 1, 2) for each, _ in found)
    assert [priced.seconds for _, priced in found] == sorted(priced.seconds for _, priced in found)


def test_a_search_without_a_result_says_what_is_nearest():
    with pytest.raises(LayoutError, match=r"nothing fits 80 GB: .* needs least"):
        search(KNOWN["gpt_1t"], machine(1), 3072)
    with pytest.raises(LayoutError, match="no layout of 64 devices"):
        search(SMALL, machine(), 256, Wanted(tp=(3,)))


def test_a_trillion_parameters_find_a_layout():
    best, priced = search(KNOWN["gpt_1t"], machine(384), 3072, most=1)[0]
    assert best.devices == 3072 and best.pp > 1 and best.tp > 1 and 0.3 < priced.mfu < 0.7


# --------------------------------------------------------------------------------------------------------- calibration


def test_calibration_recovers_the_shares_that_made_the_steps():
    true = with_shares(machine(1), np.log([0.7, 0.5, 0.6, 30e-6, 0.6, 40e-6]))
    steps, draw = [], random.Random(3)
    for hidden in (1024, 2048):
        for tp in (1, 2, 4):
            for micro in (1, 4, 16):
                for words in (50257, 51200):
                    model = Transformer(hidden, 12, 16, 1024, words)
                    layout = ParallelLayout(8 // tp, tp, 1, micro, 512, attention=AttentionKernel.plain)
                    seconds = price(model, layout, true).seconds * draw.uniform(0.98, 1.02)
                    steps.append(MeasuredStep(model, layout, seconds))
    found = calibrated(steps, machine(1))
    errors = [abs(price(step.model, step.layout, found).seconds / step.seconds - 1) for step in steps]
    assert sum(errors) / len(errors) < 0.02
    for name in ("products", "memory", "kernel"):
        assert getattr(found.reached, name) == pytest.approx(getattr(true.reached, name), rel=0.15), name
    assert found.reached.network == REACHED.network and set(FITTED) < set(vars(REACHED))
