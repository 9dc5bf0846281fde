"""The facts of the report page: what they sum to is what the plan predicts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.plan import Event, Region
from shardwright.pipeline.ir.program import Convert
from shardwright.pipeline.ir.report import Compared
from shardwright.pipeline.sharding.partitions import busiest
from shardwright.stages.report.facts import facts_of, seconds_of
from shardwright.stages.report.memory import kept_at
from shardwright.stages.report.model import folds_of
from shardwright.stages.report.page import page_of
from shardwright.stages.report.priced import Sources, class_of, priced_partitions
from tests.report_sources import deep_sources, measured_of, piped_sources, sources_of

NAMES = ("gpt", "mlp", "ladder")


def embedded(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="facts">(.*?)</script>', page, re.DOTALL)[1])


# ---- seconds


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_seconds_sum_to_the_prediction(name):
    sources = sources_of(name)
    found, predicted = facts_of(sources).seconds, sources.plan.prediction
    by_part = {row.part: 0.0 for row in found.rows}
    for row in found.rows:
        by_part[row.part] += row.seconds
    assert by_part["compute"] == pytest.approx(predicted.compute_seconds)
    assert by_part.get("communication", 0.0) == pytest.approx(predicted.communication_seconds)
    assert sum(by_part.values()) == pytest.approx(predicted.step_seconds) == found.total


@pytest.mark.parametrize("name", NAMES)
def test_ops_and_conversions_alone_are_the_prediction(name):
    """On a CPU preset nothing is priced by kernels: the rows need no factor."""
    assert facts_of(sources_of(name)).seconds.scale == {}


def test_seconds_of_a_pipeline_are_those_of_the_busiest_devices():
    sources = piped_sources()
    found, predicted = facts_of(sources).seconds, sources.plan.prediction
    assert sum(row.seconds for row in found.rows) == pytest.approx(predicted.step_seconds)
    assert {row.part for row in found.rows} >= {"compute", "waiting"}
    waits = {total.partition: total.seconds for total in sources.plan.timeline.totals if total.what == "waiting"}
    assert busiest(sources.plan)[0] == min(waits, key=waits.__getitem__)


def test_without_prices_each_part_is_one_row():
    sources = replace(sources_of("gpt"), profile=None)
    found = seconds_of(sources.plan, priced_partitions(sources))
    assert [row.name for row in found.rows if row.part == "compute"] == ["all"]
    assert sum(row.seconds for row in found.rows) == pytest.approx(found.total)


def test_classes_of_ops():
    assert class_of("aten.linear.default") == "products"
    assert class_of("aten.scaled_dot_product_attention.default") == "attention"
    assert class_of("aten.layer_norm.default") == "norms"
    assert class_of("aten.cross_entropy_loss.default") == "softmax and losses"
    assert class_of("aten.add.Tensor") == "elementwise and other"
    assert class_of("aten.view.default", free=True) == "views"
    assert class_of("own::thing") == "elementwise and other"


# ---- memory


@pytest.mark.parametrize("name", NAMES)
def test_what_is_alive_sums_to_the_peak(name):
    sources = sources_of(name)
    memory = facts_of(sources).memory
    (device,) = memory.devices
    assert sum(one.nbytes for one in device.alive) == device.peak_bytes == sources.plan.prediction.peak_bytes
    assert all(one.nbytes >= 0 for one in device.alive)
    resident = [one.nbytes for one in device.alive if one.kind not in ("activations", "rest")]
    assert sum(resident) == pytest.approx(sources.plan.prediction.resident_bytes, abs=len(resident))


def test_the_peak_is_an_event_of_the_timeline():
    sources = sources_of("gpt")
    number = facts_of(sources).memory.peak_event
    assert number is not None
    assert sources.plan.timeline.events[number].held_bytes == sources.plan.prediction.peak_bytes


def test_each_device_of_a_pipeline_has_its_peak():
    sources = piped_sources()
    devices = facts_of(sources).memory.devices
    assert [device.peak_bytes for device in devices] == [part.peak_bytes for part in sources.plan.partitions]
    assert all(sum(one.nbytes for one in device.alive) == device.peak_bytes for device in devices)
    resident = [[one.nbytes for one in device.alive if one.kind != "activations"] for device in devices]
    most = max(map(sum, resident))
    assert most == pytest.approx(sources.plan.prediction.resident_bytes, abs=len(resident[0]))


def test_chunks_on_one_device_are_counted_together():
    sources = piped_sources("gpt_tied", "interleaved")
    devices = facts_of(sources).memory.devices
    assert len(devices) * sources.plan.chunks == len(sources.plan.partitions)
    assert max(device.peak_bytes for device in devices) == sources.plan.prediction.peak_bytes


def test_a_region_keeps_what_enters_it_until_it_runs_again():
    def event(what, link):
        return Event(what, 0, link, link, 0, 0.0, 1.0)

    regions = (Region(0, 0, False, ()), Region(1, 2, True, (Region(1, 1, False, ()), Region(2, 2, False, ()))))
    events = tuple(
        event(what, link)
        for what, link in (
            ("forward", 0), ("forward", 1), ("forward", 2), ("loss", 3),
            ("recompute", 1), ("recompute", 2), ("backward", 2), ("backward", 1), ("backward", 0),
        )
    )  # fmt: skip
    assert kept_at(events, regions, 0) == {0: True}
    assert kept_at(events, regions, 3) == {0: True, 1: False}
    assert kept_at(events, regions, 5) == {0: True, 1: True, 2: True}
    assert kept_at(events, regions, 7) == {0: True, 1: True}


# ---- the model


@pytest.mark.parametrize("name", NAMES)
def test_every_op_and_conversion_is_shown_once(name):
    sources = sources_of(name)
    (part,) = priced_partitions(sources)
    model = facts_of(sources).model
    shown = [step for link in model.links for step in model.bodies[link.body].steps]
    conversions = list(part.sharded.program.conversions())
    assert len([step for step in shown if step.kind != "conversion"]) == len(sources.graph.ops)
    assert sorted(step.writes[0].layout for step in shown if step.kind == "conversion") == sorted(
        str(step.target.layout) for step in conversions
    )
    assert [link.number for link in model.links if link.number is not None] == list(range(len(sources.graph.chain)))


def test_layouts_are_those_of_the_program():
    sources = sources_of("gpt")
    (part,) = priced_partitions(sources)
    model = facts_of(sources).model
    links = [link for link in model.links if link.number is not None]
    for link, steps in zip(links, part.sharded.program.links, strict=True):
        for line, step in zip(model.bodies[link.body].steps, steps, strict=True):
            ends = (step.target,) if isinstance(step, Convert) else step.outputs
            assert [one.layout for one in line.writes] == [str(tensor.layout) for tensor in ends]


def test_seconds_of_links_are_those_of_the_price():
    sources = sources_of("gpt")
    (part,) = priced_partitions(sources)
    model = facts_of(sources).model
    links = [model.bodies[link.body] for link in model.links if link.number is not None]
    assert [body.forward for body in links] == pytest.approx([link.forward for link in part.priced.step.links])
    assert [body.backward for body in links] == pytest.approx([link.backward for link in part.priced.step.links])


def test_parameters_are_named_with_their_storage():
    sources = sources_of("gpt")
    model = facts_of(sources).model
    found = {
        one.name.replace("{}", link.at): one.stored
        for link in model.links
        for one in model.bodies[link.body].parameters
    }
    storage = {name: str(layout) for name, layout in sources.plan.sharding.storage.items()}
    read = {value.origin for value in sources.graph.of_role(Role.PARAMETER)}
    assert found == {name: layout for name, layout in storage.items() if name in read}


def test_equal_layers_have_one_body():
    few, many = (facts_of(deep_sources(layers)).model for layers in (4, 12))
    assert len(many.bodies) == len(few.bodies)
    assert max(fold.period * fold.times for fold in many.folds) >= 20
    assert {link.at for link in many.links} >= {f"layers.{n}" for n in range(12)}


@given(st.lists(st.integers(0, 3), max_size=40).map(tuple))
def test_folds_say_the_whole_sequence(bodies):
    said = tuple(
        body for fold in folds_of(bodies) for body in bodies[fold.first : fold.first + fold.period] * fold.times
    )
    assert said == bodies


def test_a_repeated_pair_is_one_fold():
    assert [(f.first, f.period, f.times) for f in folds_of((0, 1, 2, 1, 2, 1, 2, 3))] == [
        (0, 1, 1), (1, 2, 3), (7, 1, 1),
    ]  # fmt: skip


# ---- the page


def test_the_page_has_the_facts_and_needs_nothing_else():
    sources = sources_of("gpt")
    page = page_of(facts_of(replace(sources, report=measured_of(sources.plan))))
    assert page == page_of(facts_of(replace(sources, report=measured_of(sources.plan))))
    assert embedded(page)["prediction"]["peak_bytes"] == sources.plan.prediction.peak_bytes
    assert embedded(page)["report"]["losses"] == [3.0, 2.5, 2.25]
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "http://www.w3.org/2000/svg" in page and not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


@pytest.mark.parametrize("name", ["</script><b>", "<!--", "a & b", "]]>", "<img src=x onerror=alert(1)>"])
def test_markup_in_names_stays_a_name(name):
    page = page_of(facts_of(Sources(name, sources_of("mlp").plan, notes=(name,))))
    assert embedded(page)["title"] == name and embedded(page)["notes"] == [name]
    assert page.count("</script>") == 2
    assert name not in page or name in ("]]>",)


def test_without_a_graph_the_rest_is_drawn():
    sources = sources_of("gpt")
    bare = facts_of(replace(sources, graph=None, profile=None, cluster=None, frontier=None))
    assert bare.model is None and [mark.kind for mark in bare.marks].count("chosen") == 1
    assert sum(row.seconds for row in bare.seconds.rows) == pytest.approx(sources.plan.prediction.step_seconds)
    assert sum(one.nbytes for one in bare.memory.devices[0].alive) == sources.plan.prediction.peak_bytes


def test_marks_are_frontier_baselines_alternatives_and_the_plan():
    sources = sources_of("gpt")
    marks = facts_of(sources).marks
    count = {
        kind: sum(mark.kind == kind for mark in marks) for kind in ("frontier", "baseline", "alternative", "chosen")
    }
    assert count["frontier"] >= 2 and count["baseline"] == 2 and count["chosen"] == 1
    others = sum(other.seconds is not None for other in sources.plan.alternatives)
    assert count["frontier"] + count["alternative"] == len(sources.frontier.points) + others


def test_the_curve_of_the_frontier_does_not_rise_again():
    """A plan that is slower, and no smaller at its peak, is on the frontier where less of it stays resident."""
    sources = sources_of("gpt")
    first, *others = sources.frontier.points
    beaten = replace(first, seconds=2 * first.seconds, resident_bytes=1)
    marks = facts_of(replace(sources, frontier=replace(sources.frontier, points=(first, beaten, *others)))).marks
    told = {mark.name: mark for mark in marks}["plan 1 of the frontier"]
    assert told.kind == "alternative" and "stays resident" in told.about
    curve = sorted((mark.seconds, -mark.peak_bytes) for mark in marks if mark.kind == "frontier")
    assert len(curve) >= 2 and all(fast[1] < slow[1] for fast, slow in pairwise(curve))


def test_a_long_run_on_many_ranks_makes_no_large_page():
    sources = sources_of("mlp")
    compared = tuple(Compared(f"peak_mb_rank_{rank}", 1.0, 1.0, 1.0) for rank in range(64))
    short = measured_of(sources.plan)
    long = replace(short, steps=5000, losses=tuple(map(float, range(5000))), step_seconds=(1.0,) * 5000, ranks=64)
    facts = facts_of(replace(sources, report=replace(long, compared=(*short.compared, *compared))))
    assert facts.every == 3 and facts.report.losses[:3] == (0.0, 3.0, 6.0) and len(facts.report.losses) <= 2000
    assert facts.report.compared == short.compared
    assert facts_of(replace(sources, report=short)).report == short
