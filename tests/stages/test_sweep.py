"""The points of a sweep, how DVC is told of them, and one line for every mistake; tests/flow/test_sweep.py runs one."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from shardwright.pipeline.base.kernel_cache import COPY, OfTheProject
from shardwright.pipeline.base.signals import Interrupted, interruptible
from shardwright.pipeline.config import Backend, overrides, try_settings
from shardwright.pipeline.tracking.execution import ROOT, SweepPoint, current_point
from shardwright.stages.checkpoint.recompute import schedule
from shardwright.stages.command_line import main
from shardwright.stages.sweep import experiments
from shardwright.stages.sweep.experiments import (
    COPIES,
    _override,
    _reason,
    experiment_flags,
    forget_killed,
    run_point,
    sweep_lock,
)
from shardwright.stages.sweep.run import points_of, table

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch):
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_values_are_combined_and_brackets_hold_together():
    assert points_of(["cluster=a,b", "solve.mesh={dp: 2, tp: 4},null"]) == [
        ("cluster=a", "solve.mesh={dp: 2, tp: 4}"),
        ("cluster=a", "solve.mesh=null"),
        ("cluster=b", "solve.mesh={dp: 2, tp: 4}"),
        ("cluster=b", "solve.mesh=null"),
    ]


def test_settings_go_to_the_file_that_is_chosen_and_nothing_is_written(project):
    before = {path: path.read_bytes() for path in project.rglob("*.yaml")}
    settings = ("solve=highs", "solve.memory_budget_gb=2", "solve.mesh={dp: 2}", "train.init_from=null")
    assert try_settings(project, settings).solve.backend is Backend.highs
    assert [_override(*change) for change in overrides(project, settings)] == [
        "conf/config.yaml:++solve=highs",
        "conf/solve/highs.yaml:++memory_budget_gb=2",
        "conf/solve/highs.yaml:++mesh={dp:2}",
        "conf/train/adamw.yaml:++init_from=null",
    ]
    assert {path: path.read_bytes() for path in project.rglob("*.yaml")} == before
    assert _override("f", "k", ["S(0) on tp", True, 1]) == "f:++k=['S(0) on tp',true,1]"


def test_the_reason_is_the_line_of_the_stage():
    said = (
        "Running stage 'solve':\n[solve] reading\nerror: no plan fits; raise it\nERROR: failed to reproduce 'solve'\n"
    )
    assert _reason(said) == "no plan fits; raise it"
    assert _reason("ERROR: a\nERROR: no git\n") == "no git"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cluster="], "'cluster=' is no setting"),
        (["solve.gap=1e-3", "solve.gap=1e-4"], "'solve.gap' is given twice; combine its values: solve.gap=1,2"),
        (["solve.gap=" + ",".join(map(str, range(501)))], "501 points are more than 500"),
        (["budget"], "there is no sweep 'budget'; did you mean 'budgets'?"),
        (["budgets", "other"], "'other' is no setting; name one file"),
        (["cluster=preset_cpu,presetcpu"], "'cluster=presetcpu': there is no conf/cluster/presetcpu.yaml"),
        (["solve.gap=1e-3,wide"], "'solve.gap=wide': solve.gap: got 'wide'"),
        (["solve.gap=1e-3", "--name", "a b"], "--name: 'a b' is no name"),
        (["solve.gap=1e-3"], "DVC keeps experiments in git, and there is no commit here"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_runs(project, capsys, words, told):
    assert main(["sweep", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and err.count("\n") == 1
    assert not (project / "runs").exists()


def test_a_row_that_failed_has_its_reason():
    rows = [{"b": "1", "step_ms": 1.25, "mesh": "d0 2"}, {"b": "2", "reason": "no plan fits"}]
    assert table(rows) == ["b  step_ms  mesh", "1     1.25  d0 2", "2        -     -  no plan fits"]


def test_a_process_knows_its_point(tmp_path):
    point = SweepPoint("memory-1", "solve.memory_budget_gb=2", tmp_path)
    assert current_point(point.environment()) == point and current_point({}) is None


def test_a_copy_of_the_project_takes_its_kernels_where_the_source_is_equal(tmp_path, monkeypatch):
    own = tmp_path / "stages/checkpoint/recompute/schedule.py"
    own.parent.mkdir(parents=True)
    file, function = str(COPY / "stages/checkpoint/recompute/schedule.py"), schedule.no_recompute
    assert OfTheProject.from_function(function, file) is None  # not in a sweep
    monkeypatch.setenv(ROOT, str(tmp_path))
    assert OfTheProject.from_function(function, file) is None  # the project has no such file
    shutil.copy2(file, own)
    assert OfTheProject.from_function(function, file).get_cache_path() == str(own.parent / "__pycache__")
    own.write_text(own.read_text() + "#\n")
    assert OfTheProject.from_function(function, file) is None


# ---- experiments that end before their time


def note(root, name, state="RUNNING", copy=None):
    """What DVC writes of an experiment that it runs in a copy of the project; the file."""
    from dvc.repo.experiments.executor.base import ExecutorInfo, TaskStatus

    copy = copy or root / COPIES / f"tmp{name}"
    copy.mkdir(parents=True)
    path = root / COPIES / "run" / name / f"{name}.run"
    ExecutorInfo("file:///git", "base", "dvc-task", str(copy), ".dvc", name, status=TaskStatus[state]).dump_json(path)
    return path


def runs(path):
    """Whether `dvc exp show` lists it as running."""
    from dvc.repo.experiments.executor.base import ExecutorInfo, TaskStatus

    told = ExecutorInfo.load_json(path)
    return told.status <= TaskStatus.SUCCESS and Path(told.root_dir).exists()


def test_what_a_killed_sweep_left_is_not_taken_for_running(tmp_path):
    sweeps = tmp_path / "runs/sweep"
    elsewhere = tmp_path / "elsewhere"
    killed, early = note(tmp_path, "killed-1"), note(tmp_path, "killed-2", "PREPARING")
    ended, alive = note(tmp_path, "killed-3", "FAILED"), note(tmp_path, "alive-1")
    strange, far = note(tmp_path, "strange-1"), note(tmp_path, "old-1", copy=elsewhere)
    (tmp_path / COPIES / "run/broken").mkdir()
    (tmp_path / COPIES / "run/broken/broken.run").write_text("{")
    with sweep_lock(sweeps / "killed"):
        pass
    (sweeps / "old").mkdir()  # of a version that took no lock
    with sweep_lock(sweeps / "alive"):
        assert forget_killed(tmp_path, sweeps) == ["killed-1", "killed-2", "old-1"]
        assert [runs(path) for path in (killed, early, ended, alive, strange, far)] == [False] * 3 + [True] * 2 + [
            False
        ]
        assert forget_killed(tmp_path, sweeps) == []
    assert elsewhere.is_dir()  # no copy of DVC's
    assert {path.name for path in (tmp_path / COPIES).iterdir()} == {"run", "tmpkilled-3", "tmpalive-1", "tmpstrange-1"}


@pytest.mark.parametrize("value", ["it's", 'a"b', "a, b", "a\\'b", "plain", ["x", "it's"], {"k": "it's"}, 0.5, None])
def test_a_setting_is_read_by_hydra_as_it_is(value):
    file, _, setting = _override("conf/model/a.yaml", "key", value).partition(":")
    assert file == "conf/model/a.yaml"
    assert OverridesParser.create().parse_override(setting).value() == value


STUBBORN = """
import signal, sys, time
from pathlib import Path
for ignored in (signal.SIGINT, signal.SIGTERM):
    signal.signal(ignored, signal.SIG_IGN)
Path("started").write_text(" ".join(sys.argv))
time.sleep(3600)
"""


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_point_ends_and_is_not_taken_for_running(project, monkeypatch, sign):
    """Even where DVC itself does not end when it is told to."""
    monkeypatch.setattr(experiments, "END_S", 0.1)
    (project / "dvc.py").write_text(STUBBORN)
    left = note(project, "memory-1")
    started = project / "started"

    def interrupt():
        while not (started.exists() and started.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), sign)

    threading.Thread(target=interrupt).start()
    with (
        pytest.raises(Interrupted) as ended,
        interruptible(),
        sweep_lock(project / "runs/sweep/memory") as lock,
    ):
        flags = experiment_flags(project, (), "code")
        run_point(project, "memory-1", flags, "solve", dict(os.environ), project / "said.txt", lock)
    assert ended.value.status == 128 + sign
    assert "--name memory-1" in started.read_text() and not runs(left)
    with sweep_lock(project / "runs/sweep/memory"):  # nobody has it: the other process is gone
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
