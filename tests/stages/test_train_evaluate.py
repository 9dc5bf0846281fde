"""Evaluation while training, on two ranks: the loss of the unsplit model after `eval()`, and no effect besides."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.base.instantiate import TargetError, instantiate
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.runtime.step.slices import Slices
from shardwright.stages.train.data import held_out_batches
from shardwright.stages.train.engines.engine import program_of
from shardwright.stages.train.engines.planned import PlannedEngine
from shardwright.stages.train.loop import Loop
from tests import evaluated_models as models
from tests.graphs import trace
from tests.jobs import train_settings
from tests.programs import kept, nested, plan_for, uniform, write
from tests.ranks import run_ranks

STEPS, HELD_OUT = 4, 11  # samples, of which the last three are no whole batch
TOKENS = {
    "_target_": "shardwright.pipeline.models.data.TokenSequences",
    "vocab_size": models.WORDS,
    "length": models.LENGTH,
}
IMAGES = {"_target_": "tests.evaluated_models.Images"}
MODELS: dict[str, tuple[type[nn.Module], dict[str, Any], Any]] = {
    "gpt": (models.DroppingGPT, TOKENS, nested),
    "conv": (models.NormedConvolutions, IMAGES, kept),
}


def data_of(name: str, samples: int, first: int = 0) -> dict[str, Any]:
    return {**MODELS[name][1], "samples": samples, "first": first}


def batch_of(dataset: Any, start: int = 0) -> dict[str, Tensor]:
    rows = [dataset[i] for i in range(start, start + models.BATCH)]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def job(folder: Path, name: str, every: int) -> dict[str, Any]:
    batch = batch_of(instantiate(data_of(name, 64), "data"))
    specs = {key: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for key, t in batch.items()}
    optimizer = {"_target_": "torch.optim.SGD", "lr": 0.05}
    return {
        "module_path": str(folder / f"{name}.py"),
        "model": {
            "precision": "fp32",
            "module": {"_target_": f"tests.evaluated_models.{MODELS[name][0].__name__}"},
            "batch": specs,
        },
        "data": {"dataset": data_of(name, 64), "held_out": data_of(name, HELD_OUT, 64), "shuffle": True, "seed": 0},
        "train": train_settings(
            steps=STEPS, seed=3, optimizer=optimizer, evaluate={"every": every, "batches": 8}
        ),
        "where": {"model": "model", "data": "data", "train": "train"},
    }  # fmt: skip


def train(folder: str) -> dict[str, list[dict[str, Any]]]:
    """On a rank: each model without evaluation, then with one every third step; its trained weights lie there."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in MODELS:
        for every in (0, 3):
            given = job(Path(folder), name, every)
            engine = PlannedEngine(given)
            found.setdefault(name, []).append(Loop(engine, given, Path(folder)).run())
        engine.export(Path(folder) / f"{name}.safetensors")
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[dict[str, list[dict[str, Any]]]]]:
    folder = tmp_path_factory.mktemp("evaluated")
    for name, (model, _, regions) in MODELS.items():
        graph = trace(model(), batch_of(instantiate(data_of(name, 64), "data")))
        (folder / f"{name}.py").write_text(write(graph, plan_for(graph, uniform(graph, 2), 2, regions(graph))))
    return folder, run_ranks(2, train, str(folder))


@cache
def unsplit_loss(folder: Path, name: str) -> float:
    model = MODELS[name][0]()
    model.load_state_dict(load_file(folder / f"{name}.safetensors"), strict=True)
    data = instantiate(data_of(name, HELD_OUT, 64), "data")
    with torch.no_grad():
        losses = [model.eval()(**batch_of(data, start)).item() for start in (0, models.BATCH)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_the_unsplit_model_when_it_evaluates(trained, name: str) -> None:
    for _, found in (rank[name] for rank in trained[1]):
        assert [step for step, _ in found["evaluated"]] == [2, 3]
        assert found["evaluated"][-1][1] == pytest.approx(unsplit_loss(trained[0], name), rel=2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_does_not_change_the_training(trained, name: str) -> None:
    for without, found in (rank[name] for rank in trained[1]):
        assert without["evaluated"] == []
        assert found["losses"] == without["losses"]


def test_the_programs_have_what_evaluation_changes(trained) -> None:
    gpt, conv = ((trained[0] / f"{name}.py").read_text() for name in ("gpt", "conv"))
    assert "drawn_apart(lambda: F.dropout(" in gpt and "None, 0.3" in gpt and "F.rrelu(" in gpt
    assert ", True, 0.1, 1e-05" in conv and "None, None, True" in conv and "alpha_dropout" in conv


def test_a_model_that_draws_by_itself_is_refused(tmp_path: Path) -> None:
    graph = trace(models.DrawingModel(), {"x": torch.randn(4, 4)})
    path = tmp_path / "module.py"
    path.write_text(write(graph, plan_for(graph, uniform(graph, 1), 1)))
    with pytest.raises(TrainError, match=r"module.py:\d+: the model draws numbers with torch.rand_like"):
        program_of({"module_path": str(path)}, evaluates=True)


def test_too_little_held_out_data_is_refused(tmp_path: Path) -> None:
    given = job(tmp_path, "gpt", 1)
    given["data"]["held_out"]["samples"] = models.BATCH - 1
    with pytest.raises(TrainError, match="data: held_out: it has 3 samples, and a batch of the model 4; hold out more"):
        held_out_batches(given, {}, [])
    del given["data"]["held_out"]["vocab_size"]
    with pytest.raises(TargetError, match=r"held_out.vocab_size: .*TokenSequences needs it"):
        held_out_batches(given, {}, [])


def test_slices_of_held_out_batches(tmp_path: Path) -> None:
    """As many samples as in whole batches: eleven are two batches of four, each in slices of two, one and one."""
    given = job(tmp_path, "gpt", 1)
    whole = {name: Layout(()) for name in given["model"]["batch"]}
    batches, slices = held_out_batches(given, whole, []), held_out_batches(given, whole, [], Slices((2, 1, 1)))
    assert len(batches) == 2 and len(slices) == 6
    for name in whole:
        assert torch.equal(torch.cat([b[name] for b in batches]), torch.cat([b[name] for b in slices]))
    given["data"]["held_out"]["samples"] = models.BATCH - 1
    with pytest.raises(TrainError, match="it has 3 samples, and a batch of the model 4"):
        held_out_batches(given, whole, [], Slices((2, 1, 1)))


class Endless:
    """Stands for what takes the steps; its loss is not a number where it evaluates."""

    device, passes, samples, held_whole, not_captured = torch.device("cpu"), 1, 1, "", ""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def batches(self, step: int) -> list[dict[str, Tensor]]:
        return [{}]

    def on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    def step(self, first: Any, later: Any) -> float:
        return 1.0

    def evaluate(self, beat: Any) -> float:
        return float("nan")

    def resident(self) -> list[Tensor]:
        return []


def endless(folder: str) -> str:
    settings = train_settings(steps=3, evaluate={"every": 2, "batches": 1})
    given = {"module_path": __file__, "train": settings, "where": {"train": "train"}}
    try:
        Loop(Endless(), given, Path(folder)).run()
    except TrainError as error:
        return error.line()
    return ""


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path: Path) -> None:
    (line,) = run_ranks(1, endless, str(tmp_path))
    assert line == "the loss on the held-out data became nan at step 1; lower the learning rate"
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1
