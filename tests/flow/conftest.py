"""Projects for the tests of this folder; whatever they leave running is ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.flow.project import Project

Maker = Callable[..., Project]


@pytest.fixture(scope="module")
def make_project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Maker]:
    """`make_project()`: a copy as it is; `make_project(tiny=True, ...)`: one with a very small configuration."""
    made: list[Project] = []

    def make(*, tiny: bool = False, **changes: object) -> Project:
        root = tmp_path_factory.mktemp("flow") / "project"
        made.append(Project.tiny(root, **changes) if tiny else Project.copy(root))
        return made[-1]

    yield make
    for project in made:
        project.end_all()
