"""Snapshots as folders: named by their step, whole or absent, with a digest of every file.

| name in the folder of a run | what it is |
|---|---|
| `step-000040` | a snapshot that is whole: it got this name when every file of it was on the disk |
| `.step-000040` | one that is being written; nobody reads it |
| `.gone-step-000020` | one that is being removed |
| `damaged-step-000040` | one whose files are not what they were when written; the next that is whole removes it |
| `launch` | which launcher's job wrote here last: when it starts the ranks again, they go on |
| `finished` | the run has come to its end and its report is written: the next start with these settings begins anew |

`<run>.earlier` beside it is the folder of the run before: whole, until the one that began anew has a snapshot.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.files import write_atomic

MANIFEST, FINISHED, LAUNCH = "manifest.json", "finished", "launch"
VERSION = 1
_STEP = re.compile(r"step-(\d+)")


class Damaged(Exception):
    """A snapshot that is not as it was written; the text says what is wrong with it."""


class Missing(Damaged):
    """A file of it that this host does not see; `file` is its name."""

    def __init__(self, file: str) -> None:
        self.file = file
        super().__init__(f"{file} is missing")


class Unreadable(Exception):
    """One that may well be whole, though not for us here and now; the text says why, and what to do."""


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def step_of(snapshot: Path) -> int:
    match = _STEP.fullmatch(snapshot.name)
    assert match, snapshot
    return int(match[1])


def snapshots_in(folder: Path) -> list[Path]:
    """Those that were whole when they were written, newest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _STEP.fullmatch(path.name)), key=step_of, reverse=True)


def digest_of(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"sha256": digest.hexdigest(), "bytes": path.stat().st_size}


def write_manifest(folder: Path, about: dict[str, Any], files: dict[str, dict[str, Any]]) -> None:
    body = {"version": VERSION, "about": about, "files": dict(sorted(files.items()))}
    write_atomic(folder / MANIFEST, json.dumps({**body, "digest": _digest(body)}).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(folder, MANIFEST))
        version = found["version"]
        digest = found.pop("digest", None)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{MANIFEST} is not whole ({type(error).__name__})") from None
    if isinstance(version, int) and version != VERSION:  # first: another version may take its digest otherwise
        raise Unreadable(
            f"{MANIFEST} has version {version}, this program reads version {VERSION}: go on with the program that wrote"
            " it, or move it away"
        )
    if digest != _digest(found):
        raise Damaged(f"{MANIFEST} does not match its digest")
    return {**found, "digest": digest}


def _read(folder: Path, name: str) -> bytes:
    with _reading(name):
        return (folder / name).read_bytes()


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """A file that is not there is damage; one that cannot be read now may be whole."""
    try:
        yield
    except FileNotFoundError:
        raise Missing(name) from None
    except OSError as error:
        raise Unreadable(
            f"{name} cannot be read ({error.strerror}): try again, or move the snapshot away to go on without it"
        ) from None


def check_files(folder: Path, manifest: dict[str, Any], part: int = 0, parts: int = 1) -> None:
    """Every `parts`-th file against the manifest, from number `part` on: ranks share the work."""
    for name in list(manifest["files"])[part::parts]:
        with _reading(name):
            found = digest_of(folder / name)
        wanted = manifest["files"][name]
        if found["bytes"] != wanted["bytes"]:
            raise Damaged(f"{name} has {found['bytes']} bytes instead of {wanted['bytes']}")
        if found != wanted:
            raise Damaged(f"{name} does not match its digest")


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def unfinished(folder: Path, step: int) -> Path:
    return folder / f".{name_of(step)}"


def publish(temporary: Path, step: int) -> Path:
    """All files are on the disk: the name says so from now on, also after a loss of power."""
    final = temporary.parent / name_of(step)
    _sync(temporary)
    remove(final)  # only one that was found to be damaged can be there
    os.rename(temporary, final)
    _sync(final.parent)
    return final


def remove(snapshot: Path) -> None:
    """At once for everyone who looks for snapshots, though files go one by one."""
    if not snapshot.exists():
        return
    gone = snapshot.parent / f".gone-{snapshot.name}"
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(snapshot, gone)
    shutil.rmtree(gone, ignore_errors=True)


def keep_newest(folder: Path, keep: int) -> None:
    for old in snapshots_in(folder)[keep:]:
        remove(old)


def remove_replaced(folder: Path) -> None:
    """Once a run has a snapshot that is whole: damaged ones, and those of the run before it."""
    for old in [*folder.glob("damaged-step-*"), earlier(folder)]:
        remove(old)


def set_aside(snapshot: Path) -> None:
    """A damaged one no longer counts as a snapshot."""
    aside = snapshot.parent / f"damaged-{snapshot.name}"
    remove(aside)
    os.rename(snapshot, aside)


def sweep(folder: Path) -> None:
    """What a killed process left half-written or half-removed."""
    for stale in [*folder.glob(".step-*"), *folder.glob(".gone-*"), *folder.parent.glob(f".gone-{folder.name}*")]:
        shutil.rmtree(stale, ignore_errors=True)


def finish(folder: Path) -> None:
    if folder.is_dir():
        write_atomic(folder / FINISHED, b"")


def is_finished(folder: Path) -> bool:
    return (folder / FINISHED).exists()


def earlier(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.earlier")


def begin_anew(folder: Path) -> Path | None:
    """Before a run that must not go on from what lies there. Snapshots are put aside: where they are now, if any."""
    aside = earlier(folder)
    if not snapshots_in(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return aside if aside.exists() else None
    remove(aside)  # the run that wrote the others had put it aside
    os.rename(folder, aside)
    _sync(folder.parent)
    return aside


def claim(folder: Path, launch: str) -> None:
    """Of the job of a launcher; a run that was started by hand has no name, and is not started again."""
    if launch:
        write_atomic(folder / LAUNCH, launch.encode())
    else:
        (folder / LAUNCH).unlink(missing_ok=True)


def is_of(folder: Path, launch: str) -> bool:
    try:
        return (folder / LAUNCH).read_bytes() == launch.encode()
    except OSError:
        return False


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
