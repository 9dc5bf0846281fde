"""Tests run beside one another: more threads in each would only get in each other's way."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; ranks and stages inherit it

# As on a machine without GPUs; `CUDA_VISIBLE_DEVICES=0` in front of the command shows one to the tests.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# A shell makes what it starts in the background ignore some, and `nohup` others: tests send them.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# How long an example takes, or to draw it, is the machine's affair.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: tests of processes wait a quarter of their time, for what those load or for a time limit."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        from tests.made import share_in

        share_in(Path(config.option.basetemp).parent / "made")


def pytest_collectstart() -> None:
    gc.disable()  # until all test files are imported: what that makes stays


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What the imports of all test files made stays: to look through it again and again takes a tenth of all tests."""
    gc.collect()  # a lock among the garbage would complain at the interpreter's end
    gc.freeze()
    gc.enable()


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers and ranks that the test starts with `python -m` need not wait for their imports."""
    from tests.flow.project import WARM

    monkeypatch.setattr(sys, "executable", str(WARM.python))
