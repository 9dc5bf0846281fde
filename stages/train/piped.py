"""The plan's program as a pipeline: this rank has the partitions of its piece of the devices.

| a rank of piece k holds                       | with the others it                                     |
|-----------------------------------------------|--------------------------------------------------------|
| partitions k, k + pieces, ... on its own mesh | sends what crosses cuts, and gradients back (stage.py) |
| parameters and buffers that these read        | sums gradients of tied parameters, and squares to clip |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.instantiate import instantiate
from pipeline.ir.layout import Layout
from pipeline.ir.names import look_up
from pipeline.optimizer import build_optimizer
from pipeline.runtime.batches import Batches
from pipeline.runtime.clipping import Clipping
from pipeline.runtime.gradients import Row
from pipeline.runtime.mesh import set_meshes
from pipeline.runtime.source import load_program
from pipeline.runtime.transfer import meeting_device
from pipeline.weights import write_weights
from stages.train.engine import Batch, Held, Job
from stages.train.partition import Partition, names_of, owners
from stages.train.stage import Cut, Mesh, Stage, schedule_of
from stages.train.tensors import OwnTensors, Stored
from stages.train.tied import Tied

SPREAD = 0x9E3779B97F4A7C15  # so that the seeds of pieces have nothing in common


def is_pipeline(module_path: str) -> bool:
    return hasattr(load_program(module_path), "PARTITIONS")


class Piped:
    def __init__(self, job: Job) -> None:
        self.job = job
        program = load_program(job["module_path"])
        self.written: Sequence[Any] = program.PARTITIONS
        self.device: torch.device = program.DEVICE
        self.passes: int = program.MICRO_BATCHES
        self.precision: str = job["model"]["precision"]
        self.meshes = _meshes(program)
        self.pieces = len(program.DEVICES)
        set_meshes([partition.MESH for partition in self.written[: self.pieces]])
        self.piece = next(n for n, mesh in enumerate(self.meshes) if dist.get_rank() in mesh.ranks)
        self.partitions = self._partitions()
        self.stages = self._stages(program)
        self.schedule = schedule_of(program.SCHEDULE, self.stages, self.passes)
        self.tied = Tied(program, self.meshes, self.partitions)
        rows = [(updated, part.rows[name]) for part in self.partitions for name, updated in part.updated.items()] or [
            (nn.Parameter(torch.empty(0, device=self.device)), ("", "", ""))
        ]  # an optimizer must have something
        self.clipping = self._clipping(rows)
        where = f"{job['where']['train']}: optimizer"
        self.optimizer = build_optimizer(job["train"]["optimizer"], where, [updated for updated, _ in rows])
        self._batches = self._own_batches()
        self.samples = next(iter(job["model"]["batch"].values()))["shape"][0] * self.passes

    # ---- what is held

    def _partitions(self) -> list[Partition]:
        found = []
        for number in range(self.piece, len(self.written), self.pieces):
            torch.manual_seed(self.job["train"]["seed"])
            found.append(Partition(number, self.written[number], self._own(number), self._autocast))
        self.held_whole = found[0].own.held_whole
        self.owners = owners(self.written, list(found[0].own.shapes))
        if self.piece:  # the ranks of a piece draw alike, and not what the piece before them draws
            torch.manual_seed((self.job["train"]["seed"] + self.piece * SPREAD) % 2**62)
        return found

    def _own(self, number: int) -> OwnTensors:
        where = f"{self.job['where']['train']}: init_from"
        written = self.written[number]
        stored = Stored(written.PARAMETERS, list(written.MESH))
        tables = [dict.fromkeys(names_of(partition), True) for partition in self.written]

        def wanted(name: str) -> bool:
            """What no partition reads is the first one's, so that it is not lost."""
            return bool(look_up(tables[number], name)) or (not number and not any(look_up(t, name) for t in tables))

        return OwnTensors(self._build, stored, self._in_precision, self.job["train"]["init_from"], where, wanted)

    def _build(self) -> nn.Module:
        model: nn.Module = instantiate(self.job["model"]["module"], f"{self.job['where']['model']}: module")
        return model.train()

    def _stages(self, program: Any) -> list[Stage]:
        count = len(self.written)
        ends = zip(self.meshes, self.meshes[1:], strict=False)
        cuts = [Cut(n, program.SENT[n], *own, self.passes) for n, own in enumerate(ends)]
        around: list[Cut | None] = [None, *cuts, None]
        column = self._column(program.DEVICES)
        return [Stage(p, count, self.device, column, *around[p.number : p.number + 2]) for p in self.partitions]

    def _column(self, devices: Sequence[int]) -> dist.ProcessGroup:
        """A rank of each piece, of which torch learns the rank's piece; messages go between any ranks."""
        own = None
        place = dist.get_rank() - self.meshes[self.piece].first
        for number in range(max(devices)):
            ranks = [mesh.first + number % count for mesh, count in zip(self.meshes, devices, strict=False)]
            group = dist.new_group(ranks)
            own = group if number == place else own
        assert own is not None
        return own

    def _clipping(self, rows: Sequence[tuple[nn.Parameter, Row]]) -> Clipping | None:
        """A tied parameter counts where it is held first."""
        limit = self.job["train"]["clip_norm"]
        if limit is None:
            return None
        updated = [parameter for parameter, _ in rows]
        clipping = Clipping(updated, [row for _, row in rows], list(self.written[self.piece].MESH), limit)
        later = {id(p.updated[name]) for p in self.partitions for name in p.updated if self.owners[name] != p.number}
        clipping.counted = [p for p in clipping.counted if id(p) not in later]
        return clipping

    # ---- batches

    def _own_batches(self) -> list[Batches | None]:
        """For each partition its inputs, as they lie there."""
        dataset = instantiate(self.job["data"]["dataset"], f"{self.job['where']['data']}: dataset")
        specs = self.job["model"]["batch"]
        found: list[Batches | None] = []
        for partition in self.partitions:
            written = self.written[partition.number]
            layouts = {name: Layout.parse(text) for name, text in written.INPUTS.items()}
            model = {**self.job["model"], "batch": {name: specs[name] for name in layouts}}
            given = {**self.job, "model": model}
            found.append(Batches(dataset, given, layouts, list(written.MESH)) if layouts else None)
        return found

    def batches(self, step: int) -> list[Batch]:
        return [self._batch(step * self.passes + n) for n in range(self.passes)]

    def _batch(self, number: int) -> Batch:
        """Of all partitions of this rank, by the partition's number and the input's name."""
        return {
            f"{partition.number}.{name}": tensor
            for partition, batches in zip(self.partitions, self._batches, strict=True)
            for name, tensor in (batches[number] if batches else {}).items()
        }

    def on_device(self, batch: Batch) -> Batch:
        return {name: self._in_precision(tensor) for name, tensor in batch.items()}

    def _in_precision(self, tensor: Tensor) -> Tensor:
        """On the device; floating numbers in bfloat16 where that is what is trained in."""
        half = self.precision == "bf16" and tensor.is_floating_point()
        return tensor.to(self.device, torch.bfloat16 if half else None)

    def _autocast(self) -> torch.autocast:
        """Without its cache, which would hold cast weights of recomputed regions until the end of the forward pass."""
        amp = self.precision == "amp"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=amp, cache_enabled=False)

    # ---- the step

    def step(self, first: Batch, later: list[Batch]) -> float:
        """But for the first, each batch goes to the device when its turn comes."""
        losses = self.run_passes([first, *later])
        if self.clipping is not None:
            self.clipping.clip()
        self.optimizer.step()
        for partition in self.partitions:
            partition.gradients.publish()
        return self._everywhere(sum(map(float, losses)) / self.passes if losses else 0.0)

    def run_passes(self, batches: list[Batch]) -> list[Tensor]:
        """Forward and backward of all; then the gradients are there. The losses, where the last partition is."""
        self.start(batches)
        self.schedule.step(target=torch.empty(self.passes), return_outputs=False)
        for partition in self.partitions:
            partition.gradients.wait()
        self.tied.sum_gradients()
        return self.stages[-1].losses

    def start(self, batches: list[Batch]) -> None:
        for partition in self.partitions:
            partition.start([partial(self._given, partition.number, batch) for batch in batches])

    def _given(self, number: int, batch: Batch) -> Batch:
        """A partition's inputs, on the device."""
        start = f"{number}."
        own = {name.removeprefix(start): tensor for name, tensor in batch.items() if name.startswith(start)}
        return self.on_device(own)

    def loss(self, batch: Batch) -> float:
        found = None
        for stage in self.stages:
            found = stage.loss(self._given(stage.partition.number, batch))
        return self._everywhere(0.0 if found is None else float(found))

    def _everywhere(self, loss: float) -> float:
        """The last partition's, on all ranks."""
        told = torch.tensor(loss, dtype=torch.float64, device=meeting_device(self.device))
        dist.broadcast(told, self.meshes[len(self.written) - 1].first)
        return float(told)

    # ---- what it all comes to

    def resident(self) -> list[Tensor]:
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        found = list(state)
        for partition in self.partitions:
            gradients = [p.grad for p in partition.parameters.values() if p.grad is not None]
            found += [*partition.own.tensors.values(), *gradients, *partition.gradients.buffers()]
        return found

    def state(self) -> Iterator[Held]:
        """A tied parameter is the first partition's that holds it; `take_tied` gives it to the others."""
        for partition in self.partitions:
            yield from partition.state(self.optimizer, partial(self._is_owner, partition.number))

    def _is_owner(self, number: int, name: str) -> bool:
        return self.owners[name] == number

    def take_tied(self) -> None:
        """After the state was written into: the other holders of a tied parameter take what the first has."""
        self.tied.take(self.optimizer)

    def export(self, path: Path) -> None:
        own = self.partitions[0].own
        dtypes = {name: self._in_precision(torch.empty(0, dtype=dtype)).dtype for name, dtype in own.dtypes.items()}
        specs = {key: (dtypes[name], own.shapes[name]) for key, name in own.state.items()}
        whole = (self._whole(name, *specs[key]) for key, name in own.state.items())
        if dist.get_rank() == 0:
            write_weights(path, specs, whole, {"format": "pt"})
        else:
            for _ in whole:
                pass

    def _whole(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """On the first rank of all; what others return is not read."""
        number, rank = self.owners[name], dist.get_rank()
        holder = next((p for p in self.partitions if p.number == number), None)
        source = self.meshes[number].first
        found = holder.own.whole(name) if holder else torch.empty(0)
        if source and rank == source:
            dist.send(found.to(meeting_device(self.device)).contiguous(), 0)
        elif source and rank == 0:
            found = torch.empty(shape, dtype=dtype, device=meeting_device(self.device))
            dist.recv(found, source)
        return found


def _meshes(program: Any) -> list[Mesh]:
    """Of all partitions."""
    firsts = [sum(program.DEVICES[:n]) for n in range(len(program.DEVICES))]
    return [
        Mesh(firsts[number % len(firsts)], tuple(partition.MESH.values()))
        for number, partition in enumerate(program.PARTITIONS)
    ]
