"""On any number of devices a small model trains as the plain loop does."""

from __future__ import annotations

import pytest

from tests.flow.conftest import Maker
from tests.flow.project import STAGES, TINY, Project, check_against_plain

pytestmark = pytest.mark.flow


@pytest.fixture(scope="module")
def project(make_project: Maker) -> Project:
    """What does not depend on the devices has been run."""
    project = make_project(tiny=True)
    for stage in STAGES[:2]:
        project.stages(stage).ok()
    return project


@pytest.mark.parametrize("devices", [1, pytest.param(6, marks=pytest.mark.long)])
def test_any_number_of_devices(project: Project, devices: int) -> None:
    project.write_yaml("conf/cluster/tiny.yaml", TINY["cluster"] | {"devices": devices})
    for stage in STAGES[2:]:
        project.stages(stage).ok()
    check_against_plain(project, devices, 1e-5)
