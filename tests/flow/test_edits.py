"""What an edit of a small project runs again and what it trains then; artifacts and stores that are not in order.

The tests follow one another on one project, in the order of this file, and leave it as it was.
"""

from __future__ import annotations

import shutil

import pytest

from shardwright.pipeline.base.artifacts import KINDS
from shardwright.pipeline.base.stage import STAGES as SPECS
from tests.flow.conftest import Maker
from tests.flow.project import STAGES, TINY, Project, check_against_plain, undone
from tests.flow.tracked import Tracked

pytestmark = pytest.mark.flow


@pytest.fixture(scope="module")
def tiny(make_project: Maker) -> Project:
    return make_project(finished=True)


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


@pytest.mark.long
def test_a_classifier(tiny: Project) -> None:
    with undone(tiny, "conf/model/tiny.yaml", "conf/data/tiny.yaml"):
        module = {
            "_target_": "shardwright.pipeline.models.mlp.build",
            "features": 6,
            "width": 8,
            "classes": 4,
            "depth": 2,
        }
        batch = {"inputs": {"shape": [12, 6], "dtype": "float32"}, "targets": {"shape": [12], "dtype": "int64"}}
        tiny.write_yaml("conf/model/tiny.yaml", {"module": module, "batch": batch})
        dataset = {
            "_target_": "shardwright.pipeline.models.data.ClassVectors",
            "features": 6,
            "classes": 4,
            "samples": 50,
        }
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


@pytest.mark.long
def test_micro_batches_plan_again_and_train_as_the_plain_loop_does(tiny: Project) -> None:
    once = tiny.load("plan").prediction
    with undone(tiny, "conf/train/tiny.yaml"):
        tiny.edit("conf/train/tiny.yaml", "gradient_accumulation: 1", "gradient_accumulation: 3")
        line = tiny.stages("train").refused()
        assert "other settings of train.gradient_accumulation" in line and "dvc repro" in line
        assert tiny.repro().ok().stages == ["solve", "checkpoint", "codegen", "train"]
        check_against_plain(tiny, 2, 1e-5)
        plan, report = tiny.load("plan"), tiny.load("report")
        assert plan.micro_batches == tiny.load("frontier").micro_batches == 3
        assert once.step_seconds < plan.prediction.step_seconds < 3 * once.step_seconds  # the rest is once a step
        assert report.samples_per_second == pytest.approx(3 * 12 / report.median_step_seconds)
    assert tiny.repro().ok().stages == []


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


def test_a_module_edited_by_hand_is_trained_where_that_is_accepted(tiny: Project) -> None:
    usual = tiny.load("report")
    with undone(tiny, "conf/train/tiny.yaml", "runs/codegen/module.py"):
        tiny.edit("runs/codegen/module.py", "F.gelu(", "F.relu(")
        assert "edited or damaged" in tiny.stages("train").refused()
        tiny.write_yaml("conf/train/tiny.yaml", TINY["train"] | {"accept_edited_module": True})
        done = tiny.stages("train").ok()
        assert "[train] warning: runs/codegen/module.py was edited by hand: training with it as it is" in done.err
        report = tiny.load("report")
        assert report.module_edited and not usual.module_edited
        assert report.losses[0] != usual.losses[0], "the edited line was run"
    tiny.repro().ok()
    assert not tiny.load("report").module_edited


# -- a store that cannot be reached -----------------------------------------------------------------------------------


@pytest.mark.long
def test_tracking_that_fails_stops_nothing_and_is_sent_later(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with undone(tiny, "conf/config.yaml", "conf/checkpoint/tiny.yaml", "conf/train/tiny.yaml"):
        tiny.edit("conf/checkpoint/tiny.yaml", "slots_per_link: 10", "slots_per_link: 9")
        tiny.edit("conf/config.yaml", "enabled: false", "enabled: true")
        tiny.edit("conf/train/tiny.yaml", "steps: 4", "steps: 3")
        with undone(tiny, "conf/config.yaml"):
            tiny.edit("conf/config.yaml", "uri: null", "uri: http://127.0.0.1:9")
            with monkeypatch.context() as cold:
                cold.setattr(tiny, "warm", False)  # a run is what one dvc starts, told by its processes
                plans = tiny.repro("codegen").ok()
            trains = tiny.repro().ok()
            assert (plans.stages, trains.stages) == (["checkpoint", "codegen"], ["train"])
            for done in (plans, trains):
                warnings = [line for line in done.text.splitlines() if "warning: tracking" in line]
                assert len(warnings) == 1 and "shardwright sync" in warnings[0], done.text
        assert not (tiny.root / "runs/mlflow.db").exists()
        sent = tiny.stages("sync").ok()
        assert "2 runs are in the store, 0 are still waiting" in sent.err
    tracked = Tracked(tiny)
    trained, planned = tracked.runs
    assert {run.info.status for run in tracked.runs} == {"FINISHED"}
    cached = dict.fromkeys(("trace", "profile", "cluster", "solve"), "cached")
    assert tracked.stages(planned) == cached | {"checkpoint": "executed", "codegen": "executed", "train": ""}
    assert tracked.stages(trained) == dict.fromkeys(STAGES, "cached") | {"train": "executed"}
    assert len(tracked.series(trained, "train/loss")) == 3
