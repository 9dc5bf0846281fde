"""The step's memory as figures, a picture and a table."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from torch.optim import AdamW

from shardwright.pipeline.ir.codec import decode, encode
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.profile import Profile, Step
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.profile.picture import COLORS, SAMPLES, TOP_MODULES, describe, draw_nothing, draw_step, table
from shardwright.stages.profile.run import MODULES, PICTURE, figures, make_profile, write_pictures
from shardwright.stages.profile.step import StepProfile, profile_step
from shardwright.stages.profile.timeline import CLASSES
from tests.graphs import SILENT, gpt_graph, mlp_graph

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module", params=[("gpt", "cuda"), ("deep", "cpu"), ("mlp", "cpu")], ids="-".join)
def made(request) -> tuple[OpGraph, StepProfile, Step]:
    """The deep one has more kernels than are drawn, and more modules than are named."""
    name, device = request.param
    graph = {"gpt": gpt_graph, "deep": lambda: gpt_graph(4), "mlp": mlp_graph}[name]()
    profile = profile_step(graph, device, "native")
    return graph, profile, describe(graph, profile)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return make_profile(gpt_graph(), "cuda", "amp", AdamW, SILENT)[0]


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(PNG) and png[12:16] == b"IHDR" and png.endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", png[16:24])


# -------------------------------------------------------------------------------------------------------- figures


def test_shares_of_the_peak_add_up_to_it(made):
    _, profile, step = made
    assert step.peak_bytes == profile.memory.peak
    assert [share.name for share in step.peak_by_class] == list(CLASSES)
    assert sum(share.nbytes for share in step.peak_by_class) == step.peak_bytes
    assert sum(share.nbytes for share in step.peak_by_module) == step.peak_bytes
    sizes = [share.nbytes for share in step.peak_by_module if share.name != "all others"]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) <= TOP_MODULES


def test_what_is_too_much_to_show_is_summed_up():
    graph = gpt_graph(4)
    step = describe(graph, profile_step(graph, "cpu", "native"))
    assert sum(step.kernels) > SAMPLES >= len(step.moments)
    assert [share.name for share in step.peak_by_module][TOP_MODULES:] == ["all others"]


def test_the_peak_has_a_place(made):
    graph, profile, step = made
    assert step.peak_in in ("forward", "backward", "optimizer")
    modules = {op.module for op in graph.ops} | {"optimizer"}
    assert step.peak_module in modules
    curve = profile.timeline.curve()
    at, forward, backward = curve.index(max(curve)), *step.kernels[:2]
    wanted = "forward" if at < forward else "backward" if at < forward + backward else "optimizer"
    assert step.peak_in == wanted


def test_samples_keep_the_peak_and_add_up(made):
    _, profile, step = made
    curve = profile.timeline.curve()
    assert set(step.curves) == set(CLASSES) == set(COLORS)
    assert len(step.moments) <= SAMPLES and list(step.moments) == sorted(set(step.moments))
    totals = [sum(column) for column in zip(*step.curves.values(), strict=True)]
    assert totals == [curve[moment] for moment in step.moments] and max(totals) == step.peak_bytes
    assert sum(step.kernels) == profile.timeline.length == len(curve)


def test_the_artifact_holds_all_of_it(profile):
    assert decode(Profile, encode(profile)) == profile
    found = figures(profile, unknown=0)
    assert found["unsplit_peak_mb"] == round(profile.step.peak_bytes / 1e6, 3)
    assert found["unsplit_peak_in"] == profile.step.peak_in and found["source"] == "symbolic"
    assert found["kernels"] == sum(profile.step.kernels)
    bare = figures(profile_graph(gpt_graph()), unknown=2)
    assert "unsplit_peak_mb" not in bare and bare["source"] == "table" and bare["ops_without_rule"] == 2


# ------------------------------------------------------------------------------------------------- picture, table


def test_a_picture_is_a_png_and_the_same_every_time(profile):
    first, again = (draw_step(profile.step, "gpt") for _ in range(2))
    assert size_of(first) == (1210, 550) and first == again
    assert draw_step(profile.step, "another title") != first
    higher = dataclasses.replace(profile.step, peak_bytes=profile.step.peak_bytes + 10**6)
    assert draw_step(higher, "gpt") != first


def test_a_picture_of_nothing_says_why():
    first, again, other = draw_nothing("gpt", "no meta"), draw_nothing("gpt", "no meta"), draw_nothing("gpt", "else")
    assert size_of(first) == (880, 220) and first == again != other


def test_the_table_has_a_row_for_each_class_and_module(profile):
    text = table(profile.step)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    by_name = {row[0]: row[1:] for row in rows}
    for share in (*profile.step.peak_by_class, *profile.step.peak_by_module):
        assert by_name[share.name][0] == f"{share.nbytes / 1e6:.3f}"
    shares = [float(by_name[name][1].rstrip("%")) for name in CLASSES]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(CLASSES))
    assert text.startswith(f"Peak {profile.step.peak_bytes / 1e6:.3f} MB in {profile.step.peak_in}")
    assert len(rows) == 2 + len(CLASSES) + len(profile.step.peak_by_module)


def test_files_are_written_with_and_without_a_step(tmp_path, profile):
    picture, modules = tmp_path / PICTURE, tmp_path / MODULES
    write_pictures(tmp_path, profile, "", "gpt")
    assert size_of(picture.read_bytes()) == (1210, 550) and modules.read_text() == table(profile.step)
    write_pictures(tmp_path, profile_graph(gpt_graph()), "it needs values", "gpt")
    assert size_of(picture.read_bytes()) == (880, 220) and "it needs values" in modules.read_text()
