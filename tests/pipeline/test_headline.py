"""What a tracked run is called, and by what it is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.config import Config, TrainEngine, load_config
from shardwright.pipeline.ir.plan import Prediction, Sharding
from shardwright.pipeline.tracking.headline import headlines, mesh_text, numbered, run_name, run_tags
from tests.unpipelined import whole_plan

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(PROJECT)


@pytest.fixture(scope="module")
def plan() -> artifacts.Artifact:
    axes, nothing = (("d0", 2),), Sharding({}, {}, {})
    body = whole_plan(axes, "cpu", 20_000_000, nothing, (), Prediction(0.01, 10, 5, 0.01, 0.0, 0.0, 0.0))
    return artifacts.make("plan", body, (), {})


def with_axes(plan, *axes, chunks=1):
    """A pipeline with a partition for each of these meshes."""
    partitions = tuple(replace(plan.partitions[0], axes=own) for own in axes)
    return replace(plan, partitions=partitions, chunks=chunks)


def test_the_name_grows_with_what_is_known(config, plan):
    assert run_name(config, None) == "gpt_small on local_cpu"
    assert run_name(config, plan) == "gpt_small on local_cpu, d0=2, 0.02 GB"
    named = replace(config, root=replace(config.root, tracking=replace(config.tracking, run_name="mine")))
    assert run_name(named, plan) == run_name(named, None) == "mine"


def test_a_baseline_has_no_mesh_of_a_plan_in_its_name(config, plan):
    ddp = replace(config, train=replace(config.train, engine=TrainEngine.ddp))
    assert run_name(ddp, plan) == "gpt_small on local_cpu with ddp"
    assert run_tags(ddp, plan)["engine"] == "ddp"


def test_tags(config, plan):
    first = {"model": "gpt_small", "cluster": "local_cpu", "engine": "planned"}
    assert run_tags(config, None) == first
    short = plan.digest.removeprefix("sha256:")[:12]
    assert run_tags(config, plan) == first | {"mesh": "d0=2", "budget_gb": "0.02", "plan": short}


def test_meshes(plan):
    small, large = (("d0", 2),), (("d0", 2), ("d1", 4))
    assert mesh_text(with_axes(plan.body, large)) == "d0=2 x d1=4"
    assert mesh_text(with_axes(plan.body, small, small)) == "pp=2 x d0=2"
    assert mesh_text(with_axes(plan.body, small, small, small, small, chunks=2)) == "pp=2 x d0=2"
    assert mesh_text(with_axes(plan.body, small, large)) == "pp=2 of d0=2, d0=2 x d1=4"
    assert mesh_text(with_axes(plan.body, ())) == "1 device"


def test_a_stage_tells_what_it_found():
    found = {"median_step_ms": 12.0, "final_loss": 3.0, "ranks": 2}
    assert headlines("train", found) == {"step_ms": 12.0, "final_loss": 3.0}
    assert numbered("train", found) == {"1_step_ms": 12.0, "8_final_loss": 3.0}
    assert headlines("solve", found) == {}
