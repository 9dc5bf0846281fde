"""`kill -9` at any moment: no artifact is half written, nothing stays running, and the next `dvc repro` succeeds."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline import artifacts
from pipeline.artifacts import KINDS
from pipeline.errors import ArtifactError
from pipeline.stage import STAGES as SPECS
from tests.flow.conftest import Maker
from tests.flow.project import STAGES, TINY, Project

pytestmark = pytest.mark.flow
START_S = 240.0


class Victim:
    """A project that has run once, and how long each of its stages lived."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.output = project.temporary / "output.txt"
        starts: dict[str, float] = {}
        process = project.start("dvc", "repro", to=self.output)
        while process.poll() is None:
            for stage in re.findall(r"Running stage '(\w+)'", self.output.read_text()):
                starts.setdefault(stage, time.monotonic())
            time.sleep(0.02)
        assert process.returncode == 0, self.output.read_text()
        assert set(starts) == set(STAGES)
        ends = [*list(starts.values())[1:], time.monotonic()]
        self.lifetimes = {stage: end - start for (stage, start), end in zip(starts.items(), ends, strict=True)}

    def start(self, stage: str) -> tuple[subprocess.Popen[str], psutil.Process]:
        """dvc, forced to run that stage alone, and the process of the stage."""
        dvc = self.project.start("dvc", "repro", "--force", "--single-item", stage, to=self.output)
        return dvc, find(dvc, lambda line: line[-3:] == ["-m", "stages", stage])

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
            for process in psutil.Process(above.pid).children(recursive=True):
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
    return Victim(make_project(tiny=True))


def kill(process: psutil.Process) -> bool:
    """Whether it was alive."""
    try:
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return alive


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_killed_while_it_works(victim: Victim, stage: str) -> None:
    """At any moment of its life; one that has ended by then is killed earlier."""
    delay = random.Random(stage).random() * victim.lifetimes[stage]
    killed = False
    while not killed:
        dvc, process = victim.start(stage)
        time.sleep(delay)
        killed = kill(process)
        victim.after(dvc, stage)
        delay *= 0.7


@pytest.mark.parametrize("stage", ["codegen"])
def test_a_stage_killed_as_its_artifact_appears(victim: Victim, stage: str) -> None:
    """Of the stage that writes most; all write as `artifacts.save` does, and each is killed above as well."""
    artifact = KINDS[SPECS[stage].writes].path(victim.project.root)
    dvc, process = victim.start(stage)
    deadline = time.monotonic() + START_S
    while not _written(artifact):
        assert time.monotonic() < deadline and dvc.poll() is None
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
    dvc, _ = victim.start(stage)
    time.sleep(random.Random(stage).uniform(0, victim.lifetimes[stage] / 2))
    dvc.kill()
    victim.after(dvc, stage)


def test_torchrun_killed(victim: Victim) -> None:
    dvc, _ = victim.start("train")
    find(dvc, lambda line: "stages.train.worker" in line and "torch.distributed.run" not in line)
    launcher = find(dvc, lambda line: "torch.distributed.run" in line)
    assert kill(launcher)
    victim.after(dvc, "train")


DIE = """
import os, sys
sys.path.insert(0, os.getcwd())
from pipeline import artifacts
artifacts.save = lambda *_: os._exit(9)
from stages.__main__ import main
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
        died = subprocess.run((sys.executable, script), cwd=project.root, env=project.environment(), timeout=START_S)
        assert died.returncode == 9
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
