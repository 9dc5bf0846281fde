"""`kill -9` at any moment: no artifact is half written, nothing stays running, and the next `dvc repro` succeeds."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import KINDS
from shardwright.pipeline.base.errors import ArtifactError
from shardwright.pipeline.base.stage import STAGES as SPECS
from shardwright.pipeline.base.stage import read_summary
from tests.flow.conftest import Maker
from tests.flow.project import STAGES, TINY, WARM, Project

pytestmark = pytest.mark.flow
START_S = 240.0


class Victim:
    """A project that has run once, and how many seconds each of its stages worked then."""

    def __init__(self, project: Project) -> None:
        self.project = project
        project.temporary.mkdir()
        self.output = project.temporary / "output.txt"
        self.seconds = {stage: float((read_summary(stage, project.root) or {})["seconds"]) for stage in STAGES}

    def start(self, stage: str, *, warm: bool = False) -> tuple[subprocess.Popen[str], psutil.Process]:
        """dvc, forced to run that stage alone, and the process of the stage; `warm`: they need not import anything."""
        dvc = self.project.start("dvc", "repro", "--force", "--single-item", stage, to=self.output, warm=warm)
        found = find(dvc, lambda line: line[-3:] == ["-m", "stages", stage])
        if warm:
            self.until(dvc, lambda: bool(WARM.command_of(found.pid)))
            found = psutil.Process(WARM.command_of(found.pid))
        self.until(dvc, lambda: f"[{stage}] " in self.output.read_text())  # until then it reads conf/ alone
        return dvc, found

    def until(self, dvc: subprocess.Popen[str], so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not so():
            assert time.monotonic() < deadline and dvc.poll() is None, self.output.read_text()
            time.sleep(0.001)

    def after(self, dvc: subprocess.Popen[str], stage: str) -> None:
        """What must hold after a kill."""
        self.wait(dvc)
        for kind in KINDS:
            try:
                artifacts.load(kind, self.project.root)
            except ArtifactError as error:
                assert "\n" not in error.line()
        assert self.project.all_gone(within=240) == []
        done = self.project.repro(stage).ok()
        assert SPECS[stage].writes in self.loadable(), done.text

    def wait(self, dvc: subprocess.Popen[str]) -> None:
        try:
            dvc.wait(timeout=START_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"dvc waits for a stage that was killed: {self.output.read_text()}")

    def loadable(self) -> set[str]:
        found = set()
        for kind in KINDS:
            try:
                artifacts.load(kind, self.project.root)
            except ArtifactError:
                continue
            found.add(kind)
        return found


def find(above: subprocess.Popen[str], wanted: Callable[[list[str]], bool]) -> psutil.Process:
    """The first process below whose command line is wanted."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            for process in map(psutil.Process, WARM.below(above.pid)):
                if wanted(process.cmdline()):
                    return process
        except psutil.Error:
            pass
        if above.poll() is not None:
            break
        time.sleep(0.005)
    raise AssertionError(f"no such process below {above.args}")


@pytest.fixture(scope="module")
def victim(make_project: Maker) -> Victim:
    return Victim(make_project(finished=True))


def kill(process: psutil.Process) -> bool:
    """Whether it was alive."""
    try:
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return alive


@pytest.mark.parametrize("stage", ["cluster", "solve", "checkpoint", "train"])
def test_a_stage_killed_while_it_works(victim: Victim, stage: str) -> None:
    """At any moment; one that has ended by then is killed earlier. Ranks of train are processes as a user's are.

    One that starts ranks to measure, two that search, and the longest; codegen is killed below, and trace and profile
    write as it does.
    """
    delay = random.Random(stage).random() * victim.seconds[stage]
    killed = False
    while not killed:
        dvc, process = victim.start(stage, warm=stage != "train")
        time.sleep(delay)
        killed = kill(process)
        victim.after(dvc, stage)
        delay *= 0.7


@pytest.mark.parametrize("stage", ["codegen"])
def test_a_stage_killed_as_its_artifact_appears(victim: Victim, stage: str) -> None:
    """Of the stage that writes most; all write as `artifacts.save` does, and each is killed above as well."""
    artifact = KINDS[SPECS[stage].writes].path(victim.project.root)
    dvc, process = victim.start(stage, warm=True)
    victim.until(dvc, lambda: _written(artifact))
    assert kill(process)
    victim.after(dvc, stage)


def _written(artifact: Path) -> bool:
    """Whether it, or the file that will be renamed to it, is there: dvc removed the old one before the stage began."""
    try:
        return any(artifact.name in path.name for path in artifact.parent.iterdir())
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("stage", ["train"])
def test_dvc_killed(victim: Victim, stage: str) -> None:
    """The stage ends by itself and dvc's own locks do not stand in the way."""
    dvc, _ = victim.start(stage, warm=True)
    time.sleep(random.Random(stage).random() * victim.seconds[stage])
    psutil.Process(WARM.command_of(dvc.pid)).kill()
    victim.after(dvc, stage)


def test_torchrun_killed(victim: Victim) -> None:
    dvc, _ = victim.start("train")
    find(dvc, lambda line: "shardwright.stages.train.worker" in line and "torch.distributed.run" not in line)
    launcher = find(dvc, lambda line: "torch.distributed.run" in line)
    assert kill(launcher)
    victim.after(dvc, "train")


DIE = """
import os
from shardwright.pipeline.base import artifacts
artifacts.save = lambda *_: os._exit(9)
from shardwright.stages.command_line import main
main(["train"])
"""


def test_training_killed_before_its_report_is_written(victim: Victim) -> None:
    """All steps are done and the page is there: the next start trains nothing, and the one after begins anew."""
    project = victim.project
    file, settings = project.root / "conf/train/tiny.yaml", TINY["train"]
    before = file.read_bytes()
    project.write_yaml("conf/train/tiny.yaml", {**settings, "snapshots": {"every": 2}})
    script = project.temporary / "die.py"
    script.write_text(DIE)
    try:
        path, environment = (project.temporary, project.root), project.environment(warm=True)
        assert WARM.run("die", folder=project.root, environment=environment, path=path)[0] == 9
        assert "going on after 4 steps, from runs/train/snapshots/" in project.repro("train").ok().text
        assert len(artifacts.load("report", project.root).body.losses) == settings["steps"]
        again = project.repro("--force", "--single-item", "train").ok().text
        assert "training begins anew" in again and "going on" not in again
    finally:
        file.write_bytes(before)


def test_stages_run_after_all_that(victim: Victim) -> None:
    """Not answered from the cache: what the kills left behind is in nobody's way."""
    stages = ["cluster", "checkpoint", "codegen", "train"]
    assert victim.project.repro("--force", "--single-item", *stages).ok().stages == stages
    assert victim.project.repro().ok().stages == []
    for stage in stages:  # one that ran swept away the temporary file of one that was killed
        assert list((victim.project.root / "runs" / stage).glob(".*.tmp")) == []
