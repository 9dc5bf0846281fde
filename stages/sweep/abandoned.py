"""What DVC still takes for running of a sweep that is not: an experiment that was interrupted, or killed.

DVC notes of each experiment in a copy of the project where that copy is and how far it has come, and corrects the note
when it ends. A sweep that ends otherwise does it here; one that was killed leaves it to the next. Its lock, which the
`dvc` that it started holds too, tells whether it is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.base.files import write_atomic

COPIES = Path(".dvc/tmp/exps/standalone")  # of the project, with DVC's notes in `run`
ENDED, CANCELED = 4, 5  # of DVC's states: from the first on it takes an experiment for ended
LOCK = ".lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[int]:
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
            told = json.loads(note.read_bytes())
            name, copy, state = str(told["name"]), Path(told["root_dir"]), int(told["status"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if state < ENDED and is_gone(name):
            write_atomic(note, json.dumps({**told, "status": CANCELED}).encode())
            if copy.resolve().parent == (root / COPIES).resolve():
                shutil.rmtree(copy, ignore_errors=True)
            found.append(name)
    return found


def forget_killed(root: Path, sweeps: Path) -> list[str]:
    """Those of sweeps in this folder whose processes are gone."""
    return forget(root, lambda name: _is_gone(sweeps / name.rpartition("-")[0], sweeps))


def _is_gone(folder: Path, sweeps: Path) -> bool:
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
