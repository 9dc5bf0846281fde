"""Plans without a pipeline whose passes are cut into slices: chosen where memory is short, and trained to the same."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.errors import BudgetError, SolveError
from shardwright.pipeline.config import Checkpoint, Pipeline, Recompute
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.ir.profile import Compiled, CompiledBlock, CompiledWay
from shardwright.pipeline.sharding.slices import fits, sliced
from shardwright.stages.checkpoint.choose import choose, evaluate
from shardwright.stages.checkpoint.unpipelined import find_alone
from shardwright.stages.command_line import main
from shardwright.stages.report.facts import seconds_of
from shardwright.stages.report.priced import Sources, priced_partitions
from tests.flow.plain_loop import main as plain_loop
from tests.flow.project import TINY
from tests.graphs import GRAPHS, frontier_of, preset, profile_of

PROJECT = Path(__file__).parents[2]
FILE = "conf/checkpoint/test.yaml"
WHERE = "conf/solve/test.yaml: memory_budget_gb"
SOLVED = Checkpoint(micro_batches="solve")


def alone(name: str, settings: Checkpoint, budget: int | None = None, devices: int = 2):
    frontier = frontier_of(name, devices)
    frontier = replace(frontier, budget_bytes=budget or frontier.budget_bytes)
    cluster = preset(devices)
    return find_alone(GRAPHS[name](), profile_of(name), cluster, frontier, settings, FILE), cluster, frontier


def chosen(name: str, settings: Checkpoint, budget: int | None = None) -> Plan:
    found, cluster, frontier = alone(name, settings, budget)
    return choose(found, cluster, frontier, WHERE, GRAPHS[name]())


def tightest(name: str, settings: Checkpoint) -> int:
    with pytest.raises(BudgetError) as refused:
        chosen(name, settings, budget=1)
    told = re.search(r"tightest feasible budget is (\S+) GB", str(refused.value))
    assert told is not None
    return round(float(told[1]) * 1e9)


# ------------------------------------------------------------------------------------------------------------- choice


def test_with_memory_to_spare_a_pass_is_not_cut() -> None:
    plan = chosen("mlp", SOLVED)
    assert plan.slices == () and plan.micro_batches == 1
    assert plan == chosen("mlp", Checkpoint())


def test_less_memory_is_enough_where_passes_may_be_cut() -> None:
    whole, cut = tightest("gpt", Checkpoint()), tightest("gpt", SOLVED)
    assert cut < whole
    plan = chosen("gpt", SOLVED, budget=cut)
    assert plan.micro_batches == len(plan.slices) > 1 and sum(plan.slices) == GRAPHS["gpt"]().batch
    assert plan.prediction.peak_bytes <= cut


@pytest.mark.parametrize("part", [0.3, 0.8])
def test_the_best_of_all_cuts_is_taken(part: float) -> None:
    """Of every plan and number of slices: what stopping early leaves out is not faster."""
    graph, profile, frontier = GRAPHS["gpt"](), profile_of("gpt"), frontier_of("gpt")
    top, bottom = chosen("gpt", Checkpoint()).prediction.peak_bytes, tightest("gpt", SOLVED)
    frontier = replace(frontier, budget_bytes=round(bottom + part * (top - bottom)))
    best = []
    for count in (n for n in range(1, graph.batch + 1) if graph.batch % n == 0):
        cut = (graph.batch // count,) * count
        own, costs = sliced(graph, profile, cut)
        passes = replace(frontier, micro_batches=count)
        for number, point in enumerate(frontier.points):
            if fits(graph, point.sharding, frontier.meshes[point.mesh].sizes, cut):
                found = evaluate(own, costs, preset(), passes, number, Checkpoint())
                best += [found.step_seconds] if found.regions is not None else []
    assert chosen("gpt", SOLVED, frontier.budget_bytes).prediction.step_seconds == pytest.approx(min(best))


def test_a_number_is_taken_as_it_is() -> None:
    plan = chosen("gpt", Checkpoint(micro_batches=2))
    assert plan.slices == (GRAPHS["gpt"]().batch // 2,) * 2 and plan.micro_batches == 2
    assert plan.prediction.step_seconds > chosen("gpt", Checkpoint()).prediction.step_seconds


def test_alternatives_say_into_how_many_they_cut() -> None:
    budget = round(1.02 * tightest("gpt", Checkpoint()))
    told = {other.what for other in chosen("gpt", SOLVED, budget).alternatives}
    assert any(re.search(r"\b1 micro-batch\b", what) for what in told) and any(
        "2 micro-batches" in what for what in told
    )


def test_what_does_not_divide_is_refused_and_says_what_does() -> None:
    batch = GRAPHS["gpt"]().batch
    with pytest.raises(SolveError, match=rf"test.yaml: micro_batches: got 3, .* the {batch} samples") as refused:
        alone("gpt", Checkpoint(micro_batches=3))
    assert f"a number that divides {batch}" in str(refused.value)
    pipelines = Checkpoint(micro_batches=3, pipeline=Pipeline("solve"))
    assert alone("gpt", pipelines)[0] == []  # a pipeline may


def test_a_slice_that_devices_cannot_share_out_is_refused() -> None:
    batch = GRAPHS["gpt"]().batch
    frontier = frontier_of("gpt")
    split = [p for p in frontier.points if any(str(layout) == "S(0)" for layout in p.sharding.inputs.values())]
    given = GRAPHS["gpt"](), profile_of("gpt"), preset(), replace(frontier, points=tuple(split))
    with pytest.raises(SolveError, match=f"split 1 of the {batch} samples"):
        find_alone(*given, Checkpoint(micro_batches=batch), FILE)


def test_the_last_is_not_another_one_here() -> None:
    found, *_ = alone("gpt", Checkpoint(recompute=Recompute.except_last, micro_batches="solve"))
    assert found and {one.slices for one in found} == {()}
    asked = Checkpoint(recompute=Recompute.except_last, micro_batches=2, pipeline=Pipeline("solve"))
    assert alone("gpt", asked)[0] == []  # what is asked for is not dropped


def test_the_report_prices_slices() -> None:
    """What the rows of its table add up to is the prediction, without a factor."""
    plan = chosen("gpt", Checkpoint(micro_batches=2))
    sources = Sources("gpt", plan, GRAPHS["gpt"](), profile_of("gpt"), preset(), frontier_of("gpt"), digest="")
    assert seconds_of(plan, priced_partitions(sources)).scale == {}


def test_compiled_blocks_are_measured_with_the_whole_batch() -> None:
    way = CompiledWay(1.0, 4.0, 8.0, 401, 101, 501, 601)
    compiled = Compiled("a card", (CompiledBlock(0, 0, 0),), ((way,),))
    _, profile = sliced(GRAPHS["gpt"](), replace(profile_of("gpt"), compiled=compiled), (2, 1, 1))
    assert profile.compiled is not None
    ((found,),) = profile.compiled.runs
    assert (found.forward, found.backward) == pytest.approx((4 / 3, 8 / 3))  # of the mean
    assert (found.saved, found.saved_alone, found.forward_peak, found.backward_peak) == (201, 51, 251, 301)


# ------------------------------------------------------------------------------------------------------------ training


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT of 12 samples a pass, planned and written in three slices."""
    root = tmp_path_factory.mktemp("alone")
    shutil.copytree(PROJECT / "conf", root / "conf")
    (root / "code").mkdir()
    held = {**TINY["data"]["dataset"], "seed": 9, "samples": 12}
    more = {
        "train": {"evaluate": {"every": TINY["train"]["steps"], "batches": 1}},
        "checkpoint": {"micro_batches": 3},
        "data": {"held_out": held},
        "solve": {"only": "data"},
    }
    for group, content in TINY.items():
        (root / f"conf/{group}/tiny.yaml").write_text(yaml.safe_dump(content | more.get(group, {})))
    text = re.sub(rf"(?m)^({'|'.join(TINY)}): \S+", r"\1: tiny", (root / "conf/config.yaml").read_text())
    text = text.replace("code: pipeline/models", "code: code").replace("enabled: true", "enabled: false")
    (root / "conf/config.yaml").write_text(text)
    stages(root, "trace", "profile", "cluster", "solve", "checkpoint", "codegen")
    return root


def stages(root: Path, *names: str) -> None:
    here = Path.cwd()
    os.chdir(root)
    try:
        for name in names:
            assert main([name, "-q"]) == 0
    finally:
        os.chdir(here)


@pytest.mark.usefixtures("warm_python")
def test_a_run_in_slices_has_the_losses_of_whole_passes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain_loop(project, TINY["train"]["steps"])
    expected = [float(line) for line in capsys.readouterr().out.split()]
    stages(project, "train")
    plan, report = (artifacts.load(kind, project).body for kind in ("plan", "report"))
    text = (project / "runs/codegen/module.py").read_text()
    assert plan.slices == (4, 4, 4) and "SLICES = (4,) * 3" in text and "MICRO_BATCHES = 3" in text
    assert report.losses == pytest.approx(expected, rel=1e-5)
    assert len(report.evaluations) == 1  # its program takes slices, too


@pytest.mark.usefixtures("warm_python")
def test_verify_and_explain_know_slices(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages(project, "verify")
    assert "equal: loss" in capsys.readouterr().out
    here = Path.cwd()
    os.chdir(project)
    try:
        assert main(["explain", "--json"]) == 0
    finally:
        os.chdir(here)
    told = json.loads(capsys.readouterr().out)
    assert dict(told["plan"])["micro-batches"] == "3"
