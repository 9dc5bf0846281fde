"""Snapshots as folders: named by their step, whole or absent, with a digest of every file.

| name in the folder of a run | what it is |
|---|---|
| `step-000040` | a snapshot that is whole: it got this name when every file of it was on the disk |
| `.step-000040` | one that is being written; nobody reads it |
| `.gone-step-000020` | one that is being removed |
| `damaged-step-000040` | one whose files are not what they were when written; the next that is whole removes it |
| `finished` | the run has come to its end: the next start with the same settings begins anew |
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from pipeline.files import write_atomic

MANIFEST, FINISHED = "manifest.json", "finished"
VERSION = 1
_STEP = re.compile(r"step-(\d+)")


class Damaged(Exception):
    """A snapshot that is not as it was written; the text says what is wrong with it."""


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
        found = json.loads((folder / MANIFEST).read_bytes())
        digest = found.pop("digest")
        version = found["version"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({type(error).__name__})") from None
    if digest != _digest(found):
        raise Damaged(f"{MANIFEST} does not match its digest")
    if version != VERSION:
        raise Damaged(f"{MANIFEST} has version {version}, this program reads version {VERSION}")
    return {**found, "digest": digest}


def check_files(folder: Path, manifest: dict[str, Any], part: int = 0, parts: int = 1) -> None:
    """Every `parts`-th file against the manifest, from number `part` on: ranks share the work."""
    for name in list(manifest["files"])[part::parts]:
        try:
            found = digest_of(folder / name)
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from None
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
    for old in [*snapshots_in(folder)[keep:], *folder.glob("damaged-step-*")]:
        remove(old)


def set_aside(snapshot: Path) -> None:
    """A damaged one no longer counts as a snapshot."""
    aside = snapshot.parent / f"damaged-{snapshot.name}"
    remove(aside)
    os.rename(snapshot, aside)


def sweep(folder: Path) -> None:
    """What a killed process left half-written or half-removed."""
    for stale in [*folder.glob(".step-*"), *folder.glob(".gone-*")]:
        shutil.rmtree(stale, ignore_errors=True)


def finish(folder: Path) -> None:
    if folder.is_dir():
        write_atomic(folder / FINISHED, b"")


def begin_anew(folder: Path) -> None:
    """Before a run that must not go on from what lies there."""
    for snapshot in snapshots_in(folder):
        remove(snapshot)
    shutil.rmtree(folder, ignore_errors=True)


def is_finished(folder: Path) -> bool:
    return (folder / FINISHED).exists()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
