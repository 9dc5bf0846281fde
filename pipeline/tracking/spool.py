"""What an execution of the pipeline has to tell the tracking store, kept on disk until it has been sent.

A stage must not wait for, or fail with, a tracking server. So every stage first writes down here what it did, and
pipeline/tracking/tracker.py and pipeline/tracking/sender.py send it. One folder per execution,
runs/tracking/<execution>/:

    execution.json                first run name and experiment, written once
    records/<when>-<stage>.json   one per stage: params, figures; its files are copied to artifacts/<same name>/
    live/<when>-<stage>.jsonl     points logged while training runs; its writer holds a flock on it
    state.json                    what has been sent already: written by the sender only, under `lock`

Whole files are written under a temporary name and renamed, points are appended one write per line, so a process killed
at any instant leaves a spool that can be read. A file that cannot be read is renamed *.damaged and named in one line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pipeline.base.files import write_atomic
from pipeline.tracking.execution import file_name

VERSION = 1
KEEP = 20  # executions that stay on disk after all of them has been sent

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class MetricPoint:
    """The values logged at one step."""

    step: int
    values: Mapping[str, float]
    at: float


@dataclass(frozen=True)
class StageRecord:
    """What one stage did."""

    stage: str
    status: str = "executed"  # executed | cached | failed
    params: Mapping[str, Scalar] = field(default_factory=dict)
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    artifacts: tuple[Path, ...] = ()
    started: float = field(default_factory=time.time)
    ended: float = field(default_factory=time.time)
    error: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)  # of the whole run
    run_name: str | None = None  # as far as it is known by now; None leaves it

    def __post_init__(self) -> None:
        assert self.status in ("executed", "cached", "failed"), self.status


@dataclass(frozen=True)
class SendState:
    """How far the sender has come; `offsets` are bytes of live files."""

    store: str = ""
    experiment_id: str | None = None
    run_id: str | None = None
    done: tuple[str, ...] = ()
    offsets: Mapping[str, int] = field(default_factory=dict)
    status: str | None = None
    warned: bool = False
    retry_after: float = 0.0


class Spool:
    """The folder of one execution."""

    def __init__(self, root: Path, execution: str, log: logging.Logger) -> None:
        self.execution = execution
        self.folder = _base(root) / file_name(execution)
        self.log = log

    # -- writing ------------------------------------------------------------------------------------------------------

    def describe(self, run_name: str, experiment: str, **more: str) -> None:
        """Say once how the run of this execution is called to begin with; a record may know better."""
        path = self.folder / "execution.json"
        if not path.exists():
            _write(path, {"execution": self.execution, "run_name": run_name, "experiment": experiment} | more)

    def record(self, entry: StageRecord) -> str:
        """Write a stage's record and copies of its artifacts; the record's file, written last, makes it count."""
        name = _new_name(entry.stage)
        copies = [self._copy(path, self.folder / "artifacts" / name) for path in entry.artifacts]
        content = asdict(entry) | {"artifacts": [copy for copy in copies if copy]}
        _write(self.folder / "records" / f"{name}.json", content)
        return name

    def _copy(self, path: Path, folder: Path) -> str | None:
        target, count = folder / path.name, 1
        while target.exists():
            count += 1
            target = folder / f"{path.stem}-{count}{path.suffix}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target)
            else:
                shutil.copyfile(path, target)
        except (OSError, shutil.Error) as error:
            self.log.warning("tracking: %s is left out of the run: %s", path, _line(error))
            return None
        return target.name

    def open_live(self, stage: str) -> int:
        """A file descriptor to append points to; kept locked, so that others see its writer is alive."""
        path = self.folder / "live" / f"{_new_name(stage)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.with_suffix(".tmp")  # others see it only once it is locked and has its header
        descriptor = os.open(hidden, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        append(descriptor, {"version": VERSION, "stage": stage})
        os.replace(hidden, path)
        return descriptor

    def save(self, state: SendState) -> None:
        _write(self.folder / "state.json", asdict(state))

    def drop_artifacts(self, name: str) -> None:
        shutil.rmtree(self.folder / "artifacts" / name, ignore_errors=True)

    def drop_live(self, state: SendState) -> None:
        """Remove the points of stages that have ended where all of them have been sent."""
        for path in self._ended_live():
            if not is_locked(path) and path.stat().st_size <= state.offsets.get(path.name, 0):
                path.unlink(missing_ok=True)

    # -- reading ------------------------------------------------------------------------------------------------------

    def description(self) -> dict[str, str]:
        content = self._read(self.folder / "execution.json") or {}
        return {key: value for key, value in content.items() if isinstance(value, str)}

    def state(self) -> SendState:
        path = self.folder / "state.json"
        content = self._read(path)
        if content is None:
            return SendState()
        try:
            known = {item.name: content[item.name] for item in fields(SendState) if item.name in content}
            return SendState(**known | {"done": tuple(content["done"])})
        except (KeyError, TypeError) as error:
            self._set_aside(path, error)
            return SendState()

    def records(self) -> dict[str, StageRecord]:
        """The readable records in the order they were written; their artifacts are the copies still here."""
        found = {}
        for path in sorted((self.folder / "records").glob("*.json")):
            content = self._read(path)
            if content is None:
                continue
            try:
                found[path.stem] = _record(content, self.folder / "artifacts" / path.stem)
            except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
                self._set_aside(path, error)
        return found

    def live_files(self) -> list[Path]:
        return sorted((self.folder / "live").glob("*.jsonl"))

    def points(self, path: Path, offset: int, limit: int = 500) -> tuple[str, list[MetricPoint], int] | None:
        """The stage of a live file, up to `limit` of its points from a byte offset on, and the offset after them."""
        alive = is_locked(path)  # asked first: what a dead writer wrote is all there when we read
        points: list[MetricPoint] = []
        with path.open("rb") as file:
            try:
                stage = _live_stage(file.readline())
            except ValueError as error:
                self._set_aside(path, error)
                return None
            position = file.seek(max(offset, file.tell()))
            for line in file:
                if len(points) == limit or (alive and not line.endswith(b"\n")):
                    break
                position += len(line)
                try:
                    step, at, values = json.loads(line)
                    points.append(MetricPoint(int(step), {str(k): float(v) for k, v in values.items()}, float(at)))
                except (AttributeError, TypeError, ValueError):
                    self.log.warning("tracking: %s: a damaged point at byte %d is skipped", path.name, position)
        return stage, points, position

    def wanted_status(self) -> str:
        """The status the run should show by what the stages did."""
        if any(is_locked(path) for path in self.live_files()):
            return "RUNNING"
        last = {entry.stage: entry.status for entry in self.records().values()}
        if "failed" in last.values():
            return "FAILED"
        # points without a record after them: the stage that logged them was killed
        return "FINISHED" if self._ended_live() == self.live_files() else "KILLED"

    def _ended_live(self) -> list[Path]:
        """The live files whose stage was recorded after them."""
        ends = {_stage_part(path.stem): path.stem for path in sorted((self.folder / "records").glob("*.json"))}
        return [path for path in self.live_files() if path.stem < ends.get(_stage_part(path.stem), "")]

    def pending(self, state: SendState) -> bool:
        """Whether anything here is still to be sent."""
        names = {path.stem for path in (self.folder / "records").glob("*.json")}
        live = self.live_files()
        if names - set(state.done) or any(p.stat().st_size > state.offsets.get(p.name, 0) for p in live):
            return True
        return bool(names or live) and state.status != self.wanted_status()

    @contextlib.contextmanager
    def lock(self, wait: float = 0.0) -> Iterator[bool]:
        """Whether this process may send: True while it alone has the folder, False when another kept it too long."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            yield _flock(file.fileno(), wait)

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("not a JSON object")
            if (version := content.pop("version", None)) != VERSION:
                raise ValueError(f"version {version!r}, this program knows {VERSION}")
            return content
        except FileNotFoundError:
            return None
        except ValueError as error:
            self._set_aside(path, error)
            return None

    def _set_aside(self, path: Path, error: Exception) -> None:
        aside = path.with_name(path.name + ".damaged")
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, aside)
        self.log.warning("tracking: %s cannot be read (%s): set aside as %s", path, _line(error), aside.name)


def executions(root: Path) -> list[str]:
    """All executions on disk, the one touched last at the end."""
    folders = [path for path in _base(root).glob("*") if path.is_dir()]
    return [path.name for path in sorted(folders, key=lambda path: path.stat().st_mtime_ns)]


def prune(root: Path, log: logging.Logger, keep: int = KEEP) -> None:
    """Remove the folders of old executions of which nothing is left to send."""
    for name in executions(root)[:-keep]:
        spool = Spool(root, name, log)
        with spool.lock() as locked:
            if locked and not spool.pending(spool.state()):
                shutil.rmtree(spool.folder, ignore_errors=True)


def append(descriptor: int, content: object) -> None:
    """One line, one write: whole on disk even if the process is killed right after."""
    os.write(descriptor, json.dumps(content, separators=(",", ":")).encode() + b"\n")


def is_locked(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return not _flock(file.fileno(), 0.0, fcntl.LOCK_SH)
    return False


def _flock(descriptor: int, wait: float, kind: int = fcntl.LOCK_EX) -> bool:
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)


def _base(root: Path) -> Path:
    return root / "runs" / "tracking"


def _new_name(stage: str) -> str:
    """A name for a file of this stage that sorts by time; `_stage_part` undoes it."""
    return f"{time.time_ns():020d}-{os.getpid()}-{file_name(stage)}"


def _stage_part(name: str) -> str:
    return name.split("-", 2)[2]


def _record(content: dict[str, Any], copies: Path) -> StageRecord:
    if not (isinstance(content["params"], dict) and isinstance(content["figures"], dict)):
        raise ValueError("params and figures are not objects")
    content.pop("series", None)  # in records of earlier versions, where it was always empty
    artifacts = tuple(copies / name for name in content["artifacts"] if (copies / name).exists())
    return StageRecord(**content | {"artifacts": artifacts})


def _live_stage(header: bytes) -> str:
    content = json.loads(header)
    if not isinstance(content, dict) or content.get("version") != VERSION or not isinstance(content.get("stage"), str):
        raise ValueError("not a file of points this program knows")
    return str(content["stage"])


def _write(path: Path, content: dict[str, Any]) -> None:
    """A NumPy or torch scalar as the number it is, anything else that JSON does not have as its text."""
    text = json.dumps({"version": VERSION} | content, default=lambda v: v.item() if hasattr(v, "item") else str(v))
    write_atomic(path, text.encode())


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
