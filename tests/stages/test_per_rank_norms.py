"""`batch_norm: per_rank`: a program of two ranks takes the steps of torch's DDP, and keeps what rank 0 has seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ops.samples import norm_parts, samples_of, strategies_in
from shardwright.pipeline.rates.inner_collectives import talk_seconds
from shardwright.pipeline.tracing.trace import with_norms_per_rank
from shardwright.stages.train.engines.engine import Engine
from shardwright.stages.train.loop import Loop
from shardwright.stages.train.worker import make_engine
from tests import plans
from tests.graphs import preset, trace
from tests.jobs import train_settings
from tests.ranks import run_ranks

STEPS, BATCH, CLASSES = 3, 8, 5


class Images(Dataset[dict[str, Tensor]]):
    """Their mean and spread grow with their number: the ranks' parts of a batch have other statistics."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(3, 6, 6, generator=generator, dtype=torch.float64) * (1 + index % 5) + index % 7
        return {"images": x, "labels": torch.tensor(index % CLASSES)}


class Net(nn.Module):
    """Norms over images and over rows, one of them without running statistics, one that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8, track_running_stats=False)])
        self.rows, self.out = nn.BatchNorm1d(8), nn.Linear(8, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(images)))
        x = F.relu(x + self.norms[1](self.second(x)))
        return F.cross_entropy(self.out(self.rows(x.mean((2, 3)))), labels)


def build() -> nn.Module:
    return Net().double()


def batch(samples: int = BATCH) -> dict[str, Tensor]:
    return {"images": torch.randn(samples, 3, 6, 6, dtype=torch.float64), "labels": torch.zeros(samples).long()}


def graph_of(samples: int = BATCH) -> OpGraph:
    return with_norms_per_rank(trace(build(), batch(samples)))


def norms_of(graph: OpGraph) -> list[Any]:
    return [op for op in graph.ops if op.per_rank]


# ---- plans


@pytest.mark.parametrize(
    ("sizes", "samples", "found"), [((2,), 8, {"S(0)"}), ((2, 2), 8, {"S(0),S(0)"}), ((2, 2), 2, {"S(0),R", "R,S(0)"})]
)
def test_norms_split_the_samples_as_far_as_they_can(sizes: tuple[int, ...], samples: int, found: set[str]) -> None:
    graph = graph_of(samples)
    assert len(norms_of(graph)) == 3
    for op in norms_of(graph):
        options = strategies_in(graph, op, sizes)
        layouts = {one.inputs[0] for one in options}
        assert {str(layout).replace("B", "R").replace(" ", "") for layout in layouts} == found
        assert all(one.outputs[0] == one.inputs[0] and not any(one.body.split(",")) for one in options)
        assert len({samples_of(graph).split(op.inputs[0], layout, sizes) for layout in layouts}) == 1


def test_they_send_nothing_and_the_program_says_so() -> None:
    graph = graph_of()
    plan = plans.data_parallel(graph, 2)
    for op in norms_of(graph):
        assert talk_seconds(graph, op.name, plan.sharding.strategies[op.name], preset(2).axes).total == 0
    assert {own.parts for own in norm_parts(graph, plan.sharding, (2,)).values()} == {2}
    text = plans.write_module(graph, plan)
    assert text.count("batch_norm(") == 3 and "axis=" not in "".join(x for x in text.splitlines() if "batch_norm(" in x)
    names = ", ".join(f'"{norm}.running_{what}"' for norm in ("norms.0", "rows") for what in ("mean", "var"))
    assert f"PER_RANK = {{{names}}}" in text
    usual = trace(build(), batch())
    assert "PER_RANK" not in plans.write_module(usual, plans.data_parallel(usual, 2))


def test_samples_that_an_op_has_moved_are_split_where_they_lie() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            steps = self.inner(x).transpose(0, 1)  # time first
            return self.norm(steps.reshape(-1, 6)).square().mean()

    graph = with_norms_per_rank(trace(Turned(), {"x": torch.randn(4, 3, 6)}))
    (norm,) = norms_of(graph)
    assert {one.inputs[0] for one in strategies_in(graph, norm, (2,))} == {Layout.parse("S(0:3)")}


# ---- training


def assert_near(found: Any, expected: Any) -> None:
    """But for the rounding of float64."""
    torch.testing.assert_close(*map(torch.as_tensor, (found, expected)), rtol=1e-11, atol=1e-12)


def job(engine: str, module: Path) -> dict[str, Any]:
    dataset = {"_target_": f"{__name__}.Images"}
    specs = {"images": {"shape": [BATCH, 3, 6, 6], "dtype": "float64"}, "labels": {"shape": [BATCH], "dtype": "int64"}}
    return {
        "device": "cpu",
        "module_path": str(module),
        "model": {"precision": "fp32", "module": {"_target_": f"{__name__}.build"}, "batch": specs},
        "data": {"dataset": dataset, "held_out": dataset, "shuffle": False, "seed": 0},
        "train": train_settings(
            steps=STEPS, seed=3, gradient_accumulation=2, engine=engine,
            optimizer={"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9},
            evaluate={"every": STEPS, "batches": 2}, compare_replicas_every=1,
        ),
        "where": {"model": "model", "data": "data", "train": "train"},
    }  # fmt: skip


def train(engine: str, folder: str) -> dict[str, Any]:
    settings = job(engine, Path(folder) / "module.py")
    made: Engine = make_engine(settings)
    work = Path(folder) / engine
    work.mkdir(exist_ok=True)
    result = Loop(made, settings, work).run()
    state = {one.name: one.tensor.tolist() for one in made.state()}
    made.export(work / "trained.safetensors")
    kept = {one.name for one in made.state() if one.drifts}
    return {"losses": result["losses"], "evaluated": result["evaluated"], "state": state, "drifts": kept}


def train_both(folder: str) -> dict[str, dict[str, Any]]:
    return {engine: train(engine, folder) for engine in ("planned", "ddp")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("norms")
    graph = graph_of()
    plan = replace(plans.data_parallel(graph, 2), micro_batches=2)
    (folder / "module.py").write_text(plans.write_module(graph, plan))
    return folder, run_ranks(2, train_both, str(folder))


def test_losses_and_weights_are_those_of_ddp(trained) -> None:
    for rank in trained[1]:
        ours, torchs = rank["planned"], rank["ddp"]
        assert ours["losses"] == pytest.approx(torchs["losses"], rel=1e-6)  # DDP's are added up in float32
        for name, tensor in torchs["state"].items():
            if "running" not in name:
                assert_near(ours["state"][name], tensor)


def test_running_statistics_are_those_of_rank_0(trained) -> None:
    first, second = (rank["planned"]["state"] for rank in trained[1])
    names = {f"weights/{norm}.running_{what}" for norm in ("norms.0", "rows") for what in ("mean", "var")}
    for name in names:
        assert_near(first[name], trained[1][0]["ddp"]["state"][name])
    ours, torchs = (load_file(trained[0] / engine / "trained.safetensors") for engine in ("planned", "ddp"))
    for key, tensor in torchs.items():
        assert_near(ours[key], tensor)
    assert trained[1][0]["planned"]["drifts"] == names
    assert all(first[name] == second[name] for name in names), "the model was evaluated after the last step"


def test_the_model_evaluates_by_the_statistics_of_rank_0(trained) -> None:
    for rank in trained[1]:
        ((step, ours),), ((again, torchs),) = rank["planned"]["evaluated"], rank["ddp"]["evaluated"]
        assert step == again and ours == pytest.approx(torchs, rel=1e-6)
