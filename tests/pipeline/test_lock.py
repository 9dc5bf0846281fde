"""One command at a time in a folder: who holds it is told, and nobody who is dead holds it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardwright.pipeline.base import lock
from shardwright.pipeline.base.lock import Locked, locked, refuse_locked, this_process
from shardwright.pipeline.base.stage import STAGES, execute
from tests.graphs import SILENT

DEAD = 2**22 + 1  # more than any process has


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[None]:
    """As by another process: the kernel's lock belongs to an opened file."""
    folder.mkdir(exist_ok=True)
    path = folder / lock.FILE
    path.write_text(json.dumps(asdict(replace(this_process("a holder"), user="ana", host="node7", pid=4711))))
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_the_second_is_told_who_where_and_since_when(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with held_elsewhere(runs):
        for attempt in (lambda: execute(STAGES["trace"], None, tmp_path, SILENT), lambda: refuse_locked(runs)):  # type: ignore[arg-type]
            with pytest.raises(Locked) as refused:
                attempt()
            told = refused.value.line()
            assert told.startswith("runs: `a holder` of ana (process 4711 on node7) is at work there since 20")
    with locked(runs), locked(runs):  # the first has let it go; what it wrote does not matter
        assert json.loads((runs / lock.FILE).read_text())["pid"] == os.getpid()
        with open(runs / lock.FILE) as file, pytest.raises(BlockingIOError):  # nobody shares it
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert not list(runs.iterdir())
    refuse_locked(runs)


def test_what_a_killed_process_or_a_crash_left_is_in_nobodys_way(tmp_path: Path) -> None:
    for left in (json.dumps(asdict(replace(this_process("x"), pid=DEAD))), "", "{no json", '{"user": 1}', "[" * 10**5):
        (tmp_path / lock.FILE).write_text(left)
        with locked(tmp_path):
            pass


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("my notes")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / lock.FILE).symlink_to(mine)
    with pytest.raises(OSError, match=r"runs/\.lock"), locked(runs):
        pass
    assert mine.read_text() == "my notes"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> lock.Holder:
    """What a process of another host wrote, whose kernel's lock is not seen here."""
    monkeypatch.setattr(lock, "WATCH_S", 0.6)
    found = replace(this_process("x"), host="node8", system="another")
    (tmp_path / lock.FILE).write_text(json.dumps(asdict(found)))
    return found


def test_another_host_holds_it_while_it_says_so(tmp_path: Path, elsewhere: lock.Holder) -> None:
    def beat() -> None:
        (tmp_path / lock.FILE).write_text(json.dumps(asdict(replace(elsewhere, beats=1))))

    timer = threading.Timer(0.1, beat)
    timer.start()
    with pytest.raises(Locked, match="on node8"), locked(tmp_path):
        pass
    timer.join()
    with locked(tmp_path):  # it has said no more
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(lock, "SETTLE_S", 0.0)
    path = tmp_path / lock.FILE
    path.write_text(json.dumps(asdict(replace(this_process("x"), pid=os.getppid()))))
    with pytest.raises(Locked, match=f"process {os.getppid()}"), locked(tmp_path):
        pass
    path.write_text(json.dumps(asdict(replace(this_process("x"), pid=DEAD))))
    with locked(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
