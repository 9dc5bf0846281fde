"""Snapshots as folders: named by their step, whole or absent, with a digest of every file.

| name in the folder of a run | what it is |
|---|---|
| `step-000040` | a snapshot that is whole: it got this name when every file of it was on the disk |
| `.step-000040` | one that is being written; nobody reads it |
| `.gone-step-000020` | one that is being removed |
| `damaged-step-000040` | one whose files are not what they were when written; it goes when one as far is whole |
| `launch` | which launcher's job wrote here last: when it starts the ranks again, they go on |
| `finished` | the run has come to its end and its report is written: the next start with these settings begins anew |

`<run>.earlier` beside it (`<run>.earlier-2`, ...) is the folder of the run before. It goes when the run that began anew
has come as far: of no state that was reached is the only copy removed. What is in these folders and not of our making
is never removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.files import write_atomic

MANIFEST, TENSORS, FINISHED, LAUNCH = "manifest.json", "tensors.json", "finished", "launch"
VERSION = 2  # 1 was that of torch.distributed.checkpoint, whose metadata is a pickle
_STEP = re.compile(r"step-(\d{1,18})")
_ASIDE = re.compile(r"damaged-step-(\d{1,18})(-\d+)?")
_FILE = re.compile(r"[a-z0-9-]+\.(json|safetensors)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


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


def is_snapshot_name(text: str) -> bool:
    return _STEP.fullmatch(text) is not None


def step_of(snapshot: Path) -> int:
    """Also of one that was set aside."""
    match = _STEP.fullmatch(snapshot.name) or _ASIDE.fullmatch(snapshot.name)
    assert match, snapshot
    return int(match[1])


def snapshots_in(folder: Path) -> list[Path]:
    """Those that were whole when they were written, newest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if is_snapshot_name(path.name)), key=step_of, reverse=True)


def digest_of(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"sha256": digest.hexdigest(), "bytes": path.stat().st_size}


def write_manifest(folder: Path, about: dict[str, Any], files: dict[str, dict[str, Any]]) -> None:
    body = {"version": VERSION, "about": about, "files": dict(sorted(files.items()))}
    write_atomic(folder / MANIFEST, json.dumps({**body, "digest": _digest(body)}).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Of the snapshot in this folder, with all that is in it checked: it may come from anywhere."""
    found = _read_listing(folder)
    if problem := _wrong_numbers(found.get("about"), folder):
        raise Damaged(f"{MANIFEST}: {problem}")
    return found


def _read_listing(folder: Path) -> dict[str, Any]:
    """The manifest, of which just the files are checked."""
    try:
        found = json.loads(read_plain(folder, MANIFEST))
        version = found["version"]
        digest = found.pop("digest", None)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not whole ({type(error).__name__})") from None
    if isinstance(version, int) and version != VERSION:  # first: another version may take its digest otherwise
        raise Unreadable(
            f"{MANIFEST} has version {version}, this program reads version {VERSION}: go on with the program that wrote"
            " it, or move it away"
        )
    if digest != _digest(found):
        raise Damaged(f"{MANIFEST} does not match its digest")
    files = found.get("files")
    if not isinstance(files, dict) or TENSORS not in files:
        raise Damaged(f"{MANIFEST}: it lists no files")
    for name, about in files.items():
        if not _FILE.fullmatch(name):  # one with a folder in it would lead out of the snapshot
            raise Damaged(f"{MANIFEST}: {name[:80]!r} is no file of a snapshot")
        if not isinstance(about, dict) or about.keys() != {"sha256", "bytes"}:
            raise Damaged(f"{MANIFEST}: {name} has no digest and size")
        if not isinstance(about["sha256"], str) or not _SHA256.fullmatch(about["sha256"]):
            raise Damaged(f"{MANIFEST}: {name} has no digest")
        if type(about["bytes"]) is not int or about["bytes"] < 0:
            raise Damaged(f"{MANIFEST}: {name} has no size")
    return {**found, "digest": digest}


def _wrong_numbers(about: Any, snapshot: Path) -> str:
    """What is not as the loop wrote it, of the numbers beside the tensors; or nothing."""
    if not isinstance(about, dict):
        return "it has no numbers of the run"
    step: Any = about.get("step")
    losses: Any = about.get("losses")
    seconds: Any = about.get("seconds")
    if type(step) is not int or not is_snapshot_name(snapshot.name) or step_of(snapshot) != step:
        return f"it is of step {step!r:.20}"
    right = {
        "losses": _is_list(losses, _is_number) and len(losses) == step,
        "seconds": _is_list(seconds, lambda one: _is_number(one) and one > 0) and 0 < len(seconds) <= step,
        "evaluated": _is_list(about.get("evaluated"), _is_evaluation),
        "peak_bytes": _is_list(about.get("peak_bytes"), _is_count),
        "profiled_at": type(about.get("profiled_at")) is int,
        **{name: _is_count(about.get(name)) for name in ("samples", "ranks")},
        **{name: isinstance(about.get(name), str) for name in ("program", "engine")},
        "settings": isinstance(about.get("settings"), dict),
    }
    return next((f"its {name} are not those of a run" for name, good in right.items() if not good), "")


def _is_list(found: Any, good: Callable[[Any], bool]) -> bool:
    return isinstance(found, list) and all(map(good, found))


def _is_evaluation(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and _is_count(found[0]) and _is_number(found[1])


def _is_number(found: Any) -> bool:
    return type(found) in (int, float) and abs(found) < 1e300


def _is_count(found: Any) -> bool:
    return type(found) is int and 0 <= found < 2**62


def read_plain(folder: Path, name: str) -> bytes:
    with _reading(folder, name):
        return (folder / name).read_bytes()


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[None]:
    """A file that is not there is damage; one that cannot be read now may be whole.

    A link may lead anywhere, and a pipe never ends: neither is a file of a snapshot.
    """
    try:
        mode = os.lstat(folder / name).st_mode
        if stat.S_ISLNK(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            raise Damaged(f"{name} is a link or a device, not a file")
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
        with _reading(folder, name):
            found = digest_of(folder / name)
        wanted = manifest["files"][name]
        if found["bytes"] != wanted["bytes"]:
            raise Damaged(f"{name} has {found['bytes']} bytes instead of {wanted['bytes']}")
        if found != wanted:
            raise Damaged(f"{name} does not match its digest")


def is_there(snapshot: Path) -> bool:
    """Whether all files of it are, in their sizes: what there is no time to read has at least these."""
    try:
        files = _read_listing(snapshot)["files"]
        return all((snapshot / name).stat().st_size == about["bytes"] for name, about in files.items())
    except (Damaged, Unreadable, OSError):
        return False


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def unfinished(folder: Path, step: int) -> Path:
    return folder / f".{name_of(step)}"


def publish(temporary: Path, step: int) -> Path:
    """All files are on the disk: the name says so from now on, also after a loss of power."""
    final = temporary.parent / name_of(step)
    _sync(temporary)
    if final.exists():  # only one that is not whole can be there
        set_aside(final)
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
    """One is removed when so many newer ones are there with all their files."""
    there = 0
    for snapshot in snapshots_in(folder):
        if there >= keep:
            remove(snapshot)
        elif is_there(snapshot):
            there += 1


def remove_replaced(folder: Path) -> None:
    """Damaged ones, and runs before this one: all that a snapshot of this run has come as far as, or further."""
    reached = next((step_of(snapshot) for snapshot in snapshots_in(folder) if is_there(snapshot)), -1)
    for old in damaged_in(folder):
        if step_of(old) <= reached:
            remove(old)
    for run in earlier_runs(folder):
        kept = [*snapshots_in(run), *damaged_in(run)]
        if max(map(step_of, kept), default=0) <= reached:
            _remove_run(run)


def _remove_run(folder: Path) -> None:
    """Its snapshots; and the folder, if nothing of somebody else's is in it."""
    for old in [*damaged_in(folder), *reversed(snapshots_in(folder))]:
        remove(old)
    sweep(folder)
    for mark in (FINISHED, LAUNCH):
        (folder / mark).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def set_aside(snapshot: Path) -> None:
    """A damaged one no longer counts as a snapshot."""
    os.rename(snapshot, _free(snapshot.with_name(f"damaged-{snapshot.name}")))


def damaged_in(folder: Path) -> list[Path]:
    """Those that were set aside."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if _ASIDE.fullmatch(path.name))


def _free(path: Path) -> Path:
    """The path, or the first of `<path>-2`, `<path>-3`, ... that nothing has."""
    others = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(one for one in chain([path], others) if not os.path.lexists(one))


def sweep(folder: Path) -> None:
    """What a killed process left half-written or half-removed: never acknowledged, or replaced."""
    for stale in [*folder.glob(".step-*"), *folder.glob(".gone-*")]:
        shutil.rmtree(stale, ignore_errors=True)


def finish(folder: Path) -> None:
    if folder.is_dir():
        write_atomic(folder / FINISHED, b"")


def is_finished(folder: Path) -> bool:
    return (folder / FINISHED).exists()


def earlier_runs(folder: Path) -> list[Path]:
    """Runs with the same settings that were put aside."""
    name = re.compile(rf"{re.escape(folder.name)}\.earlier(-(\d+))?")
    found = ((name.fullmatch(path.name), path) for path in (folder.parent.iterdir() if folder.parent.is_dir() else ()))
    return [path for _, path in sorted((int(match[2] or 1), path) for match, path in found if match)]


def begin_anew(folder: Path) -> list[Path]:
    """Before a run that must not go on from what lies there, which is put aside: where the runs before are now."""
    if folder.is_dir() and not snapshots_in(folder) and not damaged_in(folder):
        _remove_run(folder)
    if folder.is_dir():
        os.rename(folder, _free(folder.with_name(f"{folder.name}.earlier")))
        _sync(folder.parent)
    return earlier_runs(folder)


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
