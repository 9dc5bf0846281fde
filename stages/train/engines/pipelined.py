"""The plan's program as a pipeline (pipeline/runtime/pipelining/pipelined.py), on this rank's shards of the model.

| a rank of device group k holds                | with the others it                                     |
|-----------------------------------------------|--------------------------------------------------------|
| partitions k, k + groups, ... on its own mesh | sends what crosses cuts, and gradients back            |
| parameters and buffers that these read        | sums gradients of tied parameters, and squares to clip |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.runtime.compiler.compiled import use_kernels_of
from shardwright.pipeline.runtime.pipelining.pipelined import Places, RankPipeline, smaller_of
from shardwright.pipeline.runtime.pipelining.transfer import ACROSS, meeting_device
from shardwright.pipeline.runtime.programs.collectives import as_real
from shardwright.pipeline.runtime.programs.random import seed_apart
from shardwright.pipeline.runtime.step.buckets import Row
from shardwright.pipeline.runtime.step.gradients import Clipping
from shardwright.pipeline.runtime.step.running_stats import statistics_of
from shardwright.pipeline.runtime.step.slices import Slices
from shardwright.pipeline.user.weights import Shape
from shardwright.stages.train.data import held_out_batches
from shardwright.stages.train.engines.engine import Batch, Engine, Inputs, StateShard, program_of
from shardwright.stages.train.engines.tensors import OwnTensors, StoredRows, refuse_optimizer
from shardwright.stages.train.job import Job
from shardwright.stages.train.ranks.joining import gathered
from shardwright.stages.train.ranks.watchdog import Beat, unwatched, with_beats


class PipelinedEngine(Engine):
    def __init__(self, job: Job) -> None:
        program = program_of(job)
        use_kernels_of(program)
        super().__init__(job, program.DEVICE, program.MICRO_BATCHES)
        self.slices, self.places = Slices(program.SLICES), Places(program)
        rows = {
            n: StoredRows.of(program, self.places.written[n].PARAMETERS, self.places.axes) for n in self.places.numbers
        }
        self.own = {n: OwnTensors(self, stored, partial(self.places.holds, n)) for n, stored in rows.items()}
        first = self.own[self.places.submesh]
        self.shapes, self.held_whole, self.stream = first.shapes, first.held_whole, self.places.submesh
        if self.stream:  # the ranks of a device group draw alike, and not what another group draws
            torch.manual_seed(seed_apart(job["train"]["seed"], self.stream))
        tensors = {number: own.tensors for number, own in self.own.items()}
        self.pipeline = RankPipeline(program, self.places, tensors, self.shapes, self.device, self.autocast)
        self.partitions = self.pipeline.partitions
        named = (item for own in tensors.values() for item in own.items())
        self.statistics = statistics_of(job["train"]["running_stats"], named)
        updated = [(own, part.rows[name]) for part in self.partitions for name, own in part.updated.items()]
        nothing: tuple[nn.Parameter, Row] = nn.Parameter(torch.empty(0, device=self.device)), ("", "", "")
        updated = updated or [nothing]  # an optimizer must have something
        self.clipping = self._clipping(updated)
        refuse_optimizer(self, [(own.stored, n, self.shapes[n]) for own in self.own.values() for n in own.tensors])
        self.optimizer = self.build_optimizer([own for own, _ in updated])
        self._readers = self.readers(self._inputs(), self.places.axes, self.slices)
        self.samples = self.slices.start(self.passes)
        if job["train"]["evaluate"]["every"]:
            self.held_out = self._held_out()
            evaluating = program_of(job, evaluates=True)
            both = evaluating.PARTITIONS, smaller_of(evaluating)  # the second ones are for smaller micro-batches
            self.evaluating = [{p.number: own[p.number](p.tensors) for p in self.partitions} for own in both]

    def _clipping(self, rows: Sequence[tuple[nn.Parameter, Row]]) -> Clipping | None:
        """A tied parameter counts where it is held first."""
        limit = self.job["train"]["clip_norm"]
        if limit is None:
            return None
        clipping = Clipping([updated for updated, _ in rows], [row for _, row in rows], self.places.axes, limit)
        updated = ((p.number, name, own) for p in self.partitions for name, own in p.updated.items())
        later = {id(own) for number, name, own in updated if self.places.owner(name) != number}
        clipping.counted = [updated for updated in clipping.counted if id(updated) not in later]
        return clipping

    # ---- batches: of all partitions of this rank, by the partition's number and the input's name

    def _inputs(self) -> dict[int, Inputs]:
        """For each partition that has inputs."""
        specs = self.job["model"]["batch"]
        found = {}
        for number in self.places.numbers:
            layouts = {name: Layout.parse(text) for name, text in self.places.written[number].INPUTS.items()}
            if layouts:
                job = self.job.copy()
                job["model"] = {**self.job["model"], "batch": {name: specs[name] for name in layouts}}
                found[number] = job, layouts
        return found

    def _held_out(self) -> list[Batch]:
        """The data to evaluate on, in slices of batches."""
        read = {n: held_out_batches(*given, self.places.axes, self.slices) for n, given in self._inputs().items()}
        count = max(gathered(max(map(len, read.values()), default=0)))  # some partitions have no inputs
        return [_numbered({n: own[place] for n, own in read.items()}) for place in range(count)]

    def batch(self, number: int) -> Batch:
        return _numbered({partition: batches[number] for partition, batches in self._readers.items()})

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
        for own in self.own.values():
            own.take_first()
        return self.slices.mean(self.loss_of(*each) for each in enumerate(with_beats(self.held_out, beat)))

    def loss_of(self, place: int, batch: Batch) -> float:
        given = {number: self.given(number, batch) for number in self.places.numbers}
        number = place % len(self.slices.samples)
        return self.pipeline.loss(number, given, self.evaluating[self.slices.is_smaller(number)])

    # ---- what it all comes to

    def tensors(self) -> Iterable[Tensor]:
        return [tensor for p in self.partitions for tensor in (*p.tensors.values(), *p.gradients.buffers())]

    def state(self) -> Iterator[StateShard]:
        """A tied parameter is listed by each rank that holds it, of several partitions there by the first.

        `restored` gives what the first holder of all has to the others.
        """
        listed: set[str] = set()
        for partition in self.partitions:
            names = [name for name in partition.tensors if name not in listed]
            listed.update(names)
            yield from self.own[partition.number].shards(self, partition.updated, names)

    def restored(self) -> None:
        """The other holders of a tied parameter take what the first has."""
        self.pipeline.tied.take(self.optimizer)

    def exported(self) -> tuple[dict[str, str], dict[str, tuple[torch.dtype, Shape]]]:
        own = self.own[self.places.submesh]
        dtypes = {name: self.placed(torch.empty(0, dtype=dtype)).dtype for name, dtype in own.dtypes.items()}
        return own.state, {name: (dtype, self.shapes[name]) for name, dtype in dtypes.items()}

    def whole(self, name: str) -> Tensor:
        """On the first rank of all; what others return is not read."""
        number, rank = self.places.owner(name), dist.get_rank()
        source = self.places.meshes[number].first
        found = self.own[number].whole(name) if number in self.own else torch.empty(0)
        if source and rank == source:
            dist.send(as_real(found.to(meeting_device(self.device)).contiguous()), 0)
        elif source and rank == 0:
            dtype = self.placed(torch.empty(0, dtype=self.own[self.places.submesh].dtypes[name])).dtype
            found = torch.empty(self.shapes[name], dtype=dtype, device=meeting_device(self.device))
            dist.recv(as_real(found), source)
        return found


def _numbered(batches: Mapping[int, Batch]) -> Batch:
    """Of several partitions in one."""
    return {f"{number}.{name}": x for number, batch in batches.items() for name, x in batch.items()}
