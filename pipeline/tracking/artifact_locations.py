"""Where an MLflow store in an SQLite file says that artifacts lie: mended after the project was copied or moved.

MLflow keeps an absolute location for every experiment and every run. In a copy these are the original's folders: a new
run would write there, and what was copied would be read from there. A location is mended where it is that of a store's
own folder (`.../mlartifacts`) somewhere else, and that is gone, belongs to another store, or holds what lies here too.
No mlflow here: the tables of a store are few and old, and whoever only looks need not wait for its import.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FOLDER = "mlartifacts"  # beside the store
COLUMNS = (("experiments", "artifact_location"), ("runs", "artifact_uri"), ("logged_models", "artifact_location"))


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

    def text(self, base: Path) -> str:
        path = base / self.below
        return path.as_uri() if self.is_uri else str(path)


def mend(store: Path) -> int:
    """Makes the store's own locations those of the folder it lies in now; how many were not."""
    own = store.parent / FOLDER
    uri = f"file:{urllib.parse.quote(str(store))}?mode=rw"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)) as database:
        strays = list(_strays(database, own))
        moved = {base for base in {location.base for *_, location in strays} if _has_moved(base, own, store, strays)}
        changes = [stray for stray in strays if stray[-1].base in moved and not _only_there(stray[-1], own)]
        if changes:
            database.execute("BEGIN IMMEDIATE")
            for table, column, row, location in changes:
                database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (location.text(own), row))
            database.execute("COMMIT")
    return len(changes)


Stray = tuple[str, str, int, Location]  # table, column, row


def _strays(database: sqlite3.Connection, own: Path) -> Iterator[Stray]:
    """Locations in the folder of a store that is not this one's, by whatever path it is reached."""
    for table, column in COLUMNS:
        known = {name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")}
        if column not in known:
            continue
        query = f"SELECT rowid, {column} FROM {table} WHERE {column} LIKE ?"
        for row, text in database.execute(query, (f"%{FOLDER}%",)).fetchall():
            location = Location.of(text)
            if location is not None and os.path.realpath(location.base) != os.path.realpath(own):
                yield table, column, row, location


def _has_moved(base: Path, own: Path, store: Path, strays: list[Stray]) -> bool:
    """Whether that was once this store's folder. A folder that the user chose is there, and has no store beside it."""
    if not _exists(base) or _exists(base.with_name(store.name)):
        return True
    return any(location.base == base and _lies_in(own, location) for *_, location in strays)


def _only_there(location: Location, own: Path) -> bool:
    """Files that were not taken along are read from where they are."""
    return _lies_in(location.base, location) and not _lies_in(own, location)


def _lies_in(base: Path, location: Location) -> bool:
    return len(location.below.parts) > 1 and _exists(base / location.below)


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except OSError:  # also one that may not be looked into: nobody can read or write there
        return False
    return True
