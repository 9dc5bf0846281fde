"""One point as a DVC experiment: run in a copy of the project that DVC makes, from its cache as far as that goes.

DVC notes of each experiment where its copy of the project is and how far it has come, and corrects the note when the
experiment ends. A sweep that ends otherwise does it here (`forget`); one that was killed leaves it to the next. Its
lock, which the `dvc` that it started has too, tells whether it is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.base.revision import files_of
from shardwright.pipeline.config import overrides

END_S = 20.0  # that it has to end after it was told to
PLAIN = re.compile(r"[\w.+/-]+")
COPIES = Path(".dvc/tmp/exps/standalone")  # of the project, with DVC's notes in `run`
ENDED, CANCELED = 4, 5  # of DVC's states: from the first on it takes an experiment for ended
LOCK = ".lock"


class SweepError(ShardwrightError):
    """A sweep that cannot be."""


def check_repository(root: Path) -> None:
    found = subprocess.run(["git", "rev-parse", "--verify", "-q", "HEAD"], cwd=root, capture_output=True)
    if found.returncode:
        raise SweepError("DVC keeps experiments in git, and there is no commit here", remedy="`git init`, then commit")


def experiment_flags(root: Path, settings: Sequence[str], code: str) -> list[str]:
    """Of `dvc exp run`: the settings, and files of conf/ and of the model's source that git does not have yet, which
    DVC's copy lacks."""
    folders = ["conf", *([code] if (root / code).resolve().is_relative_to(root.resolve()) else [])]
    listed = ["git", "ls-files", "-z", "--others", "--exclude-standard", "--", *folders]
    untracked = subprocess.run(listed, cwd=root, capture_output=True, text=True).stdout.split("\0")
    changes = [flag for change in overrides(root, settings) for flag in ("-S", _override(*change))]
    return changes + [flag for path in untracked if path for flag in ("--copy-paths", path)]


def run_point(
    root: Path, name: str, flags: Sequence[str], until: str, environ: Mapping[str, str], report: Path, lock: int
) -> str:
    """Why the experiment failed; empty where it did not. All that it said goes to the file `report`.

    The lock tells others that it runs, also where this process died.
    """
    command = [sys.executable, "-m", "dvc", "exp", "run", "--temp", "--name", name, *flags, until]
    report.parent.mkdir(parents=True, exist_ok=True)
    with report.open("w") as file:
        dvc = subprocess.Popen(
            command, cwd=root, env=dict(environ), stdout=file, stderr=subprocess.STDOUT, pass_fds=(lock,),
            process_group=0,
        )  # fmt: skip
    try:
        status = dvc.wait()
    except BaseException:
        _end(dvc)
        raise
    finally:
        forget(root, lambda other: other == name)
    return _reason(report.read_text()) if status else ""


def _end(dvc: subprocess.Popen[bytes]) -> None:
    """With its stage, as Ctrl-C would: DVC removes its copy of the project then."""
    for sign, patience_s in ((signal.SIGINT, END_S), (signal.SIGTERM, END_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(dvc.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            dvc.wait(patience_s)
            return


def _override(file: str, key: str, value: Any) -> str:
    """As Hydra reads it, which DVC asks; `++` also adds a key that the file leaves to its default."""
    return f"{file}:++{key}={_hydra(value)}"


def _hydra(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_hydra(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)


def _reason(said: str) -> str:
    """A stage's own line, or else DVC's last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    own, dvc = ([line.removeprefix(p) for line in lines if line.startswith(p)] for p in ("error: ", "ERROR: "))
    return (own or dvc or lines or ["it said nothing"])[-1]


def metrics_of(root: Path, experiment: str, stages: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The summary of each of these stages in an experiment that ended well."""
    with files_of(root, experiment) as files:
        return {stage: json.loads(files.read_text(f"runs/{stage}/summary.json")) for stage in stages}


# ---- experiments that DVC takes for running and that are not


@contextlib.contextmanager
def sweep_lock(folder: Path) -> Iterator[int]:
    """The lock of the sweep with this folder, for its process and for those that are given it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def forget(root: Path, is_gone: Callable[[str], bool]) -> list[str]:
    """Experiments by name that DVC takes for running and are gone: noted as canceled, and their copies removed."""
    found = []
    for note in sorted((root / COPIES / "run").glob("*/*.run")):
        try:
            noted = json.loads(note.read_bytes())
            name, copy, state = str(noted["name"]), Path(noted["root_dir"]), int(noted["status"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if state < ENDED and is_gone(name):
            write_atomic(note, json.dumps({**noted, "status": CANCELED}).encode())
            if copy.resolve().parent == (root / COPIES).resolve():
                shutil.rmtree(copy, ignore_errors=True)
            found.append(name)
    return found


def forget_killed(root: Path, sweeps: Path) -> list[str]:
    """Those of sweeps in this folder whose processes are gone."""

    def is_gone(name: str) -> bool:
        folder = sweeps / name.rpartition("-")[0]
        if folder.parent != sweeps or not folder.is_dir():
            return False
        try:
            with (folder / LOCK).open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:  # of a version that took none
            return True
        except OSError:
            return False
        return True

    return forget(root, is_gone)
