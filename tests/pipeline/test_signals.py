"""Signals that ask a command to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardwright.pipeline.base import signals
from shardwright.pipeline.base.signals import Interrupted, gentle, interruptible, run_dvc
from shardwright.stages import command_line


@pytest.mark.parametrize(
    ("number", "status", "told"), [(signal.SIGTERM, 143, "interrupted by SIGTERM"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_command_ends_with_the_status_of_the_signal(
    number: int, status: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> int:
        os.kill(os.getpid(), number)
        time.sleep(5)
        return 0

    monkeypatch.setattr(command_line, "run_stage", run)
    before = signal.getsignal(number)
    assert command_line.main(["trace"]) == status
    assert capsys.readouterr().err.splitlines() == [told]
    assert signal.getsignal(number) == before


def test_one_that_has_something_to_save_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_S", 0.0)
    with pytest.raises(Interrupted, match="SIGTERM") as ended, interruptible(), gentle() as asked:
        assert asked() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked() == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    assert ended.value.status == 143, "of the first"


def test_one_signal_that_comes_twice_is_one() -> None:
    """From Slurm and from torchrun, or from the terminal and from `shardwright run`."""
    with interruptible(), gentle() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked() == signal.SIGTERM


def test_what_the_caller_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


STAGE = """
import signal, sys, time
def end(number, frame):
    open("ended", "w").write(str(number))
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
open("begun", "w").close()
time.sleep(600)
"""
LIKE_DVC = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-m', 'stages']).returncode)"


def test_dvc_is_left_to_end_with_its_stage(tmp_path: Path) -> None:
    """`shardwright run`: the signal goes to the stage below DVC."""
    (tmp_path / "stages.py").write_text(STAGE)

    def ask() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    with pytest.raises(Interrupted), interruptible():
        run_dvc([sys.executable, "-c", LIKE_DVC], tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (tmp_path / "ended").read_text() == "15"


EARLY = """
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "shardwright.pipeline.base.errors":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["stages", "summary"]
runpy.run_module("stages", run_name="__main__")
"""


def test_an_interrupt_while_commands_are_imported_is_no_traceback():
    ended = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
