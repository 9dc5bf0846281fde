"""`sw.verify` and `sw.price`: what the commands answer, for objects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright.pipeline.base import artifacts
from tests.api.small import BATCH, Classifier, planned


def test_a_program_is_the_model_also_where_the_plan_was_loaded(warm_python: None, tmp_path: Path) -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = planned(model, optimizer=optimizer, constraints={"up.weight": "S(0)"}, frontier_points=1)
    plan.save(tmp_path / "plan.json")
    loaded = sw.load(tmp_path / "plan.json")

    class Local(Classifier):  # that no process can import
        pass

    found = sw.verify(loaded, Local(), BATCH, optimizer=lambda own: torch.optim.SGD(own, lr=0.1), steps=1)
    assert found and found.equal and "equal: loss, 6 gradients" in repr(found)


def test_an_edited_program_is_not_the_model(warm_python: None) -> None:
    plan = planned(constraints={"up.weight": "R"}, frontier_points=1)
    text = plan.program.replace("F.relu(", "torch.neg(", 1)
    assert text != plan.program
    edited = replace(plan.made["module"], body=text)
    made = artifacts.make("module", edited.body, [plan.made["graph"], plan.made["plan"]], {})
    found = sw.verify(replace(plan, made={**plan.made, "module": made}), steps=1)
    assert not found and "not equal" in repr(found) and "up" in repr(found)


def test_what_verify_lacks_is_named(tmp_path: Path) -> None:
    plan = planned(frontier_points=1)
    plan.save(tmp_path / "plan.json")
    loaded = sw.load(tmp_path / "plan.json")
    with torch.device("meta"):
        there = Classifier()
    for call, named in (
        (lambda: sw.verify(loaded), r"sw\.verify: model: the plan was loaded"),
        (lambda: sw.verify(loaded, Classifier()), r"sw\.verify: batch: the plan was loaded"),
        (lambda: sw.verify(loaded, there, BATCH), r"sw\.verify: model: its weights are on the meta device"),
        (lambda: sw.verify(plan, batch={**BATCH, "x": BATCH["x"][:4]}), r"sw\.verify: batch: .*give x \[8, 16\]"),
        (lambda: sw.verify(plan, Unsent()), r"sw\.verify: model: it cannot be sent"),
    ):
        with pytest.raises(sw.ShardwrightError, match=named):
            call()


class Unsent(Classifier):
    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("never")


def test_layouts_are_priced() -> None:
    found = sw.price(model="llama2_7b", cluster="dgx_h100", dp=[1, 2], tp=4, batch=8)
    assert len(found.rows) == 2 and "MFU" in repr(found) and "dgx_h100" in repr(found)
    with pytest.raises(sw.ShardwrightError, match="dpp"):
        sw.price(model="llama2_7b", dpp=3)
