"""What the loop trains with: the plan's program, or another way to take the same steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.base.instantiate import instantiate
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.runtime.programs.source import CannotEvaluate, load_program
from shardwright.pipeline.runtime.step.slices import Slices
from shardwright.pipeline.user.batches import Batches
from shardwright.pipeline.user.optimizer import build_optimizer
from shardwright.pipeline.user.precision import type_of
from shardwright.pipeline.user.weights import Shape, write_weights
from shardwright.stages.train.job import Job
from shardwright.stages.train.ranks.watchdog import Beat, unwatched, with_beats

Batch = dict[str, Tensor]  # of one micro-batch, as far as this rank needs it
Inputs = tuple[Job, dict[str, Layout]]  # the job as if the model had these inputs alone, and how they lie
K = TypeVar("K")
MODULE = str(artifacts.KINDS["module"].path(Path()))


@dataclass(frozen=True)
class StateShard:
    """This rank's shard of a tensor of the training state."""

    name: str  # weights/layers.0.up.weight, optimizer/layers.0.up.weight/exp_avg
    tensor: Tensor
    shape: Shape  # of the whole
    layout: Layout
    axes: tuple[str, ...]  # of the mesh that the layout is for, by the names that pipeline.runtime.programs.mesh knows
    drifts: bool = False  # replicas differ by design, and those of the first rank of the mesh count


class Engine(ABC):
    optimizer: torch.optim.Optimizer
    samples: int  # of a step
    held_whole = ""  # why every rank held the whole model while it was built, or nothing
    not_captured = ""  # why a step that was to be a CUDA graph is none, or nothing
    _batches: Batches
    stream = 0  # of random numbers: ranks with the same number draw alike, others do not

    def __init__(self, job: Job, device: torch.device, passes: int) -> None:
        self.job, self.device = job, device
        self.passes = passes  # forward and backward passes of a step, each on the next batch
        self.held_out: list[Batch] = []  # few, and read again and again: on the host

    # ---- what the loop asks for

    def batches(self, step: int) -> list[Batch]:
        """Of a step, in the order of its passes; on the host."""
        return [self.batch(step * self.passes + n) for n in range(self.passes)]

    @abstractmethod
    def step(self, first: Batch, later: list[Batch]) -> float:
        """The mean loss of the passes, the same on all ranks; the first batch is on the device, later ones are not."""

    @abstractmethod
    def evaluate(self, beat: Beat = unwatched) -> float:
        """The mean loss of the held-out batches, as the model is when it evaluates; nothing changes by it.

        A beat with each batch says that it goes on.
        """

    def resident(self) -> list[Tensor]:
        """What stays between steps: parameters, gradients and optimizer state."""
        kept = list(self.tensors())
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        return [*kept, *(t.grad for t in kept if t.grad is not None), *state]

    @abstractmethod
    def state(self) -> Iterator[StateShard]:
        """Parameters, buffers and the optimizer's tensors; read them or write into the shards."""

    def restored(self) -> None:
        """After the shards of the state were written into: what is held twice follows."""
        return  # here nothing is

    def export(self, path: Path, beat: Beat = unwatched) -> None:
        """A file of the whole weights by the names of the model's state dict; all ranks do this together.

        Each tensor is brought together when its turn comes, and a beat with it says that it goes on.
        """
        names, specs = self.exported()
        whole = with_beats((self.whole(name) for name in names.values()), beat)
        if dist.get_rank() == 0:
            write_weights(path, {key: specs[name] for key, name in names.items()}, whole, {"format": "pt"})
        else:
            for _ in whole:
                pass

    # ---- what it is made of

    def batch(self, number: int) -> Batch:
        return self._batches[number]

    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """Parameters and buffers, and what gradients are brought together in."""

    @abstractmethod
    def exported(self) -> tuple[dict[str, str], dict[str, tuple[torch.dtype, Shape]]]:
        """Name in the state dict -> name of the tensor; and of each tensor its type and whole shape."""

    @abstractmethod
    def whole(self, name: str) -> Tensor:
        """On rank 0; all ranks ask for it together."""

    def mean_loss(self, loss: Callable[[Batch], float], beat: Beat) -> float:
        """Of the held-out batches, each on the device when its turn comes."""
        assert self.held_out, "evaluate.every is 0"
        return sum(loss(self.on_device(b)) for b in with_beats(self.held_out, beat)) / len(self.held_out)

    def where(self, group: str, key: str) -> str:
        return f"{self.job['where'][group]}: {key}"

    def seed(self) -> None:
        """Before the module is built."""
        torch.manual_seed(self.job["train"]["seed"])

    def build_module(self) -> nn.Module:
        model: nn.Module = instantiate(self.job["model"]["module"], self.where("model", "module"))
        return model.train()

    def readers(self, of: Mapping[K, Inputs], axes: list[str], slices: Slices | None) -> dict[K, Batches]:
        """What reads the batches of these inputs, from one data set."""
        dataset = self.build_dataset()
        return {key: Batches(dataset, *inputs, axes, slices=slices) for key, inputs in of.items()}

    def build_dataset(self) -> Any:
        return instantiate(self.job["data"]["dataset"], self.where("data", "dataset"))

    def build_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(self.job["train"]["optimizer"], self.where("train", "optimizer"), parameters)

    def placed(self, tensor: Tensor) -> Tensor:
        """On the device; floating numbers in the type that is trained in."""
        return tensor.to(self.device, type_of(tensor, self.job["model"]["precision"]))

    def on_device(self, batch: Batch) -> Batch:
        return {name: self.placed(tensor) for name, tensor in batch.items()}

    def autocast(self, *, cache: bool = False) -> torch.autocast:
        """With its cache it would hold cast weights of recomputed regions until the end of the forward pass."""
        amp = self.job["model"]["precision"] == "amp"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=amp, cache_enabled=cache)


@contextmanager
def unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Statistics of the model change by no evaluation."""
    kept = [(tensor, tensor.clone()) for tensor in tensors if not isinstance(tensor, nn.Parameter)]
    yield
    for tensor, before in kept:
        tensor.copy_(before)


def program_of(job: Job, *, evaluates: bool = False) -> ModuleType:
    """It must still be what the run was started with: a rank reads it later, and once more after a restart."""
    given_source = job.get("program")
    source = Path(job["module_path"]).read_bytes() if given_source is None else given_source.encode()
    given = job.get("digests", {}).get(MODULE)
    if given is not None and artifacts.digest_of("module", source) != given:
        what = "it has changed since the run was started"
        raise TrainError(what, where=MODULE, remedy="start the run again, and leave the file as it is while it begins")
    try:
        return load_program(job["module_path"], evaluates=evaluates, source=source)
    except CannotEvaluate as error:
        remedy = "set `evaluate.every` to 0, or draw with a dropout of torch.nn"
        raise TrainError(str(error), where=error.where, remedy=remedy) from error
