"""The engines of plain PyTorch on real ranks: each trains as a plain loop does, and gives its state and weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.config import TrainEngine
from shardwright.pipeline.ir.plan import Partition, Plan, Prediction, Sharding
from shardwright.pipeline.models import gpt
from shardwright.pipeline.models.data import TokenSequences
from shardwright.pipeline.runtime.programs.parameters import whole_of
from shardwright.stages.train.engines.baselines import numbered_blocks
from shardwright.stages.train.loop import Loop
from shardwright.stages.train.run import check_batch, ranks_of
from shardwright.stages.train.worker import agree, make_engine
from tests import plans
from tests.jobs import train_settings
from tests.ranks import run_ranks

STEPS, BATCH, PASSES, SAMPLES, RATE, CLIP = 3, 8, 2, 64, 0.01, 0.5
SIZES = plans.GPT8 | {"tie": True}
RANKS = {"single": 1, "ddp": 2, "fsdp2": 2}


def given_model() -> nn.Module:
    """With weights that no seed of the runs gives."""
    torch.manual_seed(99)
    return gpt.build(**SIZES)


def job(engine: str, weights: Path) -> dict[str, Any]:
    shape = {"shape": [BATCH, SIZES["context"]], "dtype": "int64"}
    data = {"vocab_size": SIZES["vocab_size"], "length": SIZES["context"], "samples": SAMPLES}
    dataset = {"_target_": "shardwright.pipeline.models.data.TokenSequences", **data}
    return {
        "device": "cpu",
        "module_path": __file__,  # not run
        "model": {
            "precision": "fp32",
            "module": {"_target_": "shardwright.pipeline.models.gpt.build", **SIZES},
            "batch": {"input_ids": shape, "labels": shape},
        },
        "data": {"dataset": dataset, "held_out": dataset, "shuffle": False, "seed": 0},
        "train": train_settings(
            steps=STEPS, seed=3, init_from=str(weights), clip_norm=CLIP, gradient_accumulation=PASSES, engine=engine,
            optimizer={"_target_": "torch.optim.SGD", "lr": RATE, "momentum": 0.9},
            evaluate={"every": STEPS, "batches": 1},
        ),
        "where": {"model": "model", "data": "data", "train": "train"},
    }  # fmt: skip


def batches() -> Iterator[dict[str, Tensor]]:
    data, position = TokenSequences(SIZES["vocab_size"], SIZES["context"], SAMPLES), 0
    while True:
        rows = [data[(position + i) % len(data)] for i in range(BATCH)]
        yield {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
        position += BATCH


@cache
def plain() -> tuple[list[float], nn.Module, torch.optim.Optimizer, float]:
    """Losses, the trained module, its optimizer, and the loss of the batch after the last."""
    model, stream = given_model().train(), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = [model(**next(stream)) for _ in range(PASSES)]
        (sum(found) / PASSES).backward()  # type: ignore[union-attr]
        assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        losses.append(sum(loss.item() for loss in found) / PASSES)
    return losses, model, optimizer, model(**next(stream)).item()


def with_spare(**sizes: int) -> nn.Module:
    model = gpt.build(**sizes)
    model.spare = nn.Parameter(torch.zeros(2))
    return model


def train(folder: str, name: str) -> dict[str, Any]:
    work = Path(folder) / name
    work.mkdir(exist_ok=True)
    settings = job(name, Path(folder) / "given.pt")
    engine = make_engine(settings)
    result = Loop(engine, settings, work).run()
    engine.export(work / "trained.safetensors")
    state = {}
    for held in engine.state():
        assert held.tensor.numel() * (2 if "S" in str(held.layout) else 1) == prod(held.shape)
        state[held.name] = whole_of(held.tensor, held.shape, held.layout, held.axes)
    before = [tensor.clone() for tensor in engine.resident() if not tensor.is_meta]
    result["next"] = engine.loss_of(engine.on_device(engine.batches(STEPS)[0]))
    result["unchanged"] = all(torch.equal(a, b) for a, b in zip(before, engine.resident(), strict=False))
    if dist.get_rank() == 0:
        torch.save(state, work / "state.pt")
    return result


def train_both(folder: str) -> dict[str, Any]:
    refusals = []
    for digests in ({"a": "1", "b": "2"}, {"a": "1", "b": str(dist.get_rank())}):
        try:
            agree(digests)
        except TrainError as refused:
            refusals.append(refused.line())
    spare = job("ddp", Path(folder) / "given.pt")
    spare["model"]["module"]["_target_"] = f"{__name__}.with_spare"
    spare["train"]["init_from"] = None
    try:
        Loop(make_engine(spare), spare, Path(folder)).run()
    except TrainError as refused:
        refusals.append(refused.line())
    return {name: train(folder, name) for name in ("ddp", "fsdp2")} | {"refusals": refusals}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("baselines")
    torch.save(given_model().state_dict(), folder / "given.pt")
    both = run_ranks(2, train_both, str(folder))
    found = {name: [one[name] for one in both] for name in ("ddp", "fsdp2", "refusals")}
    return folder, found | {"single": run_ranks(1, train, str(folder), "single")}


@pytest.mark.parametrize("name", RANKS)
def test_losses_are_those_of_a_plain_loop(trained, name: str) -> None:
    losses, _, _, after = plain()
    assert len(trained[1][name]) == RANKS[name]
    for result in trained[1][name]:
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        assert result["ranks"] == RANKS[name] and result["samples"] == BATCH * PASSES
        assert result["next"] == pytest.approx(after, rel=1e-5) and result["unchanged"]
        assert result["evaluated"] == [(STEPS - 1, pytest.approx(plain()[1](**next(batches())).item(), rel=1e-5))]


@pytest.mark.parametrize("name", RANKS)
def test_weights_are_exported_by_the_names_of_the_module(trained, name: str) -> None:
    state = load_file(trained[0] / name / "trained.safetensors")
    expected = plain()[1].state_dict()
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-3, atol=1e-5)
    gpt.build(**SIZES).load_state_dict(state, strict=True)


@pytest.mark.parametrize("name", RANKS)
def test_the_state_is_whole_and_that_of_the_plain_loop(trained, name: str) -> None:
    _, model, optimizer, _ = plain()
    state = torch.load(trained[0] / name / "state.pt")
    expected = {f"weights/{n}": t for n, t in (*model.named_buffers(), *model.named_parameters())}
    for n, parameter in model.named_parameters():
        expected |= {f"optimizer/{n}/{key}": value for key, value in optimizer.state[parameter].items()}
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(state[key], tensor.detach(), rtol=1e-3, atol=1e-5)


def test_a_sharded_model_needs_less_memory_than_copies_of_it(trained) -> None:
    peaks = {name: max(trained[1][name][0]["peak_bytes"]) for name in RANKS}
    weights = sum(p.numel() * p.element_size() for p in plain()[1].parameters())
    assert 4 * weights < peaks["ddp"], "weights, gradients, their buckets and momentum"
    assert 1.5 * weights < peaks["fsdp2"] < peaks["ddp"]


def test_ranks_that_have_read_different_files_do_not_train(trained) -> None:
    for refusals in trained[1]["refusals"]:
        assert refusals[0].startswith("b: rank 1 and rank 0 have read different files; give all hosts the same")


def test_a_parameter_that_ddp_cannot_have_is_named(trained) -> None:
    for refusals in trained[1]["refusals"]:
        assert refusals[1:] == [
            "model: module: spare takes no part in the loss, which DistributedDataParallel does not allow; freeze it"
            " (`requires_grad_(False)`), or train with another engine"
        ]


def test_blocks_are_those_of_lists_and_sequences() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    lists = nn.ModuleList([nn.ModuleList([inner]), nn.Linear(2, 2)])
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "lists": lists, "tail": nn.Sequential(nn.ReLU(), nn.Linear(2, 2))})
    assert list(numbered_blocks(model)) == [inner, lists[1], model["tail"][1]]


# ---------------------------------------------------------------------------------------------- before anything starts


def configured(engine: TrainEngine, batch: int) -> Any:
    model = SimpleNamespace(batch={"x": SimpleNamespace(shape=[batch, 3])})
    return SimpleNamespace(train=SimpleNamespace(engine=engine), model=model, choices={"model": "mine"})


@given(st.sampled_from(TrainEngine), st.integers(1, 64), st.integers(1, 8))
def test_a_batch_that_does_not_divide_is_refused_where_the_plan_does_not_cut_it(engine, batch, ranks) -> None:
    if engine is TrainEngine.planned or batch % ranks == 0:
        check_batch(configured(engine, batch), ranks)
        return
    with pytest.raises(TrainError) as refused:
        check_batch(configured(engine, batch), ranks)
    assert refused.value.line().startswith(f"conf/model/mine.yaml: batch.x.shape: x has {batch} samples")


def test_ranks_are_the_devices_of_the_plan_once() -> None:
    def planned(sizes: list[tuple[int, ...]], chunks: int = 1) -> Any:
        axes = [tuple((f"d{n}", size) for n, size in enumerate(own)) for own in sizes]
        partitions = tuple(Partition(0, 0, own, Sharding({}, {}, {}), (), 1, 0, 0.0) for own in axes)
        return Plan("cpu", 0, partitions, Prediction(*[0] * 7), chunks=chunks)

    assert ranks_of(planned([(2, 4)]), TrainEngine.ddp) == 8
    assert ranks_of(planned([(2, 2), (2,)]), TrainEngine.fsdp2) == 6
    assert ranks_of(planned([(2,)] * 4, chunks=2), TrainEngine.planned) == 4
    assert ranks_of(planned([(2, 4)]), TrainEngine.single) == 1
