"""Training from a file of weights and back into one, on two ranks: as the unsplit model does with these weights.

Gradients are clipped, the learning rate changes with every step, and every step is followed by an evaluation.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from shardwright.pipeline.base.instantiate import TargetError
from shardwright.pipeline.models import gpt
from shardwright.pipeline.models.data import TokenSequences
from shardwright.pipeline.user.weights import WeightsError
from shardwright.stages.train.engines.planned import PlannedEngine
from shardwright.stages.train.loop import Loop
from tests import plans
from tests.jobs import train_settings
from tests.ranks import run_ranks
from tests.storage_plans import plan_named

STEPS, BATCH, SAMPLES, RATE, CLIP = 3, 8, 64, 0.05, 0.5
SCHEDULE = {"warm_up": 2, "decay": "linear", "decay_steps": 4, "least": 0.2}
PARTS = (0.5, 1.0, 1.0)  # of the rate, by step: the fall begins with the last
PLANS = ("tp", "zero3", "zero1", "ddp")
SIZES = plans.GPT8 | {"tie": True}
FILES = {"tp": "model.safetensors.index.json", "zero3": "model.safetensors", "zero1": "model.pt", "ddp": "model.pt"}


def given_model() -> nn.Module:
    """With weights that no seed of the runs gives."""
    torch.manual_seed(99)
    return gpt.build(**SIZES)


def write_files(folder: Path) -> None:
    state = given_model().state_dict()
    torch.save(state, folder / "model.pt")
    untied = {name: tensor for name, tensor in state.items() if name != "token.weight"}  # as transformers writes them
    save_file(untied, folder / "model.safetensors")
    places = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(state)}
    for file in set(places.values()):
        save_file({name: state[name].clone() for name in state if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def job(module: Path, weights: Path) -> dict[str, Any]:
    shape = {"shape": [BATCH, SIZES["context"]], "dtype": "int64"}
    data = {"vocab_size": SIZES["vocab_size"], "length": SIZES["context"], "samples": SAMPLES}
    optimizer = {"_target_": "torch.optim.SGD", "lr": RATE}
    settings = train_settings(
        steps=STEPS,
        seed=3,
        init_from=str(weights),
        optimizer=optimizer,
        clip_norm=CLIP,
        schedule=SCHEDULE,
        evaluate={"every": 1, "batches": 1},
    )
    dataset = {"_target_": "shardwright.pipeline.models.data.TokenSequences", **data}
    return {
        "module_path": str(module),
        "model": {
            "precision": "fp32",
            "module": {"_target_": "shardwright.pipeline.models.gpt.build", **SIZES},
            "batch": {"input_ids": shape, "labels": shape},
        },
        "data": {"dataset": dataset, "held_out": dataset | {"first": SAMPLES}, "shuffle": False, "seed": 0},
        "train": settings,
        "where": {"model": "model", "data": "data", "train": "train"},
    }


def train(folder: str) -> dict[str, Any]:
    """On a rank: what every plan reports, and what comes of Adafactor with each; weights lie beside the programs."""
    found = {}
    for name in PLANS:
        work = Path(folder) / name
        work.mkdir(exist_ok=True)
        given = job(Path(folder) / f"{name}.py", Path(folder) / FILES[name])
        engine = PlannedEngine(given)
        found[name] = Loop(engine, given, work).run()
        engine.export(work / "trained.safetensors")
    return {**found, "Adafactor": on_shards(folder)}


def batch(step: int) -> dict[str, torch.Tensor]:
    data = TokenSequences(SIZES["vocab_size"], SIZES["context"], SAMPLES)
    rows = [data[step * BATCH + i] for i in range(BATCH)]
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


@cache
def plain() -> tuple[list[float], list[float], nn.Module]:
    """Losses, those on the held-out batch, and the trained model."""
    model = given_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, evaluated = [], []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * PARTS[step]
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        losses.append(loss.item())
        evaluated.append(model(**batch(SAMPLES // BATCH)).item())
    return losses, evaluated, model


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("weights")
    write_files(folder)
    for name in PLANS:
        (folder / f"{name}.py").write_text(plans.lowered("tied8", plan_named("tied8", name))[1])
    return folder, run_ranks(2, train, str(folder))


@pytest.mark.parametrize("name", PLANS)
def test_training_from_a_file_is_that_of_the_unsplit_model_with_these_weights(trained, name: str) -> None:
    losses, evaluated, _ = plain()
    for found in trained[1]:
        assert found[name]["losses"] == pytest.approx(losses, rel=2e-6)
        assert [loss for _, loss in found[name]["evaluated"]] == pytest.approx(evaluated, rel=2e-6)


def test_every_step_is_written_down_with_its_rate(trained) -> None:
    lines = [json.loads(line) for line in (trained[0] / "zero1" / "steps.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in lines] == [RATE * part for part in PARTS]
    assert [line["eval_loss"] for line in lines] == [loss for _, loss in trained[1][0]["zero1"]["evaluated"]]


@pytest.mark.parametrize("name", PLANS)
def test_what_is_exported_is_the_users_own_model(trained, name: str) -> None:
    state = load_file(trained[0] / name / "trained.safetensors")
    model = plain()[2]
    assert state.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-4, atol=1e-6)
    own = gpt.build(**SIZES).train()
    own.load_state_dict(state, strict=True)
    assert own.head.weight is own.token.weight
    assert own(**batch(STEPS)).item() == pytest.approx(model(**batch(STEPS)).item(), rel=2e-6)


def refusals(folder: str) -> list[str]:
    """On a rank: what is said of files that are not the model's."""
    state = given_model().state_dict()
    name = next(iter(state))
    wrong = {
        "less": {n: t for n, t in state.items() if n != "norm.weight"},
        "more": {**state, "other": torch.zeros(2)},
        "shape": {**state, name: torch.zeros(3)},
    }
    found = []
    for what, content in wrong.items():
        path = Path(folder) / f"{what}-{dist.get_rank()}.pt"
        torch.save(content, path)
        try:
            PlannedEngine(job(Path(folder) / "ddp.py", path))
        except WeightsError as error:
            found.append(error.line())
    return found


def on_shards(folder: str) -> dict[str, Any]:
    """On a rank: the loss of a step of an optimizer that looks at whole tensors, or why it is refused."""
    found: dict[str, Any] = {}
    for name in PLANS:
        given = job(Path(folder) / f"{name}.py", Path(folder) / "model.pt")
        given["train"]["optimizer"] = {"_target_": "torch.optim.Adafactor"}
        try:
            engine = PlannedEngine(given)
            found[name] = [engine.step(*engine.batches(step), []) for step in range(2)]
        except TargetError as error:
            found[name] = error.line()
    return found


def test_optimizers_that_look_at_whole_tensors_need_whole_tensors(trained) -> None:
    model = given_model().train()
    optimizer, losses = torch.optim.Adafactor(model.parameters()), []
    for step in range(2):
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    for found in (rank["Adafactor"] for rank in trained[1]):
        assert found["ddp"] == pytest.approx(losses, rel=2e-6)
        for line in (found[name] for name in PLANS if name != "ddp"):
            assert line.startswith("train: optimizer._target_: torch.optim.Adafactor looks at whole tensors")


def test_a_file_of_another_model_is_refused(trained) -> None:
    for less, more, shape in run_ranks(2, refusals, str(trained[0])):
        assert less == "train: init_from: these are not weights of this model: it has no norm.weight"
        assert more == "train: init_from: these are not weights of this model: the model has no other"
        assert "has shape [3] instead of" in shape
