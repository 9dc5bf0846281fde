"""Ranks end in bounded time, say in one line why, and leave no process behind, however the run ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.launch import LaunchFailed, _reason, report_error, run_ranks

RANK = """
import json, os, signal, sys, time
from pathlib import Path
from pipeline.launch import follow_parent, forget_error, report_error, restart_count

work = Path(sys.argv[1])
job = json.loads((work / "job.json").read_text())
rank = int(os.environ["RANK"])
(Path(job["notes"]) / f"{rank}.pid").write_text(str(os.getpid()))
follow_parent()
mode = job["mode"]
if mode == "report" and rank == 0:
    (work / "result.json").write_text(json.dumps({"threads": os.environ["OMP_NUM_THREADS"], "got": job["payload"]}))
elif mode == "fail":  # rank 1 is the cause, rank 0 only notices
    time.sleep(0.0 if rank else 0.3)
    report_error(work, rank, "ValueError: the\\ncause" if rank else "RuntimeError: a peer is gone")
    sys.exit(1)
elif mode == "raise":  # one rank alone: what two write at once is mixed in the log
    time.sleep(0.0 if rank else 300)
    raise ValueError("nobody reported this")
elif mode == "again":  # the second start is the one that works
    if restart_count() == 0:
        report_error(work, rank, "the first start failed")
        sys.exit(1)
    forget_error(work, rank)
    (work / "result.json").write_text(json.dumps({"restarts": restart_count()}))
elif mode == "final":
    report_error(work, rank, "no start would help", final=True)
    sys.exit(1)
elif mode == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)
"""


others: set[int] = set()  # processes that earlier tests left to the whole session, such as a fork server


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Where ranks write their process ids; the module they run is on the import path."""
    (tmp_path / "a_rank.py").write_text(RANK)
    monkeypatch.syspath_prepend(str(tmp_path))
    others.clear()
    others.update(child.pid for child in psutil.Process().children(recursive=True))
    yield tmp_path
    for pid in pids(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids(notes: Path) -> list[int]:
    return [int(text) for path in notes.glob("*.pid") if (text := path.read_text())]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def no_process_left(notes: Path, within: float = 120.0) -> None:
    deadline = time.monotonic() + within
    left = []
    while time.monotonic() < deadline:
        children = [c for c in psutil.Process().children(recursive=True) if c.pid not in others and alive(c.pid)]
        left = [*(pid for pid in pids(notes) if alive(pid)), *(c.pid for c in children)]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {left}")


def run(notes: Path, mode: str, timeout: float = 240, **more):
    return run_ranks("a_rank", {"mode": mode, "notes": str(notes), "payload": [1, "ü"]}, 2, timeout, **more)


def test_the_result_comes_back(notes, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folders = []
    found = run(notes, "report", poll=folders.append)
    assert found == {"threads": str(max(1, (os.cpu_count() or 1) // 2)), "got": [1, "ü"]}
    assert len(pids(notes)) == 2
    assert len(set(folders)) == 1 and not folders[0].exists()
    no_process_left(notes)


def test_the_reason_is_that_of_the_rank_that_failed_first(notes):
    with pytest.raises(LaunchFailed) as failure:
        run(notes, "fail")
    assert str(failure.value) == "ValueError: the cause"
    no_process_left(notes)


def test_a_failure_that_nobody_reported_is_found_in_the_log(notes):
    with pytest.raises(LaunchFailed, match=r"^ValueError: nobody reported this$"):
        run(notes, "raise")
    no_process_left(notes)


def test_ranks_are_started_again(notes):
    assert run(notes, "again", restarts=1) == {"restarts": 1}
    no_process_left(notes)


def test_they_are_not_where_that_would_not_help(notes):
    pids_seen = set()
    with pytest.raises(LaunchFailed, match=r"^no start would help$"):
        run(notes, "final", restarts=20, poll=lambda work: pids_seen.update(pids(notes)))
    assert len(pids_seen) <= 4  # torchrun may have begun once more before it was ended
    no_process_left(notes)


def test_a_launcher_that_is_killed_is_told(notes):
    def kill(work):
        if len(pids(notes)) == 2:
            os.kill(psutil.Process(pids(notes)[0]).ppid(), signal.SIGKILL)

    with pytest.raises(LaunchFailed, match=r"^the launcher died of SIGKILL$"):
        run(notes, "hang", poll=kill)
    no_process_left(notes)


def test_ranks_that_end_without_a_result(notes):
    with pytest.raises(LaunchFailed, match="without a result"):
        run(notes, "nothing")


def test_the_time_runs_out_though_the_ranks_will_not_end(notes):
    def both_there(work):
        if len(pids(notes)) == 2:
            raise LaunchFailed("stopped by the test")

    with pytest.raises(LaunchFailed, match="stopped by the test"):
        run(notes, "hang", poll=both_there)
    no_process_left(notes)


def test_the_time_limit_is_told(notes):
    with pytest.raises(LaunchFailed, match=r"it did not finish within 0\.5 s"):
        run(notes, "hang", timeout=0.5)
    no_process_left(notes)


def test_a_killed_parent_takes_its_ranks_along(notes):
    """Also while nobody has taken note of its end: a zombie counts as gone."""
    script = f"""
import sys
sys.path[:0] = {[str(notes), str(Path(__file__).parents[2])]!r}
from pipeline.launch import run_ranks
run_ranks("a_rank", {{"mode": "hang", "notes": {str(notes)!r}, "payload": 1}}, 2, 120)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while len(pids(notes)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        launchers = [c.pid for c in psutil.Process(parent.pid).children(recursive=True)]
        assert len(pids(notes)) == 2 and launchers
        os.kill(parent.pid, signal.SIGKILL)
        deadline = time.monotonic() + 240
        while any(alive(pid) for pid in (*pids(notes), *launchers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in (*pids(notes), *launchers) if alive(pid)] == []
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("", "a rank died without a word"),
        ("line one\nlast line\n", "last line"),
        ("Traceback\n  KeyError: 'x'\ntorch.distributed.elastic ChildFailedError\nend", "KeyError: 'x'"),
        (b"\xff\xfe broken\n", "\ufffd\ufffd broken"),
    ],
)
def test_the_reason_from_a_log(tmp_path, log, told):
    (tmp_path / "log.txt").write_bytes(log if isinstance(log, bytes) else log.encode())
    assert _reason(tmp_path) == told


def test_the_first_report_wins(tmp_path):
    (tmp_path / "log.txt").write_text("TypeError: in the log")
    report_error(tmp_path, 1, "first\n  of two")
    time.sleep(0.02)
    report_error(tmp_path, 0, "second")
    assert _reason(tmp_path) == "first of two"


def test_a_death_is_told_before_what_others_made_of_it(tmp_path):
    """torchrun's table of failures; a rank that torchrun itself ended is no cause."""
    table = "  rank      : {} (local_rank: 0)\n  exitcode  : -{} (pid: 7)\n"
    report_error(tmp_path, 0, "RuntimeError: connection closed by peer")
    (tmp_path / "log.txt").write_text(table.format(0, 15) + table.format(3, 9))
    assert _reason(tmp_path) == "rank 3 died of SIGKILL"
    (tmp_path / "log.txt").write_text(table.format(0, 15))
    assert _reason(tmp_path) == "RuntimeError: connection closed by peer"
    (tmp_path / "log.txt").write_text(table.format(0, 6))
    assert _reason(tmp_path) == "RuntimeError: connection closed by peer"  # a thread of its own aborted it as it ended
    (tmp_path / "log.txt").write_text(table.format(2, 6))
    assert _reason(tmp_path) == "rank 2 died of SIGABRT"
