"""The temporary folder that a launch shares with its ranks, and the log of all that these print."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.launch.rank import RESULT, STOPPED

ROOM = "make room there, or set TMPDIR to a folder that has some"
ROOM_BYTES = 65536


class LaunchFailed(Exception):
    """A rank failed or the time ran out; the text is for the user, `log` is all that the ranks wrote."""

    log = ""


@dataclass(frozen=True)
class WorkFolder:
    path: Path
    descriptor: int  # of the log

    def write_job(self, job: dict[str, Any]) -> None:
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

    def result(self, job: dict[str, Any]) -> dict[str, Any] | None:
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


def _spare(job: dict[str, Any]) -> list[Path]:
    """Where a result lies for which the folder has no room, if anywhere."""
    return [Path(job["spare_result"])] if job.get("spare_result") else []


@contextmanager
def work_folder() -> Iterator[WorkFolder]:
    """For this user alone, and removed in the end."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="shardwright-", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchFailed(f"no temporary folder can be made: {error.strerror or error}; {ROOM}") from error
    with folder as name, _log_of_ranks(Path(name)) as log:
        yield WorkFolder(Path(name), log)


@contextmanager
def _log_of_ranks(work: Path) -> Iterator[int]:
    """In memory where the system has files there: a full disk must not end who prints."""
    if hasattr(os, "memfd_create"):
        log = os.memfd_create("log of the ranks")
    else:
        log = os.open(work / "log.txt", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        yield log
    finally:
        os.close(log)


@contextmanager
def _in_tmpdir(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchFailed(f"{path} cannot be written ({error.strerror or error}); {ROOM}") from error
