"""Tells MLflow what the pipeline did: one MLflow run per execution, whichever stages ran or were cached.

What is to be told is first written to the spool (pipeline/tracking/spool.py); then what has not been sent is sent
(sender.py and store.py, the only files that import mlflow). Where the store cannot be used the work goes on, the user
is told once per execution, and `sync` sends everything later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.base.errors import ShardwrightError
from pipeline.config import Tracking
from pipeline.tracking.execution import SweepPoint, current_point, execution_id
from pipeline.tracking.sender import send
from pipeline.tracking.spool import Spool, StageRecord, append, executions, prune
from pipeline.tracking.store import CONNECT_S, Store, connect

RETRY_S = 600.0  # stages of an execution do not try a store again so soon after it failed
LIVE_S = 2.0
LIVE_RETRY_S = 60.0
BUSY = "another process is sending"
CHART_PATH = "/#/experiments/{id}/runs?workflowType=machine_learning&compareRunsMode=CHART"
UI_ADDRESS = ("127.0.0.1", 5000)


class Synced(NamedTuple):
    """Executions that are now wholly in the store, and executions of which something is still only on disk."""

    sent: int
    left: int


class Tracker:
    """What a stage uses: `stage` at its end, `live` while it trains. Nothing here raises for the store's sake."""

    def __init__(
        self,
        root: Path,
        settings: Tracking,
        log: logging.Logger,
        *,
        run_name: str = "run",
        execution: str | None = None,
        point: SweepPoint | None = None,
    ) -> None:
        self._point = point or current_point()
        root = self._point.root if self._point else root
        self._root, self._settings, self._log, self._run_name = root, settings, log, run_name
        self._store = Store.of(root, settings)
        self._spool = Spool(root, execution or execution_id(), log)
        self._client: Any = None
        self._warned = False

    def stage(self, record: StageRecord, upstream: Sequence[StageRecord] = ()) -> None:
        """Record a stage, and as cached every stage before it that did not run in this execution; then send."""
        self._record([replace(entry, status="cached") for entry in upstream], record)

    def complete(self, records: Iterable[StageRecord]) -> None:
        """Record those of stages that have not told anything in this execution; then send."""
        self._record(records)

    def _record(self, missing: Iterable[StageRecord], done: StageRecord | None = None) -> None:
        if not self._settings.enabled:
            return
        with self._surviving():
            self._describe()
            known = {entry.stage for entry in self._spool.records().values()}
            for entry in missing:
                if entry.stage not in known:
                    self._spool.record(entry)
            if done:
                self._spool.record(done)
        with self._surviving():
            if self._attempt(wait=CONNECT_S) is None:
                prune(self._root, self._log)

    def live(self, stage: str) -> Live:
        """Something to log points to while training; close it before the stage is recorded."""
        descriptor = None
        if self._settings.enabled:
            with self._surviving():
                self._describe()
                descriptor = self._spool.open_live(stage)
        return Live(self, descriptor)

    def _describe(self) -> None:
        if self._point is None:
            self._spool.describe(self._run_name, self._settings.experiment)
        else:
            self._spool.describe(self._point.name, self._settings.experiment, sweep=self._point.sweep)

    def _attempt(self, *, wait: float, force: bool = False, quiet: bool = False) -> str | None:
        """Send under the lock; None when nothing is left, else why not. Failing is remembered, and told once."""
        with self._spool.lock(wait) as locked:
            if not locked:
                return BUSY
            state = self._spool.state()
            if not self._spool.pending(state):
                return None
            if not force and time.time() < state.retry_after:
                return "the store failed a moment ago"
            try:
                self._client = self._client or connect(self._store)
                send(self._client, self._store, self._spool, state)
                return None
            except Exception as error:  # whatever the store, its driver or the network raises must not stop the work
                why = " ".join(self._store.without_secrets(f"{error or type(error).__name__}").split())[:300]
                state = self._spool.state()
                if not (quiet or state.warned):
                    uri = self._store.without_secrets(self._store.uri)
                    later = "the work goes on, `python -m stages sync` sends the records later"
                    self._warn("tracking: %s cannot be used (%s); %s", uri, why, later)
                warned = state.warned or not quiet
                self._spool.save(replace(state, warned=warned, retry_after=time.time() + RETRY_S))
                return why

    def _warn(self, text: str, *values: object) -> None:
        if not self._warned:
            self._warned = True
            self._log.warning(text, *values)

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """A spool that cannot be written (disk full, read-only) costs the records, told once, but not the work."""
        try:
            yield
        except OSError as error:
            self._warn("tracking: %s cannot be written, this run is not tracked: %s", self._spool.folder, error)


class Live:
    """Points logged while training: `log` appends a line to the spool, a thread of its own sends what is there."""

    def __init__(self, tracker: Tracker, descriptor: int | None) -> None:
        self._tracker, self._descriptor = tracker, descriptor
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwright-tracking", daemon=True)
        if descriptor is not None:
            self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._descriptor is None:
            return
        content = (int(step), time.time(), {name: float(value) for name, value in values.items()})
        with self._tracker._surviving():
            append(self._descriptor, content)

    def close(self) -> None:
        """Send the rest, for at most as long as a store may take to answer; what is left stays in the spool."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        self._stop.set()
        self._thread.join(CONNECT_S)
        os.close(descriptor)

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        pause = LIVE_S
        while not self._stop.wait(pause):
            why: str | None = BUSY
            with self._tracker._surviving():
                why = self._tracker._attempt(wait=0.0, force=True)
            pause = LIVE_S if why in (None, BUSY) else LIVE_RETRY_S
        with self._tracker._surviving():
            self._tracker._attempt(wait=LIVE_S)


def sync(root: Path, settings: Tracking, log: logging.Logger) -> Synced:
    """Send every execution of which something is still only on disk; one line says why, where that fails."""
    sent = left = 0
    client: Any = None
    reason: str | None = None
    unreachable = False
    for name in executions(root):
        tracker = Tracker(root, settings, log, execution=name)
        if not tracker._spool.pending(tracker._spool.state()):
            continue
        if unreachable:  # do not wait for it once per execution
            left += 1
            continue
        tracker._client = client
        why = tracker._attempt(wait=CONNECT_S, force=True, quiet=True)
        client, reason = tracker._client, reason or why
        unreachable = client is None and why not in (None, BUSY)
        sent, left = (sent, left + 1) if why else (sent + 1, left)
    if reason:
        log.warning("tracking: %d of %d executions could not be sent: %s", left, sent + left, reason)
    prune(root, log)
    return Synced(sent, left)


def latest_run_url(root: Path, settings: Tracking) -> str | None:
    """Where the user sees the newest run that has been sent; None where there is none."""
    store = Store.of(root, settings)
    for name in reversed(executions(root) if settings.enabled else []):
        state = Spool(root, name, logging.getLogger(__name__)).state()
        if state.experiment_id and state.store == store.digest:
            ui = "`make ui`, then http://{}:{}".format(*UI_ADDRESS)
            address = store.without_secrets(store.uri.rstrip("/")) if store.is_server else ui
            return address + CHART_PATH.format(id=state.experiment_id)
    return None


def ui_command(root: Path, settings: Tracking) -> list[str]:
    """The command that serves the runs to this machine only; creates the store where there is none yet."""
    store = Store.of(root, settings)
    if store.is_server:
        where = store.without_secrets(store.uri)
        raise ShardwrightError("the runs are on a server", where="tracking.uri", remedy=f"open {where} in a browser")
    if store.path and not store.path.exists():
        connect(store)  # whole or not at all, where the server would leave half of it when stopped
    else:
        with contextlib.suppress(sqlite3.Error):  # whatever is wrong with it, the server tells
            store.mend_locations()
    host, port = UI_ADDRESS
    artifacts = ["--artifacts-destination", str(store.artifacts)] if store.artifacts else []
    return [
        *("env", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false", "MLFLOW_DISABLE_TELEMETRY=true"),
        *(sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store.uri),
        *(*artifacts, "--workers", "1", "--host", host, "--port", str(port)),
    ]
