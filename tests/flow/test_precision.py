"""Other precisions train as a plain loop in the same precision does; plans for GPUs are made where there are none."""

from __future__ import annotations

import json
import re

import pytest
import torch

from shardwright.stages.command_line import main
from tests.flow import plain_loop
from tests.flow.conftest import Maker
from tests.flow.project import STAGES, TINY, Project, worst_difference

pytestmark = [
    pytest.mark.flow,
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # a CPU without units for bfloat16
]
PLANNING = STAGES[:-1]


@pytest.fixture
def project(make_project: Maker, monkeypatch: pytest.MonkeyPatch, warm_python: None) -> Project:
    project = make_project(tiny=True)
    monkeypatch.chdir(project.root)
    return project


Told = pytest.CaptureFixture[str]


def run_stages(*names: str) -> None:
    """In this process, where torch is imported already."""
    for name in names:
        assert main([name, "-q"]) == 0, name


def plain_losses(project: Project, steps: int, capsys: Told) -> list[float]:
    capsys.readouterr()
    plain_loop.main(project.root, steps)
    return [float(line) for line in capsys.readouterr().out.split()]


@pytest.mark.parametrize("precision", ["amp", pytest.param("bf16", marks=pytest.mark.long)])
def test_two_ranks_train_as_a_plain_loop_does(project: Project, capsys: Told, precision: str) -> None:
    """With one micro-batch and with three: these are the train file's, and only stages that read it run again."""
    for micro_batches, stages in {1: STAGES, 3: STAGES[STAGES.index("solve") :]}.items():
        project.write_yaml("conf/train/tiny.yaml", TINY["train"] | {"gradient_accumulation": micro_batches})
        project.write_yaml("conf/model/tiny.yaml", TINY["model"])
        full = plain_losses(project, TINY["train"]["steps"], capsys)
        project.write_yaml("conf/model/tiny.yaml", TINY["model"] | {"precision": precision})
        run_stages(*stages)
        report = project.load("report")
        assert project.load("profile").precision == precision and report.ranks == 2
        wanted = plain_losses(project, report.steps, capsys)
        assert worst_difference(report.losses, wanted) < 2 * torch.finfo(torch.bfloat16).eps
        assert wanted != full, "the precision changes nothing"


@pytest.mark.long
def test_two_ranks_with_compiled_blocks_train_as_a_plain_loop_does(project: Project, capsys: Told) -> None:
    module = TINY["model"]["module"] | {"layers": 1}
    project.write_yaml("conf/model/tiny.yaml", TINY["model"] | {"module": module, "compile": True})
    run_stages(*STAGES)
    report, plan = project.load("report"), project.load("plan")
    assert report.ranks == 2 and all(region.compiled == 1.0 for region in plan.regions if not region.recompute)
    text = (project.root / "runs/codegen/module.py").read_text()
    assert len(re.findall(r"^\w+_keeps_100 = compiled\(", text, re.M)) >= 3
    assert worst_difference(report.losses, plain_losses(project, report.steps, capsys)) < 1e-5


def test_a_plan_for_gpus_is_made_and_not_trained_without_them(project: Project, capsys: Told) -> None:
    project.write_yaml("conf/cluster/tiny.yaml", TINY["cluster"] | {"device": "cuda"})
    run_stages(*PLANNING)
    assert project.load("profile").device == project.load("plan").device == "cuda"
    assert json.loads((project.root / "runs/solve/summary.json").read_text())["unsplit_step_ms"] > 0
    assert 'torch.device("cuda")' in (project.root / "runs/codegen/module.py").read_text()
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    capsys.readouterr()
    assert main(["train", "-q"]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and told.out == ""
    assert told.err.startswith("error: conf/cluster/tiny.yaml: device: the plan is for GPUs")
    assert "device: cpu" in told.err
    assert not (project.root / "runs/train/report.json").exists()
