"""The command line itself: help, loudness, what it says when there is nothing to read, and Ctrl-C."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from shardwright.pipeline.base.artifacts import KINDS
from shardwright.pipeline.base.stage import STAGES as SPECS
from shardwright.stages.commands import COMMANDS
from tests.flow.conftest import Maker
from tests.flow.project import SOURCE, STAGES, WARM, Project

pytestmark = pytest.mark.flow
TARGETS = ("run", "test", "test-newest", "ui", "lint", "format", "docs", "site", "setup", "clean", "")


@pytest.fixture(scope="module")
def bare(make_project: Maker) -> Project:
    """Nothing has been run."""
    return make_project(tiny=True)


@pytest.fixture(scope="module")
def planned(make_project: Maker) -> Project:
    """Everything has been run, and train now has steps for minutes."""
    project = make_project(finished=True)
    project.edit("conf/train/tiny.yaml", "steps: 4", "steps: 1000000")
    return project


def test_help_names_every_command(bare: Project) -> None:
    text = bare.stages("--help").ok().out
    for name in (*STAGES, *COMMANDS):
        assert re.search(rf"^ +{name}\b", text, re.MULTILINE), name
    assert "-q" in bare.stages("solve", "--help").ok().out


@pytest.mark.parametrize("arguments", [["no_such"], [], ["trace", "--no-such"], ["apply"]])
def test_unknown_words_are_refused(bare: Project, arguments: list[str]) -> None:
    done = bare.stages(*arguments)
    assert done.status == 2 and done.out == ""
    assert "usage: shardwright" in done.err and "Traceback" not in done.err


@pytest.mark.parametrize("stage", [stage for stage in STAGES if SPECS[stage].reads])
def test_nothing_to_read_names_what_to_run(bare: Project, stage: str) -> None:
    line = bare.stages(stage).refused()
    missing = KINDS[SPECS[stage].reads[0]]
    assert f"runs/{missing.stage}/{missing.file}" in line and f"`dvc repro {missing.stage}`" in line


def test_summary_and_apply_of_nothing(bare: Project) -> None:
    assert "dvc repro" in bare.stages("summary").refused()
    line = bare.stages("apply", "no_such").refused()
    assert "no_such" in line and "tight_memory" in line


def test_a_reader_that_stops_is_no_error_to_tell(bare: Project) -> None:
    """`shardwright ... | head -1`, the pipe closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "stages", "docs"]
    done = subprocess.run(
        command, cwd=bare.root, env=bare.environment(), stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.long
def test_loudness(planned: Project) -> None:
    quiet, plain, loud = (planned.stages("codegen", *more).ok() for more in (["-q"], [], ["-v"]))
    assert quiet.text == ""
    assert plain.err.splitlines() and all(line.startswith("[codegen] ") for line in plain.err.splitlines())
    assert "runs/codegen/module.py" in plain.err
    assert all(line.startswith("[codegen] ") for line in loud.err.splitlines())
    assert len(loud.err.splitlines()) > len(plain.err.splitlines())
    assert "plan.json is sha256:" in loud.err
    assert planned.stages("check", "-q").ok().text == ""


def test_verify_runs_on_real_ranks(planned: Project) -> None:
    done = planned.stages("verify", "--steps", "1").ok()
    assert done.out.splitlines()[-1].startswith("equal: loss, 37 gradients")
    assert "usage: shardwright" in planned.stages("verify", "--steps", "0").err


def test_interrupt_during_training_leaves_nothing(planned: Project) -> None:
    before = planned.snapshot()
    process = planned.start("stages", "train", warm=True)
    assert process.stderr
    for line in process.stderr:  # until it trains
        if "] training" in line:
            break
    deadline = time.monotonic() + 600
    while not any(path.stat().st_size for path in planned.temporary.glob("*/steps.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    assert len(_ranks(planned)) == 2
    os.kill(WARM.command_of(process.pid), signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in err and err.splitlines()[-1] == "interrupted"
    assert planned.all_gone() == []
    assert planned.snapshot() == before
    assert list(planned.temporary.glob("shardwright-*")) == []


def _ranks(project: Project) -> list[object]:
    lines = [process.cmdline() for process in project.processes()]
    return [line for line in lines if "shardwright.stages.train.worker" in line and "torch.distributed.run" not in line]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", TARGETS)
def test_make_targets(bare: Project, target: str) -> None:
    words = ["make", "-n", *([target] if target else [])]
    done = subprocess.run(words, cwd=bare.root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_ci_script_can_be_run() -> None:
    script = SOURCE / ".ci/run"
    assert script.is_file() and os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
