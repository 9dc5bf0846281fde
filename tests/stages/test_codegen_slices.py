"""Programs for a part of a pass: written for the model as it is with fewer samples, or refused in one line."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.base.stage import Inputs
from shardwright.pipeline.config import Config, DType, ModelSettings, TensorSpec, load_config
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.ir.verify import verify_graph
from shardwright.pipeline.sharding.slices import slices_of
from shardwright.pipeline.tracing.trace import trace
from shardwright.stages.codegen import run as codegen
from shardwright.stages.codegen.run import write_program
from shardwright.stages.codegen.slices import graphs_of_slices, with_contiguous
from shardwright.stages.verify.truth import interpret, state_of
from tests.graphs import SILENT
from tests.graphs import trace as trace_module
from tests.piped_programs import cut, random_cuts
from tests.piped_training import Case, config_of, plan_of, sliced_plan
from tests.plans import batch_of
from tests.programs import load, plan_for, uniform

PROJECT = Path(__file__).parents[2]
ROWS = 8


class Moody(nn.Module):
    """Does something else with few samples: the op is another one, or there is one more."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.first, self.last, self.more = nn.Linear(4, 4), nn.Linear(4, 4), more

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if len(x) == ROWS:
            return F.mse_loss(self.last(torch.tanh(y)), x)
        return F.mse_loss(self.last(torch.tanh(y).exp() if self.more else torch.sigmoid(y)), x)


class Plain(nn.Module):
    """Takes any number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.first(x))), x)


class Added(nn.Module):
    """Its loss is a sum over samples, as a whole or in part."""

    def __init__(self, part: bool) -> None:
        super().__init__()
        self.first, self.last, self.part = nn.Linear(4, 4), nn.Linear(4, 4), part

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.tanh(self.first(x)))
        return F.mse_loss(y, x) + y.abs().sum() if self.part else F.mse_loss(y, x, reduction="sum")


class Normed(nn.Module):
    """Has no variance of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.norm(self.first(x)), x)


class Shifted(nn.Module):
    """Has ops that do nothing to one sample: a table for all, and rows that are put in order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Linear(4, 4), nn.Linear(4, 3), nn.Parameter(torch.rand(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x) + self.table.expand(len(x), 4))
        return F.mse_loss(self.last(y)[:, 1:].contiguous().view(-1), x[:, 2:].contiguous().view(-1))


class Fixed(nn.Module):
    """Is written for so many samples and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.first(x)).view(ROWS, 2, 2).flatten(1)), x)


class Grouped(nn.Module):
    """Two groups of samples, whatever their number; where there are groups of two, it is the number that changes."""

    def __init__(self, groups_of_two: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shape = (-1, 2, 4) if groups_of_two else (2, -1, 4)

    def forward(self, x: Tensor) -> Tensor:
        groups = self.first(x).view(self.shape)
        return F.mse_loss(self.last(torch.tanh(groups - groups.mean(1, keepdim=True))).flatten(0, 1), x)


def rows_of(build: type, **arguments: bool) -> Config:
    spec = {"x": TensorSpec(shape=[ROWS, 4], dtype=DType.float32)}
    module = {"_target_": f"{__name__}.{build.__name__}", **arguments}
    return replace(load_config(PROJECT), model=ModelSettings(module=module, batch=spec))


def in_two(graph: OpGraph, slices: int, devices: int = 1) -> Plan:
    draw = random.Random(1)
    whole = plan_for(graph, uniform(graph, devices), devices)
    plan = cut(graph, random_cuts(graph, 2, draw), [whole, whole], draw, 2 * slices)
    return replace(plan, slices=slices_of(graph.batch, slices))


def refused(config: Config, slices: int, devices: int = 1) -> str:
    graph = trace(config)
    with pytest.raises(SolveError) as error:
        graphs_of_slices(graph, in_two(graph, slices, devices), config)
    line = error.value.line()
    assert line.startswith(f"conf/checkpoint/{config.choices['checkpoint']}.yaml: micro_batches: ")
    assert f"cuts each pass into {slices} micro-batches" in line
    assert line.endswith(f"ask for fewer than {2 * slices}, a multiple of 2, or null")
    return line


@pytest.mark.parametrize("model", ["gpt", "tied", "mlp", "ladder", "shared", "unet"])
@pytest.mark.parametrize("slices", [2, 3])
def test_the_graph_is_that_of_fewer_samples(model: str, slices: int) -> None:
    config = config_of(model)
    whole = trace(config)
    plan = sliced_plan(model, slices, 2)
    (part,) = graphs_of_slices(whole, plan, config)
    assert [op.name for op in part.ops] == [op.name for op in whole.ops] and part != whole
    for value in whole.of_role(Role.INPUT):
        rows, *rest = value.type.shape
        assert part.values[value.name].type.shape == (rows // slices, *rest)
        assert rows == len(batch_of(model)[value.name])
    for role in (Role.PARAMETER, Role.BUFFER):
        assert list(part.of_role(role)) == list(whole.of_role(role))


def test_ops_that_do_nothing_to_one_sample_stay() -> None:
    config = rows_of(Shifted)
    whole = trace(config)
    alone = {op.name for op in whole.ops} - {op.name for op in trace(config, 1).ops}
    assert {whole.op(name).target.split(".")[1] for name in alone} == {"expand", "contiguous"}
    (part,) = graphs_of_slices(whole, in_two(whole, ROWS), config)
    verify_graph(part)
    assert [(op.name, op.inputs) for op in part.ops] == [(op.name, op.inputs) for op in whole.ops]
    assert _loss(part, rows=1) == pytest.approx(_loss(whole, rows=ROWS), rel=1e-5)


def _loss(graph: OpGraph, rows: int) -> float:
    """Of the same row so often."""
    torch.manual_seed(0)
    state = state_of(Shifted().double())
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).expand(rows, 4)
    return float(interpret(graph, state, [{"x": x.contiguous()}], 0).loss)


@pytest.mark.parametrize("family", ["gpt2", "llama", "vit"])
def test_models_of_others_have_the_same_ops_with_one_sample(family: str) -> None:
    pytest.importorskip("transformers")
    from tests.families import FAMILIES

    ((build, batch),) = ((build, batch) for build, batch in FAMILIES.items() if build.__name__ == family)
    whole = trace_module(build(), batch)
    rows = {name: tensor[:1].clone() for name, tensor in batch.items()}
    part = with_contiguous(trace_module(build(), rows, stay={op.name for op in whole.ops}), whole)
    verify_graph(part)
    assert [(op.name, op.target, op.inputs) for op in part.ops] == [(o.name, o.target, o.inputs) for o in whole.ops]
    assert [link.ops for link in part.chain] == [link.ops for link in whole.chain]


def test_without_slices_the_graph_is_taken_as_it_is() -> None:
    config = rows_of(Fixed)
    graph = trace(config)
    _, (own,) = write_program(graph, in_two(graph, 1), config)
    assert own is graph


@pytest.mark.parametrize("pairs", [True, False])
def test_what_a_number_means_is_what_the_module_makes_of_it(pairs: bool) -> None:
    """Both have the same numbers in the graph of a pass of four samples; with two they do not."""
    config = rows_of(Grouped, groups_of_two=pairs)
    spec = {"x": TensorSpec(shape=[4, 4], dtype=DType.float32)}
    config = replace(config, model=replace(config.model, batch=spec))
    graph = trace(config)
    (part,) = graphs_of_slices(graph, in_two(graph, 2), config)
    views = [
        [g.values[name].type.shape for op in g.ops if "view" in op.target for name in op.outputs] for g in (graph, part)
    ]
    assert views == [[(2, 2, 4)], [(1, 2, 4) if pairs else (2, 1, 4)]]


def test_the_stage_writes_the_program_of_a_slice(tmp_path: Path) -> None:
    config = config_of("tied")
    graph, plan = trace(config), sliced_plan("tied", 3, 2)
    program = load(codegen.run(given(tmp_path, graph, plan), config).body)
    assert (program["MICRO_BATCHES"], program["SLICES"]) == (plan.micro_batches, (2, 2, 2))
    assert program["SENT"][0]["x"]["shape"] == (2, 6, 12)
    whole = load(codegen.run(given(tmp_path, graph, replace(plan, slices=())), config).body)
    assert whole["SLICES"] == (6,) and whole["SENT"][0]["x"]["shape"] == (6, 6, 12)


def given(folder: Path, graph: OpGraph, plan: Plan) -> Inputs:
    bodies = {"graph": graph, "plan": plan}
    return Inputs(folder, {kind: artifacts.make(kind, body, [], {}) for kind, body in bodies.items()}, SILENT, None)


def test_a_model_that_does_something_else_with_fewer_samples_is_refused() -> None:
    other = refused(rows_of(Moody, more=False), 2)
    assert "the model does something else with 4 samples: tanh (aten.tanh.default) of the model is sigmoid" in other
    assert "something else with 4 samples" in refused(rows_of(Moody, more=True), 2)


def test_a_model_that_takes_no_fewer_samples_is_refused() -> None:
    assert "with 2 samples the model cannot be exported: " in refused(rows_of(Fixed), 4)


def test_a_batch_norm_of_one_value_is_refused() -> None:
    """Eight samples in five slices are 2, 2, 2, 1 and 1."""
    assert "with one sample the model cannot be exported: " in refused(rows_of(Normed), 5)


def test_sizes_that_do_not_divide_any_more_are_refused() -> None:
    """Eight rows on two devices may be cut into four, not into eight."""
    config = rows_of(Plain)
    graph = trace(config)
    assert graphs_of_slices(graph, in_two(graph, 2, devices=2), config) != (graph,)
    assert "cannot be split as planned: layouts fit: " in refused(config, 8, devices=2)
    assert "cannot be split as planned: layouts fit: " in refused(config, 3, devices=2)  # 3, 3 and 2


def test_micro_batches_of_two_sizes_have_two_forms_of_what_has_sizes_in_it(tmp_path: Path) -> None:
    """Of a transformer its attention, which views rows as heads; all else is written once."""
    config, case = config_of("tied"), Case("tied", "1f1b", (1, 1), micro_batches=4, slices=4)
    text = codegen.run(given(tmp_path, trace(config), plan_of(case)), config).body
    program = load(text)
    assert program["SLICES"] == (2, 2, 1, 1) and program["MICRO_BATCHES"] == 4
    row = program["SENT"][0]["x"]
    assert (row["shape"], row["smaller"]) == ((2, 6, 12), (1, 6, 12))
    (first, second), (smaller, same) = program["PARTITIONS"], program["SMALLER"]
    assert smaller.__bases__ == (first,) and same is second
    assert "__init__" not in vars(smaller) and "PARAMETERS" not in vars(smaller)
    bodies = [body for body in text.split("\n\n\n") if body.startswith("def ")]
    twice = {body for body in bodies if ".reshape(1, 6" in body or ".reshape(2, 6" in body}
    assert len(twice) == 4 and all("scaled_dot_product_attention" in body for body in twice)
    assert not [body for body in bodies if "[1, 6, 12]" in body and body not in twice]


@pytest.mark.parametrize(("part", "told"), [(False, "and the model's loss"), (True, "and a part of the model's loss")])
def test_a_loss_that_adds_samples_up_is_refused(part: bool, told: str) -> None:
    """Micro-batches are averaged: its gradients would be too small."""
    config = rows_of(Added, part=part)
    graph = trace(config)
    with pytest.raises(SolveError) as error:
        graphs_of_slices(graph, in_two(graph, 2), config)
    line = error.value.line()
    assert told in line and line.endswith("let the model's loss be a mean over samples, or ask for null")
