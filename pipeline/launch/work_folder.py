"""The temporary folder that a launch shares with its ranks, the log of what these print, and why a launch failed."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.pipeline.launch.rank import FAILED, ORPHAN, RESULT, STOPPED, error_path

ROOM = "make room there, or set TMPDIR to a folder that has some"
ROOM_BYTES = 65536
_EXCEPTION = re.compile(r"(?:\[\w+\]:\s*)?[\w.]*(?:Error|Exception)(?::.*)?")  # the last line of a traceback
_STATUS = re.compile(r"rank +: (\d+) .*?\n *exitcode +: (-?\d+) ", re.DOTALL)  # in torchrun's table of failures


class LaunchFailed(Exception):
    """A rank failed or the time ran out; the text is for the user, `log` is all that the ranks wrote."""

    def __init__(self, text: str, log: str = "") -> None:
        super().__init__(text)
        self.log = log


@dataclass(frozen=True)
class WorkFolder:
    path: Path
    descriptor: int  # of the log

    def write_job(self, job: Mapping[str, Any]) -> None:
        self.try_room()
        with _in_tmpdir(self.path / "job.json"):
            (self.path / "job.json").write_text(json.dumps(job))
        for spare in _spare(job):
            spare.unlink(missing_ok=True)

    def try_room(self) -> None:
        """For what torchrun and the ranks write there, in words of their own where they cannot."""
        path = self.path / "room"
        with _in_tmpdir(self.path):
            try:
                path.write_bytes(bytes(ROOM_BYTES))
            except OSError as error:
                if error.errno != errno.EFBIG:  # a bound on each file says nothing of room
                    raise
            finally:
                with suppress(OSError):
                    path.unlink()

    def log(self) -> str:
        size = os.fstat(self.descriptor).st_size
        return os.pread(self.descriptor, size, 0).decode(errors="replace").strip()

    def result(self, job: Mapping[str, Any]) -> dict[str, Any] | None:
        for path in (self.path / RESULT, *_spare(job)):
            with suppress(FileNotFoundError):
                found: dict[str, Any] = json.loads(path.read_text())
                path.unlink()
                return found
        return None

    def stopped_by(self) -> int | None:
        """The signal with which the ranks say that they have ended before their time."""
        try:
            return int((self.path / STOPPED).read_text())
        except (OSError, ValueError):
            return None


def _spare(job: Mapping[str, Any]) -> list[Path]:
    """Where a result lies for which the folder has no room, if anywhere."""
    return [Path(job["spare_result"])] if job.get("spare_result") else []


@contextmanager
def work_folder() -> Iterator[WorkFolder]:
    """For this user alone, and removed in the end."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="shardwright-", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchFailed(f"no temporary folder can be made: {error.strerror or error}; {ROOM}") from error
    with folder as name:
        if hasattr(os, "memfd_create"):  # in memory: a full disk must not end who prints
            log = os.memfd_create("log of the ranks")
        else:
            log = os.open(Path(name) / "log.txt", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            yield WorkFolder(Path(name), log)
        finally:
            os.close(log)


@contextmanager
def _in_tmpdir(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchFailed(f"{path} cannot be written ({error.strerror or error}); {ROOM}") from error


def failure_of(work: WorkFolder, status: int, stopped: str, rank: int | None) -> LaunchFailed:
    """By what ranks have said in their folder, by torchrun's table, or by the log.

    `status` is that of the launcher, or of `rank` where it was started without one; `stopped` names who is.
    """
    log = work.log()
    if stopped:
        why = stopped
    elif rank is not None and status < 0:
        why = f"rank {rank} died of {_signal_name(-status)}"
    else:
        why = reason(work.path, log, status)
        files = [*work.path.glob("error-*.txt"), *work.path.glob("final-*.txt")]
        if not files and not any(line.startswith(FAILED) for line in log.splitlines()):  # no rank has said why
            try:
                work.try_room()  # of a launcher that starts ranks again
            except LaunchFailed as error:
                why = str(error)
    return LaunchFailed(why, log)


def reason(work: Path, log: str, launcher: int = 0) -> str:
    """Who was killed, or what the first rank to fail wrote (the others only notice), or an exception of the log."""
    if launcher < 0:
        return f"the launcher died of {_signal_name(-launcher)}"
    errors = _by_age(work.glob("error-*.txt"))
    if hangs := _by_age(work.glob("hang-*.txt")):
        return [*errors, *hangs][0].read_text("utf-8").strip()
    others, _, first = log.rpartition("Root Cause (first observed failure)")  # whom torchrun killed comes before
    ends = [(rank, int(status)) for rank, status in (*_STATUS.findall(first), *_STATUS.findall(others))]
    for rank, status in ends:
        # Deaths that have another cause: ended by torchrun; or aborted while it ended, after it had told why.
        follows = -status == signal.SIGTERM or (-status == signal.SIGABRT and _reported(work, rank))
        if status < 0 and not follows:
            return f"rank {rank} died of {_signal_name(-status)}"
    for rank, status in ends:
        if status > 1 and status != ORPHAN and not _reported(work, rank):  # 1: what it says stands in the log
            return f"rank {rank} ended with status {status} without a word"
    for path in [*_by_age(work.glob("final-*.txt")), *errors]:
        return path.read_text("utf-8").strip()
    lines = log.splitlines()
    told = [line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)]
    own = (line.strip() for line in lines if "torch.distributed" not in line)
    raised = [line for line in own if _EXCEPTION.fullmatch(line)]
    return [*told, *raised, *(line.strip() for line in lines[-1:]), "a rank died without a word"][0]


def _reported(work: Path, rank: str) -> bool:
    return any(error_path(work, int(rank), kind).exists() for kind in ("final", "error"))


def _by_age(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {int(s) for s in signal.Signals} else f"signal {number}"
