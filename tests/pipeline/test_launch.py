"""Ranks end in bounded time, say in one line why, and leave no process behind, however the run ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from shardwright.pipeline.launch.launch import Supervision, _command, _on_the_loopback, run_ranks
from shardwright.pipeline.launch.rank import MEET, forget_error, report_error, write_result
from shardwright.pipeline.launch.rendezvous import local_store
from shardwright.pipeline.launch.work_folder import LaunchFailed, WorkFolder, reason

RANK = """
import json, os, signal, sys, time
from pathlib import Path
from shardwright.pipeline.launch.rank import (
    end_after_cause, error_path, follow_parent, forget_error, report_error, restart_count
)

work = Path(sys.argv[1])
job = json.loads((work / "job.json").read_text())
rank = int(os.environ["RANK"])
(Path(job["notes"]) / f"{rank}.pid").write_text(str(os.getpid()))
follow_parent()
mode = job["mode"]
if mode == "report" and rank == 0:
    (work / "result.json").write_text(json.dumps({"threads": os.environ["OMP_NUM_THREADS"], "got": job["payload"]}))
elif mode == "fail":  # rank 1 is the cause, rank 0 only notices
    while not (rank or error_path(work, 1).exists()):
        time.sleep(0.05)  # the files tell by their times which was first
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
elif mode == "lost":  # rank 1 is the cause, and rank 0 notices before rank 1 is gone
    if rank:
        (work / "dying").touch()
        time.sleep(0.5)
        os._exit(3)
    while not (work / "dying").exists():
        time.sleep(0.01)
    error = RuntimeError("[1.2.3.4]: Connection reset by peer")
    report_error(work, rank, str(error))
    end_after_cause(error)
    sys.exit(1)
elif mode == "sleep":
    time.sleep(300)
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


@pytest.mark.usefixtures("warm_python")
def test_the_result_comes_back(notes, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folders = []
    found = run(notes, "report", poll=folders.append)
    assert found == {"threads": str(max(1, (os.cpu_count() or 1) // 2)), "got": [1, "ü"]}
    assert len(pids(notes)) == 2
    assert len(set(folders)) == 1 and not folders[0].exists()
    no_process_left(notes)


@pytest.mark.usefixtures("warm_python")
def test_the_reason_is_that_of_the_rank_that_failed_first(notes):
    with pytest.raises(LaunchFailed) as failure:
        run(notes, "fail")
    assert str(failure.value) == "ValueError: the cause"
    no_process_left(notes)


@pytest.mark.usefixtures("warm_python")
def test_a_rank_that_dies_is_named_though_another_notices_before_it_is_gone(notes):
    with pytest.raises(LaunchFailed, match=r"^rank 1 ended with status 3 without a word$"):
        run(notes, "lost")


@pytest.mark.usefixtures("warm_python")
def test_a_failure_that_nobody_reported_is_found_in_the_log(notes):
    with pytest.raises(LaunchFailed, match=r"^ValueError: nobody reported this$"):
        run(notes, "raise")
    no_process_left(notes)


@pytest.mark.usefixtures("warm_python")
def test_ranks_are_started_again(notes):
    assert run(notes, "again", watch=Supervision(restarts=1)) == {"restarts": 1}
    no_process_left(notes)


@pytest.mark.usefixtures("warm_python")
def test_they_are_not_where_that_would_not_help(notes):
    pids_seen = set()
    with pytest.raises(LaunchFailed, match=r"^no start would help$"):
        run(notes, "final", watch=Supervision(restarts=20), poll=lambda work: pids_seen.update(pids(notes)))
    assert len(pids_seen) <= 4  # torchrun may have begun once more before it was ended
    no_process_left(notes)


def test_a_launcher_that_is_killed_is_told(notes):
    def kill(work):
        if len(pids(notes)) == 2:
            os.kill(psutil.Process(pids(notes)[0]).ppid(), signal.SIGKILL)

    with pytest.raises(LaunchFailed, match=r"^the launcher died of SIGKILL$"):
        run(notes, "hang", poll=kill)
    no_process_left(notes)


@pytest.mark.parametrize("who", ["rank 1", "the launcher"])
def test_who_is_stopped_is_named(notes, who):
    """Not the SIGKILL that ended it, nor what others made of it."""

    def stop(work):
        with contextlib.suppress(psutil.Error):  # it has been ended
            if len(pids(notes)) == 2:
                rank = psutil.Process(int((notes / "1.pid").read_text()))
                (rank if who == "rank 1" else rank.parent()).suspend()

    with pytest.raises(LaunchFailed, match=rf"^{who}.* \(process \d+ on {socket.gethostname()}\) is stopped"):
        run(notes, "sleep", poll=stop, watch=Supervision(hang_s=0.5))
    no_process_left(notes)


def test_ranks_of_one_machine_meet_on_its_loopback(tmp_path, monkeypatch):
    """Nothing listens on other interfaces: the store does not, and torchrun has a file."""
    command = _command("a_rank", 2, None, 0, tmp_path)
    assert "--standalone" not in command and any("store_type=file" in word for word in command)
    assert _on_the_loopback()["GLOO_SOCKET_IFNAME"].startswith("lo")
    for name, value in {MEET: str(tmp_path), "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    before = listening()
    store = local_store(timedelta(seconds=20))
    assert store is not None and {address for address, _ in listening() - before} == {"127.0.0.1"}


def listening():
    found = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def test_a_result_and_an_error_for_which_the_temporary_folder_has_no_room(tmp_path, capsys):
    work, spare = tmp_path / "no folder", tmp_path / "spare.json"
    write_result(work, {"losses": [1.0]}, str(spare))
    assert WorkFolder(work, -1).result({"spare_result": str(spare)}) == {"losses": [1.0]} and not spare.exists()
    report_error(work, 0, "why")
    assert reason(tmp_path, capsys.readouterr().err) == "why"


@pytest.mark.usefixtures("warm_python")
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
from shardwright.pipeline.launch.launch import run_ranks
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
    ],
)
def test_the_reason_from_a_log(tmp_path, log, told):
    assert reason(tmp_path, log) == told


def test_a_report_of_letters_that_no_file_takes(tmp_path):
    """As Python reads names of files that are not UTF-8."""
    report_error(tmp_path, 0, "ValueError: no picture in \udcff\x1b[2J.png")
    assert reason(tmp_path, "") == r"ValueError: no picture in \udcff\x1b[2J.png"


def test_the_first_report_wins(tmp_path):
    report_error(tmp_path, 1, "first\n  of two")
    time.sleep(0.02)
    report_error(tmp_path, 0, "second")
    assert reason(tmp_path, "TypeError: in the log") == "first of two"


def test_a_death_is_told_before_what_others_made_of_it(tmp_path):
    """torchrun's table of failures; a rank that torchrun itself ended is no cause."""
    table = "  rank      : {} (local_rank: 0)\n  exitcode  : -{} (pid: 7)\n"
    report_error(tmp_path, 0, "RuntimeError: connection closed by peer")
    assert reason(tmp_path, table.format(0, 15) + table.format(3, 9)) == "rank 3 died of SIGKILL"
    killed = f"{table.format(1, 9)}Root Cause (first observed failure):\n{table.format(3, 9)}"  # 1 did not end
    assert reason(tmp_path, killed) == "rank 3 died of SIGKILL"
    assert reason(tmp_path, table.format(0, 15)) == "RuntimeError: connection closed by peer"
    aborted = table.format(0, 6)  # by a thread of its own as it ended
    assert reason(tmp_path, aborted) == "RuntimeError: connection closed by peer"
    assert reason(tmp_path, table.format(2, 6)) == "rank 2 died of SIGABRT"
    report_error(tmp_path, 0, "rank 2 hangs", hang=True)  # then torchrun killed what did not end
    assert reason(tmp_path, table.format(2, 6)) == "rank 2 hangs"
    (tmp_path / "error-0.txt").unlink()  # as it is while the rank is started again
    assert reason(tmp_path, table.format(2, 6)) == "rank 2 hangs"
    forget_error(tmp_path, 0)
    ended = "  rank      : 1 (local_rank: 0)\n  exitcode  : 3 (pid: 7)\n"
    assert reason(tmp_path, ended) == "rank 1 ended with status 3 without a word"


def test_a_bound_on_each_file_is_no_lack_of_room(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        WorkFolder(tmp_path, -1).try_room()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
