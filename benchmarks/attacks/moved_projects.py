"""Projects that were copied, moved or renamed after a run: the next run is theirs alone, and old artifacts are found.

Without a line of their own, MLflow would write into the original: its store keeps absolute locations.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch
from urllib.parse import unquote, urlsplit

from benchmarks.attacks.outcome import TRACEBACK, Outcome
from benchmarks.small_project import SOURCE, environment

STAGE = "cluster"  # of a preset: the shortest
Move = Callable[[Path, Path], Path]  # the project, and a folder for what comes of it; where it is then
Ended = subprocess.CompletedProcess[str]


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    first = folder / "first"
    shutil.copytree(SOURCE / "conf", first / "conf")
    config = first / "conf/config.yaml"
    text = config.read_text().replace("cluster: local_cpu", "cluster: preset_cpu")
    config.write_text(text.replace("code: pipeline/models", "code: conf"))
    started = _stage(first, "before", sample)
    if started.returncode:
        raise RuntimeError(started.stderr)
    for name in list(MOVES)[: 2 if sample else None]:
        yield _attack(name, first, folder / name, sample)


def _attack(name: str, first: Path, folder: Path, sample: bool) -> Outcome:
    """On a project of its own, which is `first` moved to where the attack begins: its store knows another folder."""
    project = folder / "project"
    shutil.copytree(first, project)
    _stage(project, "original", sample)
    there = MOVES[name](project, folder)
    left = _content(project) if project.exists() and project.resolve() != there.resolve() else {}
    ended = _stage(there, "after", sample)
    said = ended.stdout + ended.stderr
    if ended.returncode or "tracking:" in said or TRACEBACK in said:
        return Outcome(name, False, said[-400:], TRACEBACK in said)
    if left and _content(project) != left:
        return Outcome(name, False, "the original was written to", lost=True)
    astray = [place for place in _locations(there) if not _lies_in(there, place)]
    return Outcome(name, not astray, f"not found here: {astray}" if astray else "", lost=bool(astray))


def _stage(root: Path, execution: str, in_process: bool) -> Ended:
    """`shardwright cluster`, as an execution of its own."""
    known = {**environment(root), "SHARDWRIGHT_EXECUTION": f"{root.name}-{execution}"}
    command = [sys.executable, "-m", "stages", STAGE]
    if not in_process:
        return subprocess.run(command, cwd=root, env=known, capture_output=True, text=True)
    from shardwright.stages.command_line import main

    said = io.StringIO()
    with contextlib.chdir(root), patch.dict(os.environ, known), contextlib.redirect_stderr(said):
        return subprocess.CompletedProcess(command, main([STAGE]), "", said.getvalue())


def _locations(root: Path) -> list[Path]:
    """Of all runs' artifacts, as the store says it."""
    with contextlib.closing(sqlite3.connect(root / "runs/mlflow.db")) as database:
        found = database.execute("SELECT artifact_uri FROM runs").fetchall()
    return [Path(unquote(urlsplit(text).path)) for (text,) in found]


def _lies_in(root: Path, place: Path) -> bool:
    return place.resolve().is_relative_to(root.resolve()) and any(path.is_file() for path in place.rglob("*"))


def _content(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent.name != "tmp")
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---- what becomes of the project


def _copied(project: Path, folder: Path) -> Path:
    return Path(shutil.copytree(project, folder / "copy"))


def _moved(project: Path, folder: Path) -> Path:
    return project.rename(folder / "moved")


def _read_only(project: Path, folder: Path) -> Path:
    copy = _copied(project, folder)
    for path in (project, *project.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return copy


def _renamed(project: Path, folder: Path) -> Path:
    return project.rename(folder / "a näme, 100% #new?")


def _replaced(project: Path, folder: Path) -> Path:
    """Moved, and another project is where it was."""
    there = _moved(project, folder)
    shutil.copytree(there, project)
    shutil.rmtree(project / "runs/mlartifacts")
    return there


def _deleted(project: Path, folder: Path) -> Path:
    copy = _copied(project, folder)
    shutil.rmtree(project)
    return copy


def _twice(project: Path, folder: Path) -> Path:
    return Path(shutil.copytree(_copied(project, folder), folder / "copy of the copy"))


def _store_gone(project: Path, folder: Path) -> Path:
    """The original has its artifacts still, and no store any more."""
    copy = _copied(project, folder)
    (project / "runs/mlflow.db").unlink()
    return copy


def _by_a_link(project: Path, folder: Path) -> Path:
    there = _moved(project, folder)
    (folder / "link").symlink_to(there)
    return folder / "link"


def _above_moved(project: Path, folder: Path) -> Path:
    deep = folder / "above"
    deep.mkdir()
    project.rename(deep / "project")
    return deep.rename(folder / "above, moved") / "project"


MOVES: dict[str, Move] = {
    "copied": _copied,
    "moved": _moved,
    "copied, original read-only": _read_only,
    "renamed": _renamed,
    "moved, another in its place": _replaced,
    "copied, original deleted": _deleted,
    "copied twice": _twice,
    "copied, original without its store": _store_gone,
    "moved, reached by a link": _by_a_link,
    "folder above moved": _above_moved,
}
