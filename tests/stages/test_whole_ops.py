"""An op that runs whole on every rank for lack of a rule is named wherever a user looks, with its part of the step."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.stage import Inputs, Result
from shardwright.pipeline.config import load_config
from shardwright.pipeline.cost.whole_ops import lacks_rule, whole_ops_of
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.ops.table import forget, register
from shardwright.stages import summary
from shardwright.stages.checkpoint import run as checkpoint
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.report.facts import facts_of
from shardwright.stages.report.page import page_of
from shardwright.stages.report.priced import Sources
from shardwright.stages.solve import run as solve
from shardwright.stages.solve.explain.priced_run import planned
from shardwright.stages.solve.explain.text import whole_text
from shardwright.stages.solve.explain.whole import explain_whole
from tests.graphs import SILENT, preset, trace
from tests.report_sources import measured_of

PROJECT = Path(__file__).parents[2]
OP = "shardwright_whole.spread.default"


@torch.library.custom_op("shardwright_whole::spread", mutates_args=())
def spread(x: Tensor) -> Tensor:
    return x / x.abs().sum()


@spread.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _back(ctx, gradient):  # type: ignore[no-untyped-def]
    x, total = ctx.saved_tensors[0], ctx.saved_tensors[0].abs().sum()
    return gradient / total - (gradient * x).sum() * x.sign() / total**2


spread.register_autograd(_back, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(spread(self.down(spread(self.up(x)))), x)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return trace(Net(), {"x": torch.randn(8, 12)})


@pytest.fixture(scope="module")
def inputs(graph: OpGraph, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    bodies = {"graph": graph, "profile": profile_graph(graph), "cluster": preset()}
    made = {kind: artifacts.make(kind, body, [], {}) for kind, body in bodies.items()}
    return Inputs(tmp_path_factory.mktemp("whole"), made, SILENT, None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def solved(inputs: Inputs) -> tuple[Result, str]:
    """And what its log said."""
    said: list[str] = []
    log = logging.getLogger("tests.whole_ops")
    log.propagate = False
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    log.addHandler(handler)
    result = solve.run(replace(inputs, log=log), load_config(PROJECT))
    return result, "\n".join(said)


@pytest.fixture(scope="module")
def planned_by(inputs: Inputs, solved: tuple[Result, str]) -> tuple[Inputs, Result]:
    frontier = artifacts.make("frontier", solved[0].body, inputs.artifacts.values(), {})
    given = replace(inputs, artifacts={**inputs.artifacts, "frontier": frontier})
    return given, checkpoint.run(given, load_config(PROJECT))


def test_solve_and_checkpoint_name_it_with_its_share(
    graph: OpGraph, solved: tuple[Result, str], planned_by: tuple[Inputs, Result]
) -> None:
    (warning,) = (line for line in solved[1].splitlines() if line.startswith("WARNING"))
    assert f"{OP} x 2 (" in warning and "of the step" in warning and "shardwright docs how-to-add-an-op" in warning
    plan: Plan = planned_by[1].body
    (one,) = whole_ops_of(plan, graph, profile_graph(graph), preset())
    assert (one.target, one.count) == (OP, 2)
    assert 0 < one.share < 1 and one.share == pytest.approx(one.seconds / plan.prediction.step_seconds)
    for result in (solved[0], planned_by[1]):  # MLflow has figures as metrics, and those that are text as tags
        assert result.figures["whole_ops"] == str(one)
        assert result.figures["whole_ops_share"] == pytest.approx(one.share, abs=1e-4)


def test_explanation_page_and_summary_have_it(
    planned_by: tuple[Inputs, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, result = planned_by
    plan: Plan = result.body
    found = {**inputs.artifacts, "plan": artifacts.make("plan", plan, inputs.artifacts.values(), {})}
    whole = explain_whole(planned(found))
    assert [(cost.what, cost.count) for cost in whole.whole_ops] == [(OP, 2)]
    assert "whole on every rank for lack of a rule\n" in whole_text(whole)
    bodies = {kind: artifact.body for kind, artifact in inputs.artifacts.items()}
    facts = facts_of(Sources("whole", plan, **bodies))
    assert [(one.target, one.count) for one in facts.whole_ops] == [(OP, 2)]
    assert OP in page_of(facts)

    known = {"plan": plan, "report": measured_of(plan)}
    monkeypatch.setattr(summary.artifacts, "load", lambda kind, root: artifacts.make(kind, known[kind], [], {}))
    monkeypatch.setattr(summary, "load_config", lambda root: load_config(PROJECT))
    monkeypatch.setattr(summary, "read_summary", lambda stage, root: dict(result.figures))
    (line,) = (line for line in summary.summarise(tmp_path).splitlines() if line.startswith("whole ops"))
    assert OP in line and "of the step" in line and "lack of a rule" in line


def test_what_has_a_split_or_cannot_be_divided_is_not_named(graph: OpGraph) -> None:
    ops = [op for op in graph.ops if op.target == OP]
    assert all(lacks_rule(graph, op, (2,)) for op in ops)
    assert not any(lacks_rule(graph, op, sizes) for op in ops for sizes in ((1,), (5,), (7, 11)))
    assert not any(lacks_rule(graph, op, (2,)) for op in graph.ops if op.target != OP)
    register(OP, "b^ n^ -> b^ n^")  # never split, as its author says
    try:
        assert not lacks_rule(graph, ops[0], (2,))
    finally:
        forget(OP)
