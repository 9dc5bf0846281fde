"""An optimizer that cannot be used, through the command line: each stage that builds it says so in one line."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.flow.conftest import Maker
from tests.flow.project import STAGES, TINY, Project

pytestmark = pytest.mark.flow
CONF, CODE = "conf/train/tiny.yaml", "pipeline/models/own_optimizer.py"
SOURCE = "import torch\n\n\ndef make(parameters):\n    return torch.optim.{}\n"


@pytest.fixture(scope="module")
def project(make_project: Maker) -> Project:
    """Everything but train has been run, with an optimizer of the user's own."""
    own = {"optimizer": {"_target_": "shardwright.pipeline.models.own_optimizer.make"}}
    project = make_project(tiny=True, train=own)
    (project.root / CODE).write_text(SOURCE.format("SGD(parameters, lr=0.1)"))
    for stage in STAGES[:-1]:
        project.stages(stage).ok()
    return project


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        ({"_target_": "torch.nn.ParameterList"}, "optimizer._target_: torch.nn.ParameterList gives a ParameterList"),
        ({"_target_": "torch.optim.LBFGS"}, "optimizer._target_: the step of torch.optim.LBFGS needs a closure"),
        ({"_target_": "torch.optim.SGD", "rate": 1}, "optimizer.rate: torch.optim.SGD takes no such argument"),
    ],
    ids=["no optimizer", "closure", "arguments"],
)
def test_profile_is_the_first_to_see_it(project: Project, optimizer: dict[str, Any], told: str) -> None:
    before = project.snapshot()
    with project.with_file(CONF, yaml.safe_dump(TINY["train"] | {"optimizer": optimizer}).encode()):
        line = project.stages("profile").refused()
    assert f"error: {CONF}: {told}" in line and "; " in line
    assert project.snapshot() == before


@pytest.mark.parametrize(
    ("made", "told"),
    [("Adam", "gives a type, which is no torch.optim.Optimizer"), ("LBFGS(parameters)", "needs a closure")],
    ids=["no optimizer", "closure"],
)
def test_train_sees_what_the_users_code_has_become(project: Project, made: str, told: str) -> None:
    before = project.snapshot()
    with project.with_file(CODE, SOURCE.format(made).encode()):
        line = project.stages("train").refused()
    assert f"{CONF}: optimizer._target_: " in line and told in line
    assert project.snapshot() == before
