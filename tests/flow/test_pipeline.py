"""The pipeline as a user runs it: what it makes, what it tells MLflow, and what an edit runs again.

The tests on `default` follow one another on one project, in the order of this file; so do those on `tiny`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline import artifacts
from pipeline.artifacts import KINDS
from pipeline.config import listing
from pipeline.stage import STAGES as SPECS
from pipeline.stage import read_summary
from tests.flow.conftest import Maker
from tests.flow.project import SOURCE, STAGES, TINY, Done, Project, worst_difference

pytestmark = pytest.mark.flow
STEPS = 20
WITH_PARAMS = ("trace", "cluster", "solve", "checkpoint", "train")
TRAIN = "conf/train/adamw.yaml"


@pytest.fixture(scope="module")
def default(make_project: Maker) -> Project:
    """The shipped configuration, run once with tracking on."""
    project = make_project()
    done = project.repro().ok()
    assert sorted(done.stages) == sorted(STAGES)
    return project


@pytest.fixture(scope="module")
def tiny(make_project: Maker) -> Project:
    project = make_project(tiny=True)
    project.repro().ok()
    return project


@contextmanager
def undone(project: Project, *files: str) -> Iterator[None]:
    """The files as they were, afterwards."""
    before = {file: (project.root / file).read_bytes() for file in files}
    try:
        yield
    finally:
        for file, content in before.items():
            (project.root / file).write_bytes(content)


class Tracked:
    """What the project's MLflow store holds."""

    def __init__(self, project: Project) -> None:
        from mlflow.tracking import MlflowClient

        uri = f"sqlite:///{project.root}/runs/mlflow.db"
        self.client: Any = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment = self.client.get_experiment_by_name("shardwright")
        self.runs = self.client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])

    def stages(self, run: Any) -> dict[str, str]:
        return {name: run.data.tags.get(f"stage.{name}", "") for name in STAGES}

    def files(self, run: Any, folder: str) -> list[str]:
        return [entry.path for entry in self.client.list_artifacts(run.info.run_id, folder)]

    def series(self, run: Any, key: str) -> list[Any]:
        return sorted(self.client.get_metric_history(run.info.run_id, key), key=lambda point: point.step)


# -- the shipped configuration ----------------------------------------------------------------------------------------


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
    assert "sqlite:///runs/mlflow.db" in text and "make ui" in text


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


def test_the_plans_stand_beside_those_with_names(default: Project) -> None:
    """As a table under runs/ and in the tracked run: the frontier, DDP and ZeRO, and plans for pieces of pipelines."""
    page = (default.root / "runs/solve/plans.md").read_text()
    frontier = default.load("frontier")
    assert page.count("| frontier ") == len(frontier.points) and page.count("| piece |") == len(frontier.pieces) > 0
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
    with undone(default, TRAIN):
        default.edit(TRAIN, "steps: 20", "steps: 3")
        assert default.repro().ok().stages == ["train"]
    assert default.load("report").steps == 3
    tracked = Tracked(default)
    assert len(tracked.runs) == 2
    statuses = dict.fromkeys(STAGES, "cached") | {"train": "executed"}
    assert tracked.stages(tracked.runs[0]) == statuses
    assert tracked.runs[0].info.status == "FINISHED"
    assert len(tracked.series(tracked.runs[0], "train/loss")) == 3

    done = default.repro().ok()
    assert (done.stages, done.from_cache) == ([], ["train"])
    assert default.load("report").steps == STEPS
    assert len(Tracked(default).runs) == 2


# -- experiments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", listing(SOURCE, "experiment"))
def test_experiments_apply(tmp_path: Path, name: str) -> None:
    project = Project.copy(tmp_path)
    comments = [line for line in _lines(project) if line.lstrip().startswith("#")]
    done = project.stages("apply", name).ok()
    assert "[apply] " in done.err and "->" in done.err
    project.stages("check").ok()
    assert [line for line in _lines(project) if line.lstrip().startswith("#")] == comments
    assert project.git("diff", "--stat", "conf").strip()


def _lines(project: Project) -> list[str]:
    return [line for path in sorted((project.root / "conf").rglob("*.yaml")) for line in path.read_text().splitlines()]


# -- a small model: other devices, other budgets ----------------------------------------------------------------------


def test_one_stage_with_what_it_needs(tiny: Project) -> None:
    assert tiny.repro("solve").ok().stages == []
    with undone(tiny, "conf/cluster/tiny.yaml", "conf/solve/tiny.yaml"):
        tiny.edit("conf/cluster/tiny.yaml", "launch_us: 10", "launch_us: 11")
        tiny.edit("conf/solve/tiny.yaml", "backend: highs", "backend: glpk")
        assert tiny.repro("solve").ok().stages == ["cluster", "solve"]
    assert tiny.repro().ok().stages == []


def test_a_saved_plan_is_taken_and_watched(tiny: Project) -> None:
    """It is one of the things that solve depends on: another plan under the same name makes it run again."""
    saved = tiny.root / "conf/plan/mine.json"
    with undone(tiny, "conf/solve/tiny.yaml", "dvc.lock"):
        shutil.copy(tiny.root / "runs/checkpoint/plan.json", saved)
        before = tiny.load("plan")
        tiny.write_yaml("conf/solve/tiny.yaml", {**TINY["solve"], "plan": "mine", "plan_use": "as_is"})
        assert tiny.repro("solve").ok().stages == ["solve"]
        (point,) = tiny.load("frontier").points
        assert point.sharding == before.sharding and point.proof.method == "given"
        assert "conf/plan" not in tiny.run("dvc", "status", "solve").ok().out
        saved.write_text(f"{saved.read_text()}\n")
        assert "conf/plan" in tiny.run("dvc", "status", "solve").ok().out
        saved.unlink()
        assert "there is no conf/plan/mine.json" in tiny.stages("solve").refused()
    assert tiny.repro().ok().stages == []


def test_dvc_exp_run(tiny: Project) -> None:
    """A value of a file, and another file in its place."""
    with undone(tiny, "conf/train/tiny.yaml", "conf/config.yaml", "dvc.lock"):
        assert tiny.run("dvc", "exp", "run", "-S", "conf/train/tiny.yaml:steps=2").ok().stages == ["train"]
        assert tiny.load("report").steps == 2
        done = tiny.run("dvc", "exp", "run", "-S", "conf/config.yaml:solve=highs").ok()
        assert done.stages[:2] == ["solve", "checkpoint"]
        assert not {"trace", "profile", "cluster"} & set(done.stages)
        assert len(tiny.load("frontier").points) > 2 and tiny.load("report").steps == 2
    assert tiny.repro().ok().stages == []  # what was, from the run cache


@pytest.mark.parametrize("devices", [1, 3, 5, 6])
def test_any_number_of_devices(tiny: Project, devices: int) -> None:
    with undone(tiny, "conf/cluster/tiny.yaml"):
        tiny.write_yaml("conf/cluster/tiny.yaml", TINY["cluster"] | {"devices": devices})
        tiny.repro().ok()
        check_against_plain(tiny, devices, 1e-5)


def test_a_classifier(tiny: Project) -> None:
    with undone(tiny, "conf/model/tiny.yaml", "conf/data/tiny.yaml"):
        module = {"_target_": "pipeline.models.mlp.build", "features": 6, "width": 8, "classes": 4, "depth": 2}
        batch = {"inputs": {"shape": [12, 6], "dtype": "float32"}, "targets": {"shape": [12], "dtype": "int64"}}
        tiny.write_yaml("conf/model/tiny.yaml", {"module": module, "batch": batch})
        dataset = {"_target_": "pipeline.models.data.ClassVectors", "features": 6, "classes": 4, "samples": 50}
        tiny.write_yaml("conf/data/tiny.yaml", {"dataset": dataset})
        assert sorted(tiny.repro().ok().stages) == sorted(set(STAGES) - {"cluster"})
        check_against_plain(tiny, 2, 1e-5)


def test_a_tight_budget_saves_memory_and_changes_no_loss(tiny: Project) -> None:
    assert tiny.repro().ok().stages == []
    wide = tiny.load("plan").prediction
    with undone(tiny, "conf/solve/tiny.yaml"):
        budget = (wide.resident_bytes + 0.4 * (wide.peak_bytes - wide.resident_bytes)) / 1e9
        tiny.write_yaml("conf/solve/tiny.yaml", TINY["solve"] | {"memory_budget_gb": round(budget, 7)})
        assert tiny.repro().ok().stages == ["solve", "checkpoint", "codegen", "train"]
        plan = tiny.load("plan")
        split = [layout for layout in plan.sharding.storage.values() if any(s.kind == "S" for s in layout.states)]
        assert split or any(region.recompute for region in plan.regions)
        assert plan.prediction.peak_bytes <= plan.budget_bytes < wide.peak_bytes
        check_against_plain(tiny, 2, 1e-4)
    assert tiny.repro().ok().stages == []


def test_micro_batches_plan_again_and_train_as_the_plain_loop_does(tiny: Project) -> None:
    once = tiny.load("plan").prediction
    with undone(tiny, "conf/train/tiny.yaml"):
        tiny.edit("conf/train/tiny.yaml", "micro_batches: 1", "micro_batches: 3")
        line = tiny.stages("train").refused()
        assert "other settings of train.micro_batches" in line and "dvc repro" in line
        assert tiny.repro().ok().stages == ["solve", "checkpoint", "codegen", "train"]
        check_against_plain(tiny, 2, 1e-5)
        plan, report = tiny.load("plan"), tiny.load("report")
        assert plan.micro_batches == tiny.load("frontier").micro_batches == 3
        assert once.step_seconds < plan.prediction.step_seconds < 3 * once.step_seconds  # the rest is once a step
        assert report.samples_per_second == pytest.approx(3 * 12 / report.median_step_seconds)
    assert tiny.repro().ok().stages == []


def check_against_plain(project: Project, ranks: int, tolerance: float) -> None:
    report = project.load("report")
    assert report.ranks == ranks and len(report.peak_bytes) == ranks
    assert worst_difference(report.losses, project.plain_losses(report.steps)) < tolerance


# -- artifacts that do not belong -------------------------------------------------------------------------------------


def test_a_graph_of_another_configuration_is_refused(tiny: Project) -> None:
    with undone(tiny, "runs/trace/graph.json"):
        with undone(tiny, "conf/model/tiny.yaml"):
            tiny.edit("conf/model/tiny.yaml", "layers: 2", "layers: 1")
            tiny.stages("trace").ok()
        for stage in ("profile", "solve", "codegen", "train"):
            line = tiny.stages(stage).refused()
            assert "other settings of model" in line and "dvc repro trace" in line


def test_a_graph_of_another_run_is_refused(tiny: Project) -> None:
    """Same configuration, other code: nothing but the digests tells them apart."""
    with undone(tiny, "runs/trace/graph.json"):
        with undone(tiny, "pipeline/models/gpt.py"):
            tiny.edit("pipeline/models/gpt.py", "F.gelu(", "F.relu(")
            tiny.stages("trace").ok()
        for stage in ("solve", "codegen", "train"):
            assert "belong to different runs" in tiny.stages(stage).refused()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "report"])
def test_a_truncated_artifact_is_refused(tiny: Project, kind: str) -> None:
    path = KINDS[kind].path(tiny.root)
    reader = next(stage for stage, spec in SPECS.items() if kind in spec.reads)
    before = tiny.snapshot()
    with tiny.with_file(str(path.relative_to(tiny.root)), path.read_bytes()[: path.stat().st_size * 2 // 3]):
        line = tiny.stages(reader).refused()
        assert path.name in line and "dvc repro" in line
    assert tiny.snapshot() == before


# -- a store that cannot be reached -----------------------------------------------------------------------------------


def test_tracking_that_fails_stops_nothing_and_is_sent_later(tiny: Project) -> None:
    with undone(tiny, "conf/config.yaml", "conf/checkpoint/tiny.yaml", "conf/train/tiny.yaml"):
        tiny.edit("conf/checkpoint/tiny.yaml", "slots_per_link: 10", "slots_per_link: 9")
        tiny.edit("conf/config.yaml", "enabled: false", "enabled: true")
        tiny.edit("conf/train/tiny.yaml", "steps: 4", "steps: 3")
        with undone(tiny, "conf/config.yaml"):
            tiny.edit("conf/config.yaml", "uri: null", "uri: http://127.0.0.1:9")
            done = tiny.repro().ok()
            assert done.stages == ["checkpoint", "codegen", "train"]
            warnings = [line for line in done.text.splitlines() if "warning: tracking" in line]
            assert len(warnings) == 1 and "stages sync" in warnings[0], done.text
        assert not (tiny.root / "runs/mlflow.db").exists()
        sent = tiny.stages("sync").ok()
        assert "1 runs are in the store, 0 are still waiting" in sent.err
    tracked = Tracked(tiny)
    assert len(tracked.runs) == 1 and tracked.runs[0].info.status == "FINISHED"
    cached = dict.fromkeys(("trace", "profile", "cluster", "solve"), "cached")
    assert tracked.stages(tracked.runs[0]) == dict.fromkeys(STAGES, "executed") | cached
    assert len(tracked.series(tracked.runs[0], "train/loss")) == 3
