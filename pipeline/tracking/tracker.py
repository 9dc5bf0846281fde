"""Tells MLflow what the pipeline did: one MLflow run per execution, whichever stages ran or were cached.

What is to be told is first written to the spool (pipeline/tracking/spool.py); then what has not been sent is sent
(sender.py and store.py, the only files that import mlflow). Where the store cannot be used the work goes on, the user
is told once per execution, and `sync` sends everything later.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.config import Tracking
from shardwright.pipeline.tracking.execution import SweepPoint, current_point, execution_id
from shardwright.pipeline.tracking.sender import send
from shardwright.pipeline.tracking.spool import Spool, StageRecord, append, executions, prune
from shardwright.pipeline.tracking.store import CONNECT_S, Store, connect

RETRY_S = 600.0  # stages of an execution do not try a store again so soon after it failed
LIVE_S = 2.0
LIVE_RETRY_S = 60.0
BUSY = "another process is sending"
CHART_PATH = "/#/experiments/{id}/runs?workflowType=machine_learning&compareRunsMode=CHART"
UI_ADDRESS = ("127.0.0.1", 5000)

LogPoint = Callable[[int, Mapping[str, float]], None]  # of a step: the values by their names


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
        point = point or current_point()
        self._root = root = point.root if point else root
        self._settings, self._log, self._store = settings, log, Store.of(root, settings)
        named = {"run_name": point.name, "sweep": point.sweep} if point else {"run_name": run_name}
        first = {**named, "experiment": settings.experiment}
        self._spool = Spool(root, execution or execution_id(), log, first)
        self._client: Any = None
        self._warned = False

    def stage(self, record: StageRecord, upstream: Sequence[StageRecord] = ()) -> None:
        """Record a stage, and as cached every stage before it that did not run in this execution; then send."""
        self.complete([replace(entry, status="cached") for entry in upstream], [record])

    def complete(self, records: Iterable[StageRecord], done: Iterable[StageRecord] = ()) -> None:
        """Record those of stages that have not told anything in this execution, and what is `done`; then send."""
        if not self._settings.enabled:
            return
        with self._surviving():
            known = {entry.stage for entry in self._spool.records().values() if entry and entry.status != "live"}
            for entry in (*(entry for entry in records if entry.stage not in known), *done):
                self._spool.record(entry)
        with self._surviving():
            if self._attempt(wait=CONNECT_S) is None:
                prune(self._root, self._log)

    @contextlib.contextmanager
    def live(self, stage: str) -> Iterator[LogPoint]:
        """To log points while training: each is a line of the spool, and a thread of its own sends what is there.

        In the end the rest is sent, for at most as long as a store may take to answer; what is left stays in the spool.
        """
        file, stop = None, threading.Event()
        if self._settings.enabled:
            with self._surviving():
                file = self._spool.open_points(stage)
        if file is None:
            yield lambda step, values: None
            return

        def log(step: int, values: Mapping[str, float]) -> None:
            numbers = {name: float(value) for name, value in values.items()}
            with self._surviving():
                append(file, (stage, int(step), time.time(), numbers))

        thread = threading.Thread(target=self._send_live, args=(stop,), name="shardwright-tracking", daemon=True)
        thread.start()
        try:
            yield log
        finally:
            stop.set()
            thread.join(CONNECT_S)
            file.close()

    def _send_live(self, stop: threading.Event) -> None:
        pause = LIVE_S
        while not stop.wait(pause):
            why: str | None = BUSY
            with self._surviving():
                why = self._attempt(wait=0.0, force=True)
            pause = LIVE_S if why in (None, BUSY) else LIVE_RETRY_S
        with self._surviving():
            self._attempt(wait=LIVE_S)

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
                    later = "the work goes on, `shardwright sync` sends the records later"
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


def sync(root: Path, settings: Tracking, log: logging.Logger) -> tuple[int, int]:
    """Send every execution of which something is still only on disk; one line says why, where that fails.

    How many are now wholly in the store, and of how many something is still only on disk.
    """
    sent = left = 0
    client: Any = None
    reason: str | None = None
    unreachable = False
    for name in executions(root):
        tracker = Tracker(root, settings, log, execution=name)
        if not tracker._spool.pending(tracker._spool.state()):
            continue
        why = reason
        if not unreachable:  # else it would be waited for once per execution
            tracker._client = client
            why = tracker._attempt(wait=CONNECT_S, force=True, quiet=True)
            client, reason = tracker._client, reason or why
            unreachable = client is None and why not in (None, BUSY)
        sent, left = (sent, left + 1) if why else (sent + 1, left)
    if reason:
        log.warning("tracking: %d of %d executions could not be sent: %s", left, sent + left, reason)
    prune(root, log)
    return sent, left


def latest_run_url(root: Path, settings: Tracking) -> str | None:
    """Where the user sees the newest run that has been sent; None where there is none."""
    store = Store.of(root, settings)
    for name in reversed(executions(root) if settings.enabled else []):
        state = Spool(root, name, logging.getLogger(__name__)).state()
        if state.experiment_id and state.store == store.digest:
            ui = "`shardwright ui`, then http://{}:{}".format(*UI_ADDRESS)
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
