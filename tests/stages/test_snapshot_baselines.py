"""Snapshots of the engines of plain PyTorch: statistics that differ by design, and shards that cannot be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from shardwright.pipeline.base.errors import TrainError
from shardwright.stages.train.loop import Loop
from shardwright.stages.train.ranks.safety import differing_replicas
from shardwright.stages.train.worker import make_engine
from tests.ranks import run_ranks
from tests.snapshot_runs import job

ENGINES = ("ddp", "fsdp2")


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.linear(x)) * torch.arange(self.norm.num_features)).square().mean()


class Points(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"x": torch.randn(3, generator=torch.Generator().manual_seed(number))}


def job_of(folder: Path, engine: str, steps: int, width: int = 4, **safety: Any) -> dict[str, Any]:
    given = job(folder, "none", steps, folder=str(folder / engine), **safety)
    given["module_path"] = __file__  # not run
    given["model"] |= {"module": {"_target_": f"{__name__}.Norm", "width": width}}
    given["model"]["batch"] = {"x": {"shape": [8, 3], "dtype": "float32"}}
    given["data"]["dataset"] = {"_target_": f"{__name__}.Points"}
    given["train"]["engine"] = engine
    return given


def statistics(engine: Any) -> list[Tensor]:
    return [held.tensor.clone() for held in engine.state() if held.name == "weights/norm.running_mean"]


def train(folder: str, name: str) -> dict[str, Any]:
    """On a rank: with replicas compared at each step, and on from the snapshot."""
    given = job_of(Path(folder), name, 2, every=2, compare_every=1)
    engine = make_engine(given)
    Loop(engine, given, Path(folder)).run()
    own = statistics(engine)
    assert engine.stream == dist.get_rank()  # dropout of ranks is not alike
    again = make_engine(given)
    Loop(again, given, Path(folder)).run()  # no step is left: this is the snapshot
    compared = differing_replicas(engine)
    if name == "ddp" and dist.get_rank() == 1:
        with torch.no_grad():
            engine.named["linear.bias"][0] += 1
    return {"own": own, "restored": statistics(again), "compared": compared, "broken": differing_replicas(engine)}


def on_two_ranks(folder: str) -> dict[str, Any]:
    refused = {}
    for safety in ({"every": 2}, {"compare_every": 2}, {}):
        given = job_of(Path(folder), "fsdp2", 1, width=5, **safety)
        try:
            refused[str(safety)] = len(Loop(make_engine(given), given, Path(folder)).losses)
        except TrainError as error:
            refused[str(safety)] = error.line()
    return {name: train(folder, name) for name in ENGINES} | {"refused": refused}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks, str(tmp_path_factory.mktemp("baselines")))


@pytest.mark.parametrize("name", ENGINES)
def test_statistics_of_batch_norms_may_differ_and_those_of_rank_0_are_kept(
    found: list[dict[str, Any]], name: str
) -> None:
    first, second = (rank[name] for rank in found)
    assert first["compared"] == second["compared"] == ""
    assert not torch.equal(first["own"][0], second["own"][0]), "nothing is tested"
    for rank in (first, second):
        assert torch.equal(rank["restored"][0], first["own"][0])


def test_parameters_of_ddp_are_compared(found: list[dict[str, Any]]) -> None:
    assert found[0]["ddp"]["broken"] == "weights/linear.bias differs between rank 0 and rank 1"


def test_shards_that_cannot_be_saved_are_refused_before_the_first_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        saved, compared, plain = rank["refused"].values()
        assert saved == compared and plain == 0
        assert "linear.weight has 5 rows, which 2 ranks hold in unequal shards; set `snapshots.every`" in saved
