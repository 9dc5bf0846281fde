"""`sw.plan` and what a plan says: of live objects, in memory, with mistakes told by the name of the argument."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.pipeline.base.errors import BudgetError
from tests.api.small import BATCH, Classifier, planned


@pytest.fixture(scope="module")
def plan() -> sw.ModelPlan:
    return planned(optimizer=torch.optim.AdamW, memory_gb=0.5)


def test_importing_is_light_and_planning_leaves_nothing(tmp_path: Path) -> None:
    """Not even in a folder that has packages of our names."""
    (tmp_path / "pipeline.py").write_text("raise SystemExit('the pipeline of the user was imported')\n")
    code = f"""
import sys
import shardwright as sw
assert not {{"torch", "dvc", "mlflow", "omegaconf"}} & set(sys.modules)
assert "plan" in dir(sw) and sw.__version__
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.api.small import planned
planned(frontier_points=1)
assert not {{"dvc", "mlflow"}} & set(sys.modules)
"""
    subprocess.run((sys.executable, "-c", code), cwd=tmp_path, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline.py"]


def test_there_is_nothing_else() -> None:
    with pytest.raises(AttributeError, match="plam"):
        sw.plam  # noqa: B018


def test_a_plan_is_a_table_a_page_and_a_program(plan: sw.ModelPlan, tmp_path: Path) -> None:
    text = repr(plan)
    assert text.startswith("Classifier on preset_cpu, 2 devices") and "0.5 GB on a device" in text
    assert f"{plan.prediction.step_seconds * 1e3:.3f} ms" in text and plan.ranks == 2
    assert "up.weight" in plan.explain("up.weight") and "a step takes" in plan.explain()
    assert "def forward" in plan.program and repr(plan.program) == plan.program
    plan.report(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "Classifier on preset_cpu" in page
    assert plan._repr_html_().startswith("<iframe") and "Classifier on preset_cpu" in plan._repr_html_()


def test_a_saved_plan_is_the_same_plan(plan: sw.ModelPlan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    found = sw.load(file)
    assert repr(found) == repr(plan) and found.program == plan.program and found.digest == plan.digest
    assert found.explain("up.weight") == plan.explain("up.weight")
    assert found.config.plain("solve") == plan.config.plain("solve")


def test_a_file_that_is_no_plan_or_was_edited_is_refused(plan: sw.ModelPlan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with pytest.raises(sw.ShardwrightError, match="cannot be read"):
        sw.load(file)
    plan.save(file)
    whole = file.read_text()
    edited = json.loads(whole)
    edited["made"]["module"] += "\nprint('mine')\n"
    for text, why in (
        (whole[:-20], "not whole JSON"),
        ("{}", "not a saved plan"),
        (whole.replace('"version": 1', '"version": 2', 1), "version 2"),
        (json.dumps(edited), "edited or damaged"),
    ):
        file.write_text(text)
        with pytest.raises(sw.ShardwrightError, match=why) as refused:
            sw.load(file)
        assert str(file) in refused.value.line()


def test_the_model_may_be_on_meta_and_its_weights_are_not_touched() -> None:
    with torch.device("meta"):
        there = Classifier()
    given = Classifier()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in given.named_parameters()}
    programs = {planned(model, frontier_points=1, precision="bf16").program for model in (there, given)}
    assert len(programs) == 1
    for name, p in given.named_parameters():
        assert p.data_ptr() == before[name][0] and torch.equal(p, before[name][1]) and p.dtype == torch.float32


def test_an_optimizer_is_an_instance_a_class_or_a_function() -> None:
    model = Classifier()
    scheduled = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    ways = (scheduled, torch.optim.AdamW, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    copies = [planned(model, optimizer=one, frontier_points=1).frontier.optimizer_copies for one in ways]
    assert copies == [1.0, 2.0, 0.0]
    assert not scheduled.state and scheduled.param_groups[0]["params"][0] is next(model.parameters())


def test_a_batch_is_given_by_name_or_by_position() -> None:
    by_name = planned(batch={"y": BATCH["y"], "x": BATCH["x"]}, frontier_points=1)
    by_place = planned(batch=(BATCH["x"], BATCH["y"]), frontier_points=1)
    assert by_name.program == by_place.program and list(by_name.config.model.batch) == ["x", "y"]


def test_constraints_and_choices_are_kept_to(plan: sw.ModelPlan) -> None:
    found = planned(constraints={"up.weight": "S(0) on d0", "down.weight": "zero3"}, mesh={"d0": 2}, recompute="full")
    storage = found.decided.sharding.storage
    assert str(storage["up.weight"]) == "S(0)" and str(storage["down.weight"]).startswith("S")
    assert any(region.recompute for part in found.decided.partitions for region in part.regions)
    assert planned(only="data", gradient_accumulation=2, frontier_points=1).decided.micro_batches == 2


@pytest.mark.parametrize(
    ("wrong", "named", "why"),
    [
        ({"model": "gpt"}, "sw.plan: model", "expected a torch.nn.Module"),
        ({"batch": {}}, "sw.plan: batch", "expected tensors"),
        ({"batch": {**BATCH, "x": 3}}, "sw.plan: batch", "'x' is a int"),
        ({"batch": {**BATCH, "x": BATCH["x"].to(torch.uint8)}}, "sw.plan: batch", "uint8"),
        ({"batch": {"x": BATCH["x"]}}, "sw.plan: ", "cannot be exported"),
        ({"cluster": "dgx_h10"}, "sw.plan: cluster", "did you mean 'dgx_h100'"),
        ({"cluster": {"source": "preset"}}, "sw.plan: device", "mandatory"),
        ({"cluster": "mine.yaml"}, "sw.plan: cluster", "cannot be read"),
        ({"memory_gb": -1}, "sw.plan: memory_gb", "> 0"),
        ({"memory_gb": 1e5}, "sw.plan: ", "memory_gb is 100000"),
        ({"optimizer": 3}, "sw.plan: optimizer", "got a int"),
        ({"optimizer": torch.optim.LBFGS}, "sw.plan: optimizer", "closure"),
        ({"constraints": {"upp.weight": "R"}}, "sw.plan: constraints.upp.weight", "up.weight"),
        ({"recompute": "some"}, "sw.plan: recompute", "expected one of"),
        ({"recomputes": "off"}, "sw.plan: recomputes", "did you mean 'recompute'"),
        ({"partitions": 2}, "sw.plan: partitions", "pipeline"),
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, object], named: str, why: str) -> None:
    with pytest.raises(sw.ShardwrightError) as refused:
        planned(**{"frontier_points": 1, **wrong})
    assert refused.value.line().startswith(named) and why in refused.value.line()


def test_a_budget_that_nothing_fits_is_refused_with_the_least_that_does() -> None:
    with pytest.raises(BudgetError, match=r"sw\.plan: memory_gb"):
        planned(memory_gb=1e-6)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.lines = (line for line in ())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).sum()


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(sw.ShardwrightError, match=r"sw\.plan: model: its structure cannot be copied"):
        planned(Odd(), {"x": torch.randn(4, 8)})


def test_a_profile_needs_no_device() -> None:
    found = sw.profile(Classifier(), BATCH, device="cuda")
    assert {op.name for op in found.graph.ops} == set(found.profile.ops)
    assert "Classifier, unsplit, fp32 on cuda" in repr(found) and "unsplit_peak_mb" in repr(found)
    assert found._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(sw.ShardwrightError, match=r"sw\.profile: device"):
        sw.profile(Classifier(), BATCH, device="tpu")  # type: ignore[arg-type]
