"""The plan's program as a pipeline (pipeline/runtime/pipelining/pipelined.py), on this rank's pieces of the model.

| a rank of piece k holds                       | with the others it                                     |
|-----------------------------------------------|--------------------------------------------------------|
| partitions k, k + pieces, ... on its own mesh | sends what crosses cuts, and gradients back            |
| parameters and buffers that these read        | sums gradients of tied parameters, and squares to clip |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from pipeline.base.instantiate import instantiate
from pipeline.ir.layout import Layout
from pipeline.runtime.compiler.compiled import use_kernels_of
from pipeline.runtime.pipelining.pipelined import Places, RankPipeline, smaller_of
from pipeline.runtime.pipelining.stage import RankPartition
from pipeline.runtime.pipelining.transfer import ACROSS, meeting_device
from pipeline.runtime.programs.collectives import as_real
from pipeline.runtime.programs.random import seed_apart
from pipeline.runtime.step.buckets import Row
from pipeline.runtime.step.gradients import Clipping
from pipeline.runtime.step.running_stats import statistics_of
from pipeline.runtime.step.slices import Slices
from pipeline.user.batches import Batches
from pipeline.user.optimizer import build_optimizer, refuse_mixing, refuse_moving_zeros
from pipeline.user.weights import write_weights
from stages.train.engines.engine import Batch, Held, Job
from stages.train.engines.precision import Precision
from stages.train.engines.program import program_of
from stages.train.engines.tensors import OwnTensors, Stored
from stages.train.held_out import held_out_batches
from stages.train.ranks.watchdog import Beat, unwatched, with_beats
from stages.train.snapshots.optimizer_state import optimizer_state

Programs = dict[int, Any]  # by the number of their partition


class Piped:
    def __init__(self, job: Job) -> None:
        program = program_of(job)
        use_kernels_of(program)
        self.job, self.slices = job, Slices(program.SLICES)
        self.device: torch.device = program.DEVICE
        self.passes: int = program.MICRO_BATCHES
        self.precision = Precision(self.device, job["model"]["precision"])
        self.places = Places(program)
        self.own = {number: self._own_tensors(number) for number in self.places.numbers}
        first = self.own[self.places.piece]
        self.shapes, self.held_whole, self.not_captured = first.shapes, first.held_whole, ""
        self.stream = self.places.piece
        self._seed()
        tensors = {number: own.tensors for number, own in self.own.items()}
        self.pipeline = RankPipeline(program, self.places, tensors, self.shapes, self.device, self.precision.autocast)
        self.partitions = self.pipeline.partitions
        held = (item for own in tensors.values() for item in own.items())
        self.statistics = statistics_of(job["train"]["batch_norm"], held)
        rows = [(updated, part.rows[name]) for part in self.partitions for name, updated in part.updated.items()]
        nothing: tuple[nn.Parameter, Row] = nn.Parameter(torch.empty(0, device=self.device)), ("", "", "")
        rows = rows or [nothing]  # an optimizer must have something
        self.clipping = self._clipping(rows)
        where = f"{job['where']['train']}: optimizer"
        stored = [(own.stored, name) for own in self.own.values() for name in own.tensors]
        if split := next((name for one, name in stored if one.splits_state(name)), None):
            refuse_mixing(job["train"]["optimizer"], where, split, self.device.type)
        if padded := next((name for one, name in stored if one.pads(name, self.shapes[name])), None):
            refuse_moving_zeros(job["train"]["optimizer"], where, padded, self.device.type)
        self.optimizer = build_optimizer(job["train"]["optimizer"], where, [updated for updated, _ in rows])
        self._batches = self._own_batches()
        self.samples = self.slices.start(self.passes)
        self.held_out: list[Batch] = []
        if job["train"]["evaluate"]["every"]:
            self.held_out, self.evaluating = self._held_out(), self._evaluating()

    # ---- what is held

    def _own_tensors(self, number: int) -> OwnTensors:
        torch.manual_seed(self.job["train"]["seed"])
        where = f"{self.job['where']['train']}: init_from"
        stored = Stored(self.places.written[number].PARAMETERS, self.places.axes)
        wanted = partial(self.places.holds, number)
        return OwnTensors(self._build, stored, self.precision.tensor, self.job["train"]["init_from"], where, wanted)

    def _build(self) -> nn.Module:
        model: nn.Module = instantiate(self.job["model"]["module"], f"{self.job['where']['model']}: module")
        return model.train()

    def _seed(self) -> None:
        """The ranks of a piece draw alike, and not what another piece draws."""
        if self.places.piece:
            torch.manual_seed(seed_apart(self.job["train"]["seed"], self.places.piece))

    def _clipping(self, rows: Sequence[tuple[nn.Parameter, Row]]) -> Clipping | None:
        """A tied parameter counts where it is held first."""
        limit = self.job["train"]["clip_norm"]
        if limit is None:
            return None
        clipping = Clipping([updated for updated, _ in rows], [row for _, row in rows], self.places.axes, limit)
        later = {id(p.updated[name]) for p in self.partitions for name in p.updated if not self._owns(p, name)}
        clipping.counted = [updated for updated in clipping.counted if id(updated) not in later]
        return clipping

    def _owns(self, partition: RankPartition, name: str) -> bool:
        return self.places.owner(name) == partition.number

    # ---- batches

    def _inputs(self) -> dict[int, tuple[Job, dict[str, Layout]]]:
        """For each partition that has inputs: the job as if the model had these alone, and how they lie."""
        specs = self.job["model"]["batch"]
        found = {}
        for number in self.places.numbers:
            layouts = {name: Layout.parse(text) for name, text in self.places.written[number].INPUTS.items()}
            model = {**self.job["model"], "batch": {name: specs[name] for name in layouts}}
            if layouts:
                found[number] = {**self.job, "model": model}, layouts
        return found

    def _own_batches(self) -> dict[int, Batches]:
        dataset = instantiate(self.job["data"]["dataset"], f"{self.job['where']['data']}: dataset")
        axes, slices = self.places.axes, self.slices
        return {n: Batches(dataset, *given, axes, slices=slices) for n, given in self._inputs().items()}

    def _held_out(self) -> list[Batch]:
        """The data to evaluate on, in slices of batches."""
        read = {n: held_out_batches(*given, self.places.axes, self.slices) for n, given in self._inputs().items()}
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, max(map(len, read.values()), default=0))  # some partitions have no inputs
        return [_numbered({n: own[place] for n, own in read.items()}) for place in range(max(counts))]

    def _evaluating(self) -> tuple[Programs, Programs]:
        """The partitions as the model is when it evaluates; the second ones are for smaller micro-batches."""
        program = program_of(self.job, evaluates=True)
        both = program.PARTITIONS, smaller_of(program)
        larger, smaller = ({p.number: own[p.number](p.tensors) for p in self.partitions} for own in both)
        return larger, smaller

    def batches(self, step: int) -> list[Batch]:
        return [self._batch(step * self.passes + n) for n in range(self.passes)]

    def _batch(self, place: int) -> Batch:
        """Of all partitions of this rank, by the partition's number and the input's name."""
        return _numbered({number: batches[place] for number, batches in self._batches.items()})

    def on_device(self, batch: Batch) -> Batch:
        return self.precision.batch(batch)

    def given(self, number: int, batch: Batch) -> Batch:
        """A partition's inputs, on the device."""
        start = f"{number}."
        own = {name.removeprefix(start): tensor for name, tensor in batch.items() if name.startswith(start)}
        return self.on_device(own)

    # ---- the step

    def step(self, first: Batch, later: list[Batch]) -> float:
        """But for the first, each batch goes to the device when its turn comes."""
        batches = [first, *later]
        given = {number: [partial(self.given, number, batch) for batch in batches] for number in self.places.numbers}
        with self.statistics():
            losses = self.pipeline.run_passes(given)
        if self.clipping is not None:
            with record_function(ACROSS):
                self.clipping.clip()
        self.optimizer.step()
        self.pipeline.publish()
        return self.pipeline.everywhere(losses)

    def evaluate(self, beat: Beat = unwatched) -> float:
        assert self.held_out, "evaluate.every is 0"
        return self.slices.mean(self._loss_of(*one) for one in enumerate(with_beats(self.held_out, beat)))

    def _loss_of(self, place: int, batch: Batch) -> float:
        given = {number: self.given(number, batch) for number in self.places.numbers}
        chunk = place % len(self.slices.samples)
        return self.pipeline.loss(chunk, given, self.evaluating[self.slices.is_smaller(chunk)])

    # ---- what it all comes to

    def resident(self) -> list[Tensor]:
        found = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        for partition in self.partitions:
            gradients = [p.grad for p in partition.parameters.values() if p.grad is not None]
            found += [*partition.tensors.values(), *gradients, *partition.gradients.buffers()]
        return found

    def state(self) -> Iterator[Held]:
        """A tied parameter is told by each rank that holds it, of several partitions there by the first.

        `restored` gives what the first holder of all has to the others.
        """
        told: set[str] = set()
        for partition in self.partitions:
            names = [name for name in partition.tensors if name not in told]
            told.update(names)
            for name in names:
                tensor = partition.tensors[name]
                layout = self.own[partition.number].stored.layout(name, tensor)
                yield Held(f"weights/{name}", tensor.detach(), self.shapes[name], layout, tuple(self.places.axes))
            for name in (name for name in names if name in partition.updated):
                yield from self._optimizer_state(partition, name)

    def _optimizer_state(self, partition: RankPartition, name: str) -> Iterator[Held]:
        about = name, self.shapes[name], Layout.parse(partition.rows[name][2])
        axes, where = tuple(self.places.axes), self.job["where"]["train"]
        yield from optimizer_state(self.optimizer, partition.updated[name], about, axes, where)

    def restored(self) -> None:
        """The other holders of a tied parameter take what the first has."""
        self.pipeline.tied.take(self.optimizer)

    def export(self, path: Path, beat: Beat = unwatched) -> None:
        own = self.own[self.places.piece]
        dtypes = {name: self.precision.tensor(torch.empty(0, dtype=dtype)).dtype for name, dtype in own.dtypes.items()}
        specs = {key: (dtypes[name], self.shapes[name]) for key, name in own.state.items()}
        whole = with_beats((self._whole(name, *specs[key]) for key, name in own.state.items()), beat)
        if dist.get_rank() == 0:
            write_weights(path, specs, whole, {"format": "pt"})
        else:
            for _ in whole:
                pass

    def _whole(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """On the first rank of all; what others return is not read."""
        number, rank = self.places.owner(name), dist.get_rank()
        source = self.places.meshes[number].first
        found = self.own[number].whole(name) if number in self.own else torch.empty(0)
        if source and rank == source:
            dist.send(as_real(found.to(meeting_device(self.device)).contiguous()), 0)
        elif source and rank == 0:
            found = torch.empty(shape, dtype=dtype, device=meeting_device(self.device))
            dist.recv(as_real(found), source)
        return found


def _numbered(batches: Mapping[int, Batch]) -> Batch:
    """Of several partitions in one."""
    return {f"{number}.{name}": x for number, batch in batches.items() for name, x in batch.items()}
