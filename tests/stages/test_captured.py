"""CUDA graphs from the plan to the rank, as far as that goes without a GPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.pipeline.base.errors import ConfigError, SolveError, TrainError
from shardwright.pipeline.config import load_config
from shardwright.pipeline.cost.unsplit import card_of
from shardwright.pipeline.ir.cluster import NO_HOST, Cluster
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.rates.kernels import REPLAYED_START, START
from shardwright.pipeline.runtime.compiler import compiled as compiler
from shardwright.pipeline.runtime.step.cuda_graphs import NotCaptured
from shardwright.stages.checkpoint.captured import captured_or_not
from shardwright.stages.codegen.module import write_module
from shardwright.stages.train.engines.planned import PlannedEngine
from tests.plans import graph_of, preset
from tests.programs import plan_for, uniform

PROJECT = Path(__file__).parents[2] / "conf"
WHERE = "conf/model/m.yaml: cuda_graphs"
GRAPH = graph_of("mlp")


def planned(cluster: Cluster, pace: float = 0.5, partitions: int = 1) -> Plan:
    """A step of one second, or of that where the host is not waited for."""
    plan = replace(plan_for(GRAPH, uniform(GRAPH, 1), 1), device=cluster.device)
    seconds = pace if cluster.compute.host == NO_HOST else 1.0
    prediction = replace(plan.prediction, step_seconds=seconds)
    return replace(plan, prediction=prediction, partitions=plan.partitions * partitions)


def on(device: str, devices: int = 1) -> Cluster:
    return replace(preset(devices), device=device)


@pytest.mark.parametrize(
    ("wish", "device", "devices", "pace", "captured"),
    [
        ("auto", "cuda", 1, 0.5, True),
        ("auto", "cuda", 1, 0.99, False),  # it does not pay
        ("auto", "cuda", 2, 0.5, False),
        ("auto", "cpu", 1, 0.5, False),
        (False, "cuda", 1, 0.5, False),
        (True, "cuda", 1, 0.99, True),
        (True, "cuda", 2, 0.5, True),
    ],
)
def test_what_is_captured(wish: bool | str, device: str, devices: int, pace: float, captured: bool) -> None:
    found = captured_or_not(lambda cluster: planned(cluster, pace), on(device, devices), wish, WHERE)
    assert found.cuda_graphs == captured and found.prediction.step_seconds == (pace if captured else 1.0)


def test_compiled_blocks_are_captured_whatever_it_gains() -> None:
    def compiled(cluster: Cluster) -> Plan:
        plan = planned(cluster, pace=1.0)
        own = plan.partitions[0]
        regions = tuple(replace(region, compiled=1.0) for region in own.regions)
        return replace(plan, partitions=(replace(own, regions=regions),))

    assert captured_or_not(compiled, on("cuda"), "auto", WHERE).cuda_graphs
    assert not captured_or_not(compiled, on("cuda", 2), "auto", WHERE).cuda_graphs
    assert not captured_or_not(compiled, on("cuda"), False, WHERE).cuda_graphs


@pytest.mark.parametrize(("captures", "calls"), [("CUDA_GRAPHS = True", "python"), ("", "c++")])
def test_a_replay_makes_no_calls_so_they_stay_in_python(monkeypatch, captures: str, calls: str) -> None:
    made: list[str] = []

    class Block:
        stateful = False

        def __init__(self, function, keeps, calls, cheapest, after_relu) -> None:
            made.append(calls)

        def compiled(self, again: bool, masked: bool) -> str:
            return "compiled"

    monkeypatch.setattr(compiler, "_Block", Block)
    program: dict = {}
    exec(f"{captures}\ndef block(x):\n    return x", program)
    assert compiler.compiled(program["block"], keeps=1.0) == "compiled" and made == [calls]
    compiler.compiled(program["block"], 1.0, "python")
    assert made[1:] == ["python"]


def test_a_replayed_kernel_follows_sooner() -> None:
    compute = on("cuda").compute
    assert card_of(replace(compute, host=NO_HOST)).start == REPLAYED_START < START == card_of(compute).start


def test_what_cannot_be_captured() -> None:
    pipeline = captured_or_not(lambda cluster: planned(cluster, partitions=2), on("cuda"), "auto", WHERE)
    assert not pipeline.cuda_graphs and pipeline.prediction.step_seconds == 1.0
    for device, partitions, told in (("cuda", 2, "pipeline"), ("cpu", 1, "CPUs")):
        with pytest.raises(SolveError, match=rf"{WHERE}: the step cannot be captured .*{told}.*; use auto"):
            captured_or_not(lambda cluster, n=partitions: planned(cluster, partitions=n), on(device), True, WHERE)


def test_the_program_says_it() -> None:
    plan = planned(on("cuda"))
    for captured in (False, True):
        text = write_module(GRAPH, replace(plan, cuda_graphs=captured))
        assert ("\nCUDA_GRAPHS = True  #" in text) == captured


@pytest.mark.parametrize(("given", "known"), [("true", True), ("false", False), ("auto", "auto"), ("1", None)])
def test_the_setting(given: str, known: bool | str | None, tmp_path: Path) -> None:
    project = Path(shutil.copytree(PROJECT, tmp_path / "conf")).parent
    path = project / "conf/model/gpt_small.yaml"
    path.write_text(path.read_text() + f"cuda_graphs: {given}\n")
    if known is None:
        with pytest.raises(ConfigError, match="cuda_graphs: got 1, expected true, false or auto"):
            load_config(project)
    else:
        assert load_config(project).model.cuda_graphs == known


class Refused:
    """A step whose second run cannot be captured."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batches: list) -> list[float]:
        self.calls += 1
        if self.calls > 1:
            raise NotCaptured("it reads what it computes")
        return [1.0]


@pytest.mark.parametrize("wish", ["auto", True])
def test_a_step_that_cannot_be_captured(wish: bool | str) -> None:
    engine = PlannedEngine.__new__(PlannedEngine)
    engine.job = {"model": {"cuda_graphs": wish}, "where": {"model": "conf/model/m.yaml"}}
    engine.graphed, engine.not_captured = Refused(), ""  # type: ignore[assignment]
    engine._run_passes = lambda batches: list(batches)  # type: ignore[assignment,method-assign]
    assert engine._losses(iter([2.0])) == [1.0]  # type: ignore[arg-type, comparison-overlap, list-item]
    if wish is True:
        with pytest.raises(TrainError, match=r"m\.yaml: cuda_graphs: the step .* it reads what it computes; set it to"):
            engine._losses(iter([2.0]))  # type: ignore[arg-type, list-item]
        return
    for _ in range(2):
        assert engine._losses(iter([2.0])) == [2.0]  # type: ignore[arg-type, comparison-overlap, list-item]
    assert engine.not_captured == "it reads what it computes" and engine.graphed is None
