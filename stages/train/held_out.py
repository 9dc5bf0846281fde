"""Data that is not trained on, and the loss on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pipeline.base.errors import TrainError
from pipeline.base.instantiate import instantiate
from pipeline.ir.layout import Layout
from pipeline.runtime.step.slices import Slices
from pipeline.user.batches import Batches
from stages.train.engines.engine import Batch, Job
from stages.train.ranks.watchdog import Beat, with_beats


def held_out_batches(
    job: Job, layouts: Mapping[str, Layout], axes: list[str], slices: Slices | None = None
) -> list[Batch]:
    """This rank's part of them, always the same ones, in the data's order; no sample is in two.

    Where the model's batch is cut into slices, these one after another.

    They are few and read again and again, so they stay on the host. Whatever they draw, training does not see it.
    """
    with torch.random.fork_rng(devices=[]):
        return _read(job, layouts, axes, slices)


def _read(job: Job, layouts: Mapping[str, Layout], axes: list[str], slices: Slices | None) -> list[Batch]:
    data = job["data"]
    dataset = instantiate(data["held_out"], f"{job['where']['data']}: held_out")
    batches = Batches(dataset, {**job, "data": {**data, "shuffle": False}}, layouts, axes, "held_out", slices)
    if batches.length < batches.size:
        raise TrainError(
            f"it has {batches.length} samples, and a batch of the model {batches.size}",
            where=batches.where,
            remedy="hold out more of them",
        )
    count = min(job["train"]["evaluate"]["batches"], batches.length // batches.size)
    return [batches[number] for number in range(count * len(batches.slices.samples))]


@dataclass(frozen=True)
class HeldOut:
    batches: list[Batch]
    loss: Callable[[Batch], float]  # of a batch on the device, the same on all ranks

    def mean_loss(self, on_device: Callable[[Batch], Batch], beat: Beat) -> float:
        return sum(self.loss(on_device(batch)) for batch in with_beats(self.batches, beat)) / len(self.batches)
