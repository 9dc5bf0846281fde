"""`verify`: the plan's program on real processes of this machine, beside the unsplit module, in float64 and float32."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.api.arguments import arguments_named
from shardwright.api.engines import require_own_program
from shardwright.api.given import (
    ArgumentError,
    Batch,
    GivenModule,
    GivenOptimizer,
    OptimizerLike,
    arguments_of,
    batch_of,
)
from shardwright.api.plan import ModelPlan
from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.launch.launch import run_ranks
from shardwright.pipeline.launch.work_folder import LaunchFailed
from shardwright.stages.codegen.run import write_program
from shardwright.stages.verify.run import WORKER, in_words, job_of
from shardwright.stages.verify.worker import AT

WHERE = "sw.verify"


@dataclass(frozen=True, repr=False)
class Verification:
    """Whether the program gives what the module gives; true where it does, and shown as a table."""

    equal: bool
    text: str
    found: Mapping[str, Any]  # of every loss, gradient and buffer how far it is

    def __bool__(self) -> bool:
        return self.equal

    def __repr__(self) -> str:
        return self.text


def verify(
    plan: ModelPlan,
    model: nn.Module | None = None,
    batch: Any = None,
    *,
    optimizer: OptimizerLike | None = None,
    steps: int = 3,
) -> Verification:
    """Loss, gradients and buffers of some steps beside those of the unsplit module, on as many processes as devices.

    Of a plan that was loaded the model and a batch have to be given. The processes are on this machine's CPU. Model,
    batch and optimizer go to them through a temporary folder.
    """
    model = plan.model if model is None else model
    if model is None:
        raise ArgumentError("the plan was loaded", where=f"{WHERE}: model", remedy="give the model, and a batch")
    samples = plan.batch if batch is None else batch_of(arguments_of(model), batch)
    _check(plan, model, samples)
    require_own_program(plan, model, WHERE)
    with TemporaryDirectory(prefix="verify-") as folder, arguments_named(WHERE):
        job = _job(Path(folder), plan, model, samples or {}, optimizer, steps)
        try:
            found = run_ranks(WORKER, job, plan.ranks, None)
        except LaunchFailed as error:
            if str(error).startswith(AT):
                return Verification(False, f"not equal: the program fails, {error}", {})
            raise TrainError(f"verification failed: {error}", where=WHERE) from error
    return Verification(bool(found["equal"]), in_words(found, everything=False), found)


def _check(plan: ModelPlan, model: nn.Module, batch: Batch | None) -> None:
    specs = plan.config.model.batch
    if batch is None or any(tensor.is_meta for tensor in batch.values()):
        what = "it has no values" if batch else "the plan was loaded"
        raise ArgumentError(what, where=f"{WHERE}: batch", remedy="give one with real numbers")
    shapes = {name: list(tensor.shape) for name, tensor in batch.items()}
    if shapes != {name: list(spec.shape) for name, spec in specs.items()}:
        remedy = f"give {', '.join(f'{name} {list(spec.shape)}' for name, spec in specs.items())}"
        raise ArgumentError("it is not like that of the plan", where=f"{WHERE}: batch", remedy=remedy)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        what = "its weights are on the meta device"
        raise ArgumentError(what, where=f"{WHERE}: model", remedy="give it with real weights")


def _job(
    folder: Path, plan: ModelPlan, model: nn.Module, batch: Batch, optimizer: OptimizerLike | None, steps: int
) -> dict[str, Any]:
    """As the command writes it; what the user gave lies beside the artifacts."""
    for artifact in plan.made.values():
        artifacts.save(artifact, folder)
    config = replace(plan.config, model=replace(plan.config.model, module={"_target_": GivenModule(model)}))
    written, graphs = write_program(plan.graph, plan.decided, config)
    job = job_of(folder, config, steps, written, graphs if len(plan.decided.slices) > 1 else ())
    search = [path for path in sys.path if path]
    given = {"model": model, "optimizer": _without_state(_optimizer_of(plan, optimizer))}
    for name, value in given.items():
        try:
            (folder / name).write_bytes(cloudpickle.dumps(value))
        except Exception as error:  # of the user's own classes
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ArgumentError(f"it cannot be sent to other processes ({told})", where=f"{WHERE}: {name}") from error
    torch.save({name: tensor.cpu() for name, tensor in batch.items()}, folder / "batch")
    here = f"{__name__}."
    job["model"]["module"] = {"_target_": f"{here}unpickled", "path": str(folder / "model"), "search": search}
    job["train"]["optimizer"] = {"_target_": f"{here}remade", "path": str(folder / "optimizer"), "search": search}
    job["data"]["dataset"] = {"_target_": f"{here}Samples", "path": str(folder / "batch")}
    return {**job, "where": {"model": WHERE, "data": WHERE, "train": WHERE}}


def _optimizer_of(plan: ModelPlan, given: OptimizerLike | None) -> GivenOptimizer:
    """What was given here or to the plan; else AdamW."""
    if given is not None:
        return GivenOptimizer(given)
    planned = plan.config.train.optimizer["_target_"]
    return planned if isinstance(planned, GivenOptimizer) else GivenOptimizer(torch.optim.AdamW)


def _without_state(optimizer: GivenOptimizer) -> GivenOptimizer:
    """It would bring the weights along."""
    if isinstance(optimizer.given, Optimizer):
        return GivenOptimizer(optimizer([nn.Parameter(torch.zeros(1))]))
    return optimizer


# ---- in the processes


def unpickled(path: str, search: list[str]) -> Any:
    """What lies in that file, with the modules that its process could import."""
    sys.path += [place for place in search if place not in sys.path]
    return pickle.loads(Path(path).read_bytes())


def remade(parameters: list[nn.Parameter], path: str, search: list[str]) -> Optimizer:
    made: GivenOptimizer = unpickled(path, search)
    return made(parameters)


class Samples:
    """The samples of one batch."""

    def __init__(self, path: str) -> None:
        self.batch: dict[str, Tensor] = torch.load(path)

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {name: tensor[number] for name, tensor in self.batch.items()}
