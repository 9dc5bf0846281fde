"""Projects for the tests of this folder; whatever they leave running is ended."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator

import pytest

from tests.flow.project import Project

Maker = Callable[..., Project]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The very small project after `dvc repro`: run once for all workers, for copies."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "finished"
    folder.mkdir(exist_ok=True)
    project, done = Project(folder / "project"), folder / "done"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            Project.tiny(project.root).repro().ok()
            done.touch()
    return project


@pytest.fixture(scope="module")
def make_project(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Maker]:
    """`make_project()`: a copy as it is; `make_project(tiny=True, ...)`: one with a very small configuration.

    `make_project(finished=True)`: that one after `dvc repro`.
    """
    made: list[Project] = []

    def make(*, tiny: bool = False, finished: bool = False, **changes: object) -> Project:
        root = tmp_path_factory.mktemp("flow") / "project"
        if finished:
            made.append(request.getfixturevalue("finished").twin(root))
        else:
            made.append(Project.tiny(root, **changes) if tiny else Project.copy(root))
        return made[-1]

    yield make
    for project in made:
        project.end_all()
