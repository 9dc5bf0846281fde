"""A program that is a pipeline, on this rank: the partitions of its piece of the devices, on the mesh of the piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from pipeline.ir.names import look_up
from pipeline.runtime.pipelining.deferred_weight_grads import split_products
from pipeline.runtime.pipelining.partition import Around, Batch, Partition
from pipeline.runtime.pipelining.stage import Cut, Mesh, Stage, puts_off, schedule_of
from pipeline.runtime.pipelining.tied_parameters import Tied
from pipeline.runtime.pipelining.transfer import ACROSS, Shape, meeting_device
from pipeline.runtime.programs.mesh import set_meshes
from pipeline.runtime.step.slices import Slices


class Places:
    """Where the partitions of a program are: piece k of the devices is a run of ranks after that of piece k - 1."""

    def __init__(self, program: Any) -> None:
        self.written: Sequence[Any] = program.PARTITIONS
        self.devices: tuple[int, ...] = program.DEVICES
        firsts = [sum(self.devices[:n]) for n in range(len(self.devices))]
        self.meshes = [
            Mesh(firsts[number % len(firsts)], tuple(partition.MESH.values()))
            for number, partition in enumerate(self.written)
        ]
        set_meshes([partition.MESH for partition in self.written[: len(firsts)]])
        self.piece = next(n for n, mesh in enumerate(self.meshes) if dist.get_rank() in mesh.ranks)
        self.numbers = range(self.piece, len(self.written), len(firsts))  # of this rank's partitions
        self.axes = list(self.written[self.piece].MESH)
        self._named = [
            dict.fromkeys([*partition.PARAMETERS, *getattr(partition, "BUFFERS", ())], True)
            for partition in self.written
        ]

    def holds(self, number: int, name: str) -> bool:
        """Whether a partition has a tensor of the model; the first has what none reads."""
        return bool(look_up(self._named[number], name)) or (not number and self.owner(name) == 0)

    def owner(self, name: str) -> int:
        """The first partition that holds it."""
        return next((n for n, named in enumerate(self._named) if look_up(named, name)), 0)

    def column(self) -> dist.ProcessGroup:
        """A rank of each piece, of which torch learns the rank's piece; messages go between any ranks."""
        own = None
        place = dist.get_rank() - self.meshes[self.piece].first
        for number in range(max(self.devices)):
            ranks = [mesh.first + number % count for mesh, count in zip(self.meshes, self.devices, strict=False)]
            group = dist.new_group(ranks)
            own = group if number == place else own
        return own


def smaller_of(program: Any) -> Sequence[Any]:
    """The partitions for micro-batches of fewer samples, where there are any."""
    found: Sequence[Any] = getattr(program, "SMALLER", program.PARTITIONS)
    return found


class Pipeline:
    """`tensors` are this rank's pieces by partition and name, `shapes` those of whole tensors of the model."""

    def __init__(
        self,
        program: Any,
        places: Places,
        tensors: Mapping[int, Mapping[str, Tensor]],
        shapes: Mapping[str, Shape],
        device: torch.device,
        around: Around,
    ) -> None:
        self.places, self.device = places, device
        self.passes: int = program.MICRO_BATCHES
        self.slices = Slices(program.SLICES)
        smaller = smaller_of(program)
        self.partitions = [
            Partition(n, places.written[n], smaller[n], self.slices, tensors[n], around) for n in places.numbers
        ]
        self.stages = self._stages(program)
        self.schedule = schedule_of(program.SCHEDULE, self.stages, self.passes)
        for partition in self.partitions:
            partition.puts_off = puts_off(self.schedule, partition.number)
        if any(partition.puts_off for partition in self.partitions):
            split_products(program)
        self.tied = Tied(program, places.meshes, self.partitions, shapes)

    def _stages(self, program: Any) -> list[Stage]:
        ends = pairwise(self.places.meshes)
        cuts = [Cut(n, program.SENT[n], *own, self.passes, self.slices) for n, own in enumerate(ends)]
        around: list[Cut | None] = [None, *cuts, None]
        count, column = len(self.places.written), self.places.column()
        return [Stage(p, count, self.device, column, *around[p.number : p.number + 2]) for p in self.partitions]

    def run_passes(self, batches: Mapping[int, Sequence[Callable[[], Batch]]]) -> list[Tensor]:
        """Forward and backward of all micro-batches of a step, given by partition; then the gradients are there.

        Each batch is asked for when its turn comes. The losses come back where the last partition is.
        """
        self.start(batches)
        parts = torch.tensor(self.slices.parts(self.passes), dtype=torch.float64)
        self.schedule.step(target=parts, return_outputs=False)
        for partition in self.partitions:
            partition.gradients.wait()
        self.tied.sum_gradients()
        return self.stages[-1].losses

    def start(self, batches: Mapping[int, Sequence[Callable[[], Batch]]]) -> None:
        for partition in self.partitions:
            partition.start(batches[partition.number])

    def publish(self) -> None:
        """After the optimizer."""
        for partition in self.partitions:
            partition.gradients.publish()

    def loss(self, chunk: int, batch: Mapping[int, Batch], programs: Mapping[int, Any]) -> float:
        """Of a slice of a batch, by these programs of the partitions, without a gradient, on all ranks."""
        found = None
        for stage in self.stages:
            number = stage.partition.number
            found = stage.loss(chunk, batch[number], programs[number])
        return self.everywhere([] if found is None else [found])

    def everywhere(self, losses: Sequence[Tensor]) -> float:
        """The mean of the last partition's over all samples, on all ranks."""
        own = self.slices.mean(map(float, losses)) if losses else 0.0
        told = torch.tensor(own, dtype=torch.float64, device=meeting_device(self.device))
        with record_function(ACROSS):
            dist.broadcast(told, self.places.meshes[-1].first)
            return float(told)
