"""What several test files need and takes long to make: once in a process, and once for all workers of a test run."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_shared: list[Path] = []  # the folder of this test run, if it has workers


def share_in(folder: Path) -> None:
    """Called by the workers alone: a process that a test starts makes everything by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    _shared[:] = [folder]


def made_once(function: Callable[P, T]) -> Callable[P, T]:
    """A worker that needs what another one is making waits for it."""

    @functools.cache
    def found(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _shared:
            return function(*args, **kwargs)
        given = [getattr(arg, "__qualname__", repr(arg)) for arg in args]
        name = f"{function.__module__}.{function.__qualname__} {given} {sorted(kwargs.items())}"
        file = _shared[0] / hashlib.sha256(name.encode()).hexdigest()
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if file.exists():
                return pickle.loads(file.read_bytes())
            made = function(*args, **kwargs)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(made))
            part.rename(file)
            return made

    return functools.wraps(function)(found)
