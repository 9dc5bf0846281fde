"""What an execution of the pipeline has to tell the tracking store, kept on disk until it has been sent.

A stage must not wait for, or fail with, a tracking server: it writes down here what it did, and `tracker.py` sends what
has not been sent, now or later. One folder per execution, runs/tracking/<execution>/:

    records.jsonl   a line for each stage that begins to log points (`live`), and for what each stage did
    points.jsonl    a line for each point logged while training runs; whoever logs holds a shared flock on it
    artifacts/      copies of a record's files, until it has been sent
    sent.json       what has been sent already: written by the sender only, under `lock`

A line is one write and begins on a new line: what a killed process or a full disk left of the one before it cannot be
read, is named once and skipped, and nothing else is lost with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from io import FileIO
from pathlib import Path
from typing import IO, Any

from shardwright.pipeline.base.files import whole_lines, write_atomic
from shardwright.pipeline.tracking.execution import file_name

VERSION = 2
KEEP = 20  # executions that stay on disk after all of them has been sent
RECORDS, POINTS, SENT = "records.jsonl", "points.jsonl", "sent.json"

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class StageRecord:
    """What one stage did, or that it has begun to log points."""

    stage: str
    status: str = "executed"  # executed | cached | failed | live
    params: Mapping[str, Scalar] = field(default_factory=dict)
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    artifacts: tuple[Path, ...] = ()
    started: float = field(default_factory=time.time)
    ended: float = field(default_factory=time.time)
    error: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)  # of the whole run
    run_name: str | None = None  # as far as it is known by now; None leaves it

    def __post_init__(self) -> None:
        assert self.status in ("executed", "cached", "failed", "live"), self.status


@dataclass(frozen=True)
class SendState:
    """How far the sender has come, by bytes of the files: the ends of records, and where unsent points begin."""

    store: str = ""
    experiment_id: str | None = None
    run_id: str | None = None
    done: tuple[int, ...] = ()
    points: int = 0
    status: str | None = None
    warned: bool = False
    retry_after: float = 0.0


class Spool:
    """The folder of one execution. `first` is what its run is called and belongs to before a record knows better."""

    def __init__(self, root: Path, execution: str, log: logging.Logger, first: Mapping[str, str] | None = None) -> None:
        self.folder = _base(root) / file_name(execution)
        self.first, self.log = dict(first or {}), log

    # -- writing ------------------------------------------------------------------------------------------------------

    def record(self, entry: StageRecord) -> None:
        """Copies of its artifacts, then the line that makes it count."""
        name = file_name(f"{time.time_ns()}-{os.getpid()}-{entry.stage}")
        names = [copy for path in entry.artifacts if (copy := self._copy(path, self.folder / "artifacts" / name))]
        content = {"version": VERSION, "run": self.first, "copies": name, **asdict(entry), "artifacts": names}
        with self._open(RECORDS) as file:
            append(file, content)
            os.fsync(file.fileno())

    def _copy(self, path: Path, folder: Path) -> str | None:
        target, count = folder / path.name, 1
        while target.exists():
            count += 1
            target = folder / f"{path.stem}-{count}{path.suffix}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, target)
        except (OSError, shutil.Error) as error:
            self.log.warning("tracking: %s is left out of the run: %s", path, _line(error))
            return None
        return target.name

    def open_points(self, stage: str) -> FileIO:
        """A file to append points to; kept locked, so that others see its writer is alive."""
        file = self._open(POINTS)
        fcntl.flock(file, fcntl.LOCK_SH)
        self.record(StageRecord(stage, "live"))
        return file

    def _open(self, name: str) -> FileIO:
        self.folder.mkdir(parents=True, exist_ok=True)
        return open(self.folder / name, "ab", buffering=0)

    def save(self, state: SendState) -> None:
        write_atomic(self.folder / SENT, json.dumps(asdict(state)).encode())

    def drop_points(self, state: SendState) -> None:
        """Once all of them have been sent, and nobody logs more. State first: points sent twice are harmless."""
        with contextlib.suppress(FileNotFoundError), (self.folder / POINTS).open("r+b") as file:
            if _flock(file) and state.points and not any(self.lines(POINTS, state.points)):
                self.save(replace(state, points=0))
                file.truncate(0)

    # -- reading ------------------------------------------------------------------------------------------------------

    def lines(self, file: str, offset: int = 0) -> Iterator[tuple[int, Any]]:
        """What whole lines from a byte on say, each with the byte after it; None for one that is no JSON."""
        for end, line in whole_lines(self.folder / file, offset):
            if line != b"\n":
                try:
                    content = json.loads(line)
                except (ValueError, RecursionError):
                    content = None
                yield end, content

    def first_run(self) -> dict[str, str]:
        """What the run is called and belongs to, as the first record has it."""
        found = (line.get("run") for _, line in self.lines(RECORDS) if isinstance(line, dict))
        first = next((run for run in found if isinstance(run, dict)), {})
        return {key: value for key, value in first.items() if isinstance(value, str)}

    def records(self) -> dict[int, StageRecord | None]:
        """By the bytes where they end, in the order they were written; None for one that cannot be read.

        Their artifacts are the copies still here.
        """
        found: dict[int, StageRecord | None] = {}
        for end, line in self.lines(RECORDS):
            try:
                found[end] = self._record(dict(line))
            except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
                found[end] = None
        return found

    def _record(self, line: dict[str, Any]) -> StageRecord:
        version, _ = line.pop("version"), line.pop("run")
        if version != VERSION or not (isinstance(line["params"], dict) and isinstance(line["figures"], dict)):
            raise ValueError("a line of another program")
        folder = self.folder / "artifacts" / file_name(line.pop("copies"))
        copies = (folder / Path(name).name for name in line["artifacts"])
        return StageRecord(**line | {"artifacts": tuple(path for path in copies if path.exists())})

    def state(self) -> SendState:
        path = self.folder / SENT
        try:
            content = json.loads(path.read_bytes())
            known = {item.name: content[item.name] for item in fields(SendState)}
            return SendState(**known | {"done": tuple(map(int, known["done"]))})
        except FileNotFoundError:
            pass
        except (KeyError, TypeError, ValueError) as error:
            aside = path.with_name(path.name + ".damaged")
            with contextlib.suppress(FileNotFoundError):
                os.replace(path, aside)
            self.log.warning("tracking: %s cannot be read (%s): set aside as %s", path, _line(error), aside.name)
        return SendState()

    def is_live(self) -> bool:
        """Whether somebody logs points."""
        with contextlib.suppress(FileNotFoundError), (self.folder / POINTS).open("r+b") as file:
            return not _flock(file)
        return False

    def wanted_status(self) -> str:
        """The status the run should show by what the stages did."""
        if self.is_live():
            return "RUNNING"
        last = {entry.stage: entry.status for entry in self.records().values() if entry}
        if "failed" in last.values():
            return "FAILED"
        return "KILLED" if "live" in last.values() else "FINISHED"  # points without a record after them

    def pending(self, state: SendState) -> bool:
        """Whether anything here is still to be sent."""
        ends = {end for end, _ in self.lines(RECORDS)}
        if ends - set(state.done) or any(self.lines(POINTS, state.points)):
            return True
        return bool(ends) and state.status != self.wanted_status()

    @contextlib.contextmanager
    def lock(self, wait: float = 0.0) -> Iterator[bool]:
        """Whether this process may send: True while it alone has the folder, False when another kept it too long."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            yield _flock(file, wait)


def executions(root: Path) -> list[str]:
    """All executions on disk, the one touched last at the end."""
    folders = [path.parent for path in _base(root).glob(f"*/{RECORDS}")]
    return [path.name for path in sorted(folders, key=lambda path: path.stat().st_mtime_ns)]


def prune(root: Path, log: logging.Logger, keep: int = KEEP) -> None:
    """Remove the folders of old executions of which nothing is left to send."""
    for name in executions(root)[:-keep]:
        spool = Spool(root, name, log)
        with spool.lock() as locked:
            if locked and not spool.pending(spool.state()):
                shutil.rmtree(spool.folder, ignore_errors=True)


def append(file: FileIO, content: object) -> None:
    """A NumPy or torch scalar as the number it is, anything else that JSON does not have as its text."""
    text = json.dumps(content, separators=(",", ":"), default=lambda v: v.item() if hasattr(v, "item") else str(v))
    line = f"\n{text}\n".encode()
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _flock(file: IO[Any], wait: float = 0.0) -> bool:
    """Whether nobody else has a lock on it, now or within so many seconds."""
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)


def _base(root: Path) -> Path:
    return root / "runs" / "tracking"


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
