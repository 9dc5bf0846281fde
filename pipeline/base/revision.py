"""The project as it was in a git revision, or is in a DVC experiment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def files_of(root: Path, revision: str) -> Iterator[Any]:
    """A file system of what git has, and DVC in its cache, by paths as in the project.

    Asked by its address, DVC has them by paths from git's root, of which the project may be a folder.
    """
    from dvc.repo import Repo  # two seconds

    with Repo(str(root)) as project, project.switch(revision):
        yield project.dvcfs
