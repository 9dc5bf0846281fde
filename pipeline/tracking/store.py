"""The MLflow store that runs are sent to: where it is, and connecting to it in bounded time.

With pipeline/tracking/sender.py the only file that imports mlflow, and only when there is something to send. The import
costs more than a second, and MLflow by itself is patient: minutes of retries for a server that does not answer, 100 s
for a database. Here a store has CONNECT_S to answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import sqlite3
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pipeline.base.garbage import no_collection
from pipeline.base.secrets import without_settings
from pipeline.tracking.artifact_locations import FOLDER, mend

CONNECT_S = 10.0
CREATE_S = 120.0  # for an SQLite file on a slow disk: creating it is a hundred small transactions
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # what goes wrong is told by us, in one line
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "4",
}

T = TypeVar("T")


class Settings(Protocol):
    """The part `tracking` of conf/config.yaml."""

    @property
    def enabled(self) -> bool: ...
    @property
    def uri(self) -> str | None: ...
    @property
    def experiment(self) -> str: ...


@dataclass(frozen=True)
class Store:
    """Where the runs go; `path` and `artifacts` only for an SQLite file, which may lie in the project."""

    uri: str
    path: Path | None = None
    artifacts: Path | None = None
    root: Path | None = None  # of the project that it lies in, and is copied and moved with

    @classmethod
    def of(cls, root: Path, settings: Settings) -> Store:
        """The configured store; no URI is the SQLite file under runs/, a relative file lies under the root."""
        uri = settings.uri or "sqlite:///runs/mlflow.db"
        file, _, query = uri.removeprefix("sqlite:///").partition("?")
        if not uri.startswith("sqlite:///") or file in ("", ":memory:"):
            return cls(uri)
        path, within = root.resolve() / file, not Path(file).is_absolute()
        uri = f"sqlite:///{path}" + (f"?{query}" if query else "")
        return cls(uri, path, path.parent / FOLDER, root.resolve() if within else None)

    @property
    def digest(self) -> str:
        """The same in a copy of the project; of the URI, which may hold a password."""
        uri = self.uri.replace(f"{self.root}/", "", 1) if self.root else self.uri
        return hashlib.sha256(uri.encode()).hexdigest()[:16]

    def mend_locations(self) -> None:
        """Where the project was copied or moved with the store in it."""
        if self.root and self.path:
            mend(self.path)

    def without_secrets(self, text: str) -> str:
        """What may be told of the store, or of what it said."""
        return without_settings(text, uris=(self.uri,))

    @property
    def is_server(self) -> bool:
        return self.uri.startswith(("http://", "https://"))


def connect(store: Store) -> Any:
    """An MlflowClient whose store has answered; raises whatever kept it from answering in time."""
    with no_collection():  # a fifth of the time of importing as much as MLflow does
        if store.path is not None:
            return _within(CREATE_S, lambda: _open_sqlite(store))
        return _within(CONNECT_S, lambda: _open(store))


def _open(store: Store) -> Any:
    client = _mlflow_client()(tracking_uri=store.uri, registry_uri=store.uri)
    client.search_experiments(max_results=1)
    return client


def _open_sqlite(store: Store) -> Any:
    assert store.path is not None
    if store.path.exists() and store.path.stat().st_size:
        _check_sqlite(store.path)
        store.mend_locations()
    else:
        _create_sqlite(store.path)
    return _open(store)


def _mlflow_client() -> Any:
    """The class MlflowClient, imported without its talk."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    for name in ("alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient


def _check_sqlite(path: Path) -> None:
    """Fail at once where MLflow would retry for 100 s: not a database, not writable, locked."""
    uri = f"file:{urllib.parse.quote(str(path))}?mode=rw"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        database.execute("ROLLBACK")


def _create_sqlite(path: Path) -> None:
    """Create the tables under another name and rename: a half-migrated database cannot be used or repaired."""
    _mlflow_client()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and path.stat().st_size:
            return
        for leftover in path.parent.glob(f".{path.name}.*.new*"):
            leftover.unlink(missing_ok=True)
        temporary = path.with_name(f".{path.name}.{time.time_ns()}.new")
        SqlAlchemyStore(f"sqlite:///{temporary}", str(path.parent / FOLDER)).engine.dispose()
        os.replace(temporary, path)


def _within(seconds: float, action: Callable[[], T]) -> T:
    """The action's result, or TimeoutError; an action that overruns is left behind in a thread that dies with us."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def act() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=act, name="shardwright-tracking-connect", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return outcome[0]
