"""The shipped configuration as a user runs it: what it makes, what it tells MLflow, and what an edit runs again.

The tests follow one another on one project, in the order of this file.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import KINDS
from shardwright.pipeline.base.stage import STAGES as SPECS
from shardwright.pipeline.base.stage import read_summary
from shardwright.pipeline.config import listing
from shardwright.pipeline.tracking.headline import HEADLINES
from tests.flow.conftest import Maker
from tests.flow.project import SOURCE, STAGES, Done, Project, undone, worst_difference
from tests.flow.tracked import Tracked

pytestmark = pytest.mark.flow
STEPS = 20
WITH_PARAMS = ("trace", "cluster", "solve", "checkpoint", "train")
TRAIN = "conf/train/adamw.yaml"


@pytest.fixture(scope="module")
def default(make_project: Maker) -> Project:
    """The shipped configuration, run once with tracking on."""
    project = make_project()
    project.warm = True  # `make run` waits for the imports, and so does tests/flow/test_edits.py for a tracked run
    done = project.repro().ok()
    assert sorted(done.stages) == sorted(STAGES)
    return project


def test_every_artifact_is_whole_and_no_pickle(default: Project) -> None:
    for kind in KINDS:
        found = artifacts.load(kind, default.root)
        assert found.kind == kind and not found.edited
        content = KINDS[kind].path(default.root).read_bytes()
        assert content[:1] != b"\x80", "a pickle"
        content.decode("utf-8")
    plan, report = default.load("plan"), default.load("report")
    assert plan.sizes == (2,) and report.ranks == 2
    assert min(report.peak_bytes) > 0 and report.median_step_seconds > 0
    assert report.losses[-1] < report.losses[0]


def test_summary_shows_the_plan_and_predicted_beside_measured(default: Project) -> None:
    text = default.stages("summary").ok().out
    for word in ("mesh", "inputs", "parameters", "recompute", "predicted", "measured", "peak memory", "samples/s"):
        assert word in text, word
    for kind in KINDS.values():
        assert f"runs/{kind.stage}/{kind.file}" in text
    assert "sqlite:///runs/mlflow.db" in text and "shardwright ui" in text


def test_losses_are_those_of_plain_pytorch(default: Project) -> None:
    report = default.load("report")
    assert report.steps == STEPS
    assert worst_difference(report.losses, default.plain_losses(STEPS)) < 1e-5


def test_the_run_is_tracked(default: Project) -> None:
    tracked = Tracked(default)
    assert len(tracked.runs) == 1
    run = tracked.runs[0]
    assert run.info.status == "FINISHED"
    assert tracked.stages(run) == dict.fromkeys(STAGES, "executed")
    for name in WITH_PARAMS:
        assert any(key.startswith(f"{name}.") for key in run.data.params), name
    assert run.data.params["train.train.steps"] == str(STEPS)
    plan = artifacts.load("plan", default.root)
    gigabytes = f"{plan.body.budget_bytes / 1e9:.4g}"
    assert run.info.run_name == f"gpt_small on local_cpu, d0=2, {gigabytes} GB"
    told = {"model": "gpt_small", "cluster": "local_cpu", "mesh": "d0=2", "engine": "planned"}
    assert plan.digest.startswith(f"sha256:{run.data.tags['plan']}") and len(run.data.tags["plan"]) == 12
    assert run.data.tags.items() >= (told | {"budget_gb": gigabytes}).items()
    names = [key.split("_", 1)[1] for key in sorted(run.data.metrics) if "/" not in key]
    assert names == list(HEADLINES)
    for name in STAGES:
        figures = read_summary(name, default.root)
        assert figures
        for figure, value in figures.items():
            if isinstance(value, str):
                assert run.data.tags[f"{name}/{figure}"] == value
            else:
                assert run.data.metrics[f"{name}/{figure}"] == pytest.approx(value)
        assert f"{name}/{KINDS[SPECS[name].writes].file}" in tracked.files(run, name)


def test_the_cluster_is_drawn(default: Project) -> None:
    """The picture of links and curves is under runs/ and in the tracked run."""
    assert (default.root / "runs/cluster/topology.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    tracked = Tracked(default)
    assert "cluster/topology.png" in tracked.files(tracked.runs[0], "cluster")


def test_the_profile_draws_the_step(default: Project) -> None:
    """The picture and the table of the unsplit step's memory are under runs/ and in the tracked run."""
    picture, modules = (default.root / "runs/profile" / name for name in ("memory.png", "modules.md"))
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "| optimizer state |" in modules.read_text() and "| layers.3.up |" in modules.read_text()
    tracked = Tracked(default)
    assert {"profile/memory.png", "profile/modules.md"} <= set(tracked.files(tracked.runs[0], "profile"))
    profile = default.load("profile")
    assert (profile.source, profile.device, profile.precision) == ("symbolic", "cpu", "fp32")
    assert read_summary("profile", default.root)["unsplit_peak_mb"] == round(profile.step.peak_bytes / 1e6, 3)


def test_the_page_of_the_run_is_written(default: Project) -> None:
    """Beside what the stage made, with what was measured after train; and in the tracked run."""
    planned, trained = (default.root / "runs" / stage / "report.html" for stage in ("codegen", "train"))
    for page in (planned, trained):
        assert page.read_text().startswith("<!DOCTYPE html>")
    assert '"median_step_seconds":' in trained.read_text() and '"median_step_seconds":' not in planned.read_text()
    tracked = Tracked(default)
    for stage in ("codegen", "train"):
        assert f"{stage}/report.html" in tracked.files(tracked.runs[0], stage)


def test_the_plans_stand_beside_those_with_names(default: Project) -> None:
    """As a table under runs/ and in the tracked run: the frontier, DDP and ZeRO, and plans for submeshes."""
    page = (default.root / "runs/solve/plans.md").read_text()
    frontier = default.load("frontier")
    assert (
        page.count("| frontier ") == len(frontier.points)
        and page.count("| submesh |") == len(frontier.submesh_points) > 0
    )
    for row in frontier.baselines:
        assert f"| {row.name} | " in page
    assert {"DDP", "ZeRO-3"} <= {row.name for row in frontier.baselines}
    tracked = Tracked(default)
    assert "solve/plans.md" in tracked.files(tracked.runs[0], "solve")


def test_every_step_is_tracked(default: Project) -> None:
    tracked = Tracked(default)
    report = default.load("report")
    for key in ("loss", "step_ms", "samples_per_second"):
        points = tracked.series(tracked.runs[0], f"train/{key}")
        assert [point.step for point in points] == list(range(STEPS)), key
        assert all(point.value > 0 for point in points)
    losses = [point.value for point in tracked.series(tracked.runs[0], "train/loss")]
    assert losses == pytest.approx(list(report.losses))


def test_nothing_changed_runs_nothing(default: Project) -> None:
    before = default.snapshot()
    done = default.repro().ok()
    assert not done.stages and not done.from_cache
    assert default.snapshot() == before
    assert len(Tracked(default).runs) == 1


def test_comments_and_files_not_chosen_run_nothing(default: Project) -> None:
    files = ("conf/solve/highs.yaml", TRAIN, "conf/config.yaml")
    with undone(default, *files):
        default.edit("conf/solve/highs.yaml", "frontier_points: 6", "frontier_points: 3")
        for file in files:
            path = default.root / file
            path.write_text(f"# another comment\n{path.read_text()}")
        done = default.repro("solve").ok()
        done = Done(0, done.out + default.repro().ok().out, "")
    assert not done.stages and not done.from_cache


def test_steps_run_train_alone_and_reverting_is_cached(default: Project) -> None:
    default.commit()  # dvc.lock: what DVC compares with
    page = default.root / "runs/train/report.html"
    first = page.read_text()
    with undone(default, TRAIN):
        default.edit(TRAIN, "steps: 20", "steps: 3")
        assert default.repro().ok().stages == ["train"]
        check_dvc_tells_what_changed(default)
    assert default.load("report").steps == 3
    tracked = Tracked(default)
    assert len(tracked.runs) == 2
    statuses = dict.fromkeys(STAGES, "cached") | {"train": "executed"}
    assert tracked.stages(tracked.runs[0]) == statuses
    assert tracked.runs[0].info.status == "FINISHED"
    assert len(tracked.series(tracked.runs[0], "train/loss")) == 3

    done = default.repro().ok()
    assert (done.stages, done.from_cache) == ([], ["train"])
    assert default.load("report").steps == STEPS and page.read_text() == first
    assert len(Tracked(default).runs) == 2


def check_dvc_tells_what_changed(project: Project) -> None:
    """Few figures, those of the edit alone, and stages that hang together as a reader would draw them."""
    params = json.loads(project.run("dvc", "params", "diff", "--json").ok().out)
    assert params == {TRAIN: {"steps": {"old": STEPS, "new": 3, "diff": 3 - STEPS}}}
    shown = json.loads(project.run("dvc", "metrics", "show", "--json").ok().out)[""]["data"]
    figures = {file: list(content["data"]) for file, content in shown.items()}
    found = {name: f"runs/{stage}/metrics.json" for name, (stage, _) in HEADLINES.items()}
    assert {name: file for file, names in figures.items() for name in names} == found
    changed = json.loads(project.run("dvc", "metrics", "diff", "--json").ok().out)
    assert list(changed) == ["runs/train/metrics.json"] and changed["runs/train/metrics.json"]["final_loss"]["diff"] > 0
    drawn = project.run("dvc", "dag", "--dot").ok().out
    chain = ["trace", "profile", "solve", "checkpoint", "codegen", "train"]
    edges = [*pairwise(chain), ("cluster", "solve")]
    assert sorted(re.findall(r'"(\w+)" -> "(\w+)"', drawn)) == sorted(edges)


# -- experiments ------------------------------------------------------------------------------------------------------


def test_experiments_apply(make_project: Maker) -> None:
    project = make_project()
    comments = [line for line in _lines(project) if line.lstrip().startswith("#")]
    for name in listing(SOURCE, "experiment"):
        done = project.stages("apply", name).ok()
        assert "[apply] " in done.err and "->" in done.err
        project.stages("check").ok()
        assert [line for line in _lines(project) if line.lstrip().startswith("#")] == comments
        assert project.git("diff", "--stat", "conf").strip()
        project.git("checkout", "--quiet", "conf")


def _lines(project: Project) -> list[str]:
    return [line for path in sorted((project.root / "conf").rglob("*.yaml")) for line in path.read_text().splitlines()]
