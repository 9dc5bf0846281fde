"""The MLflow store that runs are sent to: where it is, connecting to it in bounded time, and where its artifacts lie.

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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from shardwright.pipeline.base.garbage import no_collection
from shardwright.pipeline.base.secrets import without_settings
from shardwright.pipeline.config import Tracking

CONNECT_S = 10.0
CREATE_S = 120.0  # for an SQLite file on a slow disk: creating it is a hundred small transactions
FOLDER = "mlartifacts"  # beside the store
COLUMNS = (("experiments", "artifact_location"), ("runs", "artifact_uri"), ("logged_models", "artifact_location"))
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # what goes wrong is told by us, in one line
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "4",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Store:
    """Where the runs go; `path` and `artifacts` only for an SQLite file, which may lie in the project."""

    uri: str
    path: Path | None = None
    artifacts: Path | None = None
    root: Path | None = None  # of the project that it lies in, and is copied and moved with

    @classmethod
    def of(cls, root: Path, settings: Tracking) -> Store:
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
        return _within(CONNECT_S if store.path is None else CREATE_S, lambda: _open(store))


def _open(store: Store) -> Any:
    if store.path is not None and store.path.exists() and store.path.stat().st_size:
        with _sqlite(store.path) as database:  # fail at once where MLflow would retry for 100 s: no database, locked
            database.execute("BEGIN IMMEDIATE")
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            database.execute("ROLLBACK")
        store.mend_locations()
    elif store.path is not None:
        _create_sqlite(store.path)
    client = _mlflow_client()(tracking_uri=store.uri, registry_uri=store.uri)
    client.search_experiments(max_results=1)
    return client


def _mlflow_client() -> Any:
    """The class MlflowClient, imported without its talk."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    for name in ("alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient


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


@contextlib.contextmanager
def _sqlite(path: Path) -> Iterator[sqlite3.Connection]:
    uri = f"file:{urllib.parse.quote(str(path))}?mode=rw"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)) as database:
        yield database


def _within(seconds: float, action: Callable[[], T]) -> T:
    """The action's result, or TimeoutError; an action that overruns is left behind in a thread that dies with us."""
    outcome: Future[T] = Future()

    def act() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=act, name="shardwright-tracking-connect", daemon=True).start()
    if not wait([outcome], seconds).done:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return outcome.result()


# -- artifact locations -----------------------------------------------------------------------------------------------
#
# MLflow keeps an absolute location for every experiment and every run. In a copy of the project these are folders of
# the original: a new run would write there, and what was copied would be read from there. A location is mended where
# it is that of a store's own folder (`.../mlartifacts`) somewhere else, and that is gone, belongs to another store, or
# holds what lies here too. Without mlflow: whoever only looks need not wait for its import.


@dataclass(frozen=True)
class Location:
    """One that lies in a store's own folder: `base`, ending in FOLDER, and what comes below."""

    base: Path
    below: PurePosixPath
    is_uri: bool

    @classmethod
    def of(cls, text: str) -> Location | None:
        """None for what is no local path, or lies in no such folder."""
        scheme, host, path, *_ = urllib.parse.urlsplit(text)
        if scheme not in ("", "file") or host not in ("", "localhost"):
            return None
        parts = PurePosixPath(urllib.parse.unquote(path) if scheme else text).parts
        if FOLDER not in parts or parts[0] != "/" or ".." in parts:
            return None
        end = len(parts) - parts[::-1].index(FOLDER)
        return cls(Path(*parts[:end]), PurePosixPath(*parts[end:]), bool(scheme))

    def lies_in(self, base: Path) -> bool:
        return len(self.below.parts) > 1 and _exists(base / self.below)


def mend(store: Path) -> int:
    """Makes the store's own locations those of the folder it lies in now; how many were not."""
    own = store.parent / FOLDER
    with _sqlite(store) as database:
        strays = list(_strays(database, own))
        # A folder was once this store's unless the user chose it: then it is there, and has no store beside it.
        moved = {at.base for *_, at in strays if not _exists(at.base) or _exists(at.base.with_name(store.name))}
        moved |= {at.base for *_, at in strays if at.lies_in(own)}
        # Files that were not taken along are read from where they are.
        changes = [s for s in strays if s[-1].base in moved and (s[-1].lies_in(own) or not s[-1].lies_in(s[-1].base))]
        if changes:
            database.execute("BEGIN IMMEDIATE")
            for table, column, row, at in changes:
                text = (own / at.below).as_uri() if at.is_uri else str(own / at.below)
                database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (text, row))
            database.execute("COMMIT")
    return len(changes)


def _strays(database: sqlite3.Connection, own: Path) -> Iterator[tuple[str, str, int, Location]]:
    """Table, column, row and location in the folder of a store that is not this one's, by whatever path."""
    for table, column in COLUMNS:
        if column not in {name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")}:
            continue
        query = f"SELECT rowid, {column} FROM {table} WHERE {column} LIKE ?"
        for row, text in database.execute(query, (f"%{FOLDER}%",)).fetchall():
            location = Location.of(text)
            if location is not None and os.path.realpath(location.base) != os.path.realpath(own):
                yield table, column, row, location


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except OSError:  # also one that may not be looked into: nobody can read or write there
        return False
    return True
