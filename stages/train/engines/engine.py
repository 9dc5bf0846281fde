"""What the loop trains with: the plan's program, or another way to take the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.ir.layout import Layout
from stages.train.ranks.watchdog import Beat, unwatched

Batch = dict[str, Tensor]  # of one micro-batch, as far as this rank needs it
Job = dict[str, Any]  # what run.py gives every rank


@dataclass(frozen=True)
class Held:
    """This rank's piece of a tensor of the training state."""

    name: str  # weights/layers.0.up.weight, optimizer/layers.0.up.weight/exp_avg
    piece: Tensor
    shape: tuple[int, ...]  # of the whole
    layout: Layout
    axes: tuple[str, ...]  # of the mesh that the layout is for, by the names that pipeline.runtime.programs.mesh knows
    drifts: bool = False  # replicas differ by design, and those of rank 0 count


class Engine(Protocol):
    device: torch.device
    passes: int  # forward and backward passes of a step, each on the next batch
    samples: int  # of a step
    optimizer: torch.optim.Optimizer
    held_whole: str  # why every rank held the whole model while it was built, or nothing
    not_captured: str  # why a step that was to be a CUDA graph is none, or nothing
    stream: int  # of random numbers: ranks with the same number draw alike, others do not

    def batches(self, step: int) -> list[Batch]:
        """Of a step, in the order of its passes; on the host."""
        ...

    def on_device(self, batch: Batch) -> Batch: ...

    def step(self, first: Batch, later: list[Batch]) -> float:
        """The mean loss of the passes, the same on all ranks; the first batch is on the device, later ones are not."""
        ...

    def evaluate(self, beat: Beat = unwatched) -> float:
        """The mean loss of the held-out batches, as the model is when it evaluates; nothing changes by it.

        A beat with each batch says that it goes on.
        """
        ...

    def resident(self) -> list[Tensor]:
        """What stays between steps: parameters, gradients and optimizer state."""
        ...

    def state(self) -> Iterator[Held]:
        """Parameters, buffers and the optimizer's tensors; read them or write into the pieces."""
        ...

    def restored(self) -> None:
        """After the pieces of the state were written into: what is held twice follows."""
        ...

    def export(self, path: Path, beat: Beat = unwatched) -> None:
        """A file of the whole weights by the names of the model's state dict; all ranks do this together.

        A beat with each tensor says that it goes on.
        """
        ...
