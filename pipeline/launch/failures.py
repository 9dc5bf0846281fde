"""Why a launch failed, in one line: by what ranks have said in their folder, by torchrun's table, or by the log."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path

from pipeline.launch.rank import FAILED, ORPHAN, error_path
from pipeline.launch.work_folder import LaunchFailed, WorkFolder

_EXCEPTION = re.compile(r"(?:\[\w+\]:\s*)?[\w.]*(?:Error|Exception)(?::.*)?")  # the last line of a traceback
_STATUS = re.compile(r"rank +: (\d+) .*?\n *exitcode +: (-?\d+) ", re.DOTALL)  # in torchrun's table of failures


def failure_of(work: WorkFolder, status: int, stopped: str, rank: int | None) -> LaunchFailed:
    """`status` is that of the launcher, or of `rank` where it was started without one; `stopped` tells who is."""
    log = work.log()
    if stopped:
        told = stopped
    elif rank is not None and status < 0:
        told = f"rank {rank} died of {_signal_name(-status)}"
    else:
        told = reason(work.path, log, status)
        if not _ranks_told(work.path, log):
            try:
                work.try_room()  # of a launcher that starts ranks again
            except LaunchFailed as error:
                told = str(error)
    failure = LaunchFailed(told)
    failure.log = log
    return failure


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
        if status < 0 and not _follows(work, rank, -status):
            return f"rank {rank} died of {_signal_name(-status)}"
    for rank, status in ends:
        if status > 1 and status != ORPHAN and not _told(work, rank):  # 1: what it says stands in the log
            return f"rank {rank} ended with status {status} without a word"
    for path in [*_by_age(work.glob("final-*.txt")), *errors]:
        return path.read_text("utf-8").strip()
    return _reason_in(log.splitlines())


def _reason_in(log: list[str]) -> str:
    for line in log:
        if line.startswith(FAILED):
            return line.removeprefix(FAILED)
    errors = [line.strip() for line in log if "torch.distributed" not in line and _EXCEPTION.fullmatch(line.strip())]
    return errors[0] if errors else (log[-1].strip() if log else "a rank died without a word")


def _ranks_told(work: Path, log: str) -> bool:
    """Whether a rank has said why it failed, in a file or, where there was no room for one, in the log."""
    files = [*work.glob("error-*.txt"), *work.glob("final-*.txt")]
    return bool(files) or any(line.startswith(FAILED) for line in log.splitlines())


def _follows(work: Path, rank: str, number: int) -> bool:
    """Deaths that have another cause: ended by torchrun; or aborted while it ended, after it had told why."""
    return number == signal.SIGTERM or (number == signal.SIGABRT and _told(work, rank))


def _told(work: Path, rank: str) -> bool:
    return any(error_path(work, int(rank), kind).exists() for kind in ("final", "error"))


def _by_age(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {int(s) for s in signal.Signals} else f"signal {number}"
