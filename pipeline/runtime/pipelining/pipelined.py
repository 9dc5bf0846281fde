"""A program that is a pipeline, on this rank: the partitions of its submesh, on the mesh of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from shardwright.pipeline.ir.layout import Layout, replicated
from shardwright.pipeline.ir.names import look_up
from shardwright.pipeline.runtime.pipelining.deferred_weight_grads import split_products
from shardwright.pipeline.runtime.pipelining.stage import (
    Around,
    Batch,
    Cut,
    RankPartition,
    ShardedStage,
    defers,
    row_of,
    schedule_of,
)
from shardwright.pipeline.runtime.pipelining.transfer import (
    ACROSS,
    Arriving,
    Shape,
    Submesh,
    Transfer,
    meeting_device,
    run,
)
from shardwright.pipeline.runtime.programs.mesh import set_meshes
from shardwright.pipeline.runtime.step.slices import Slices

Way = tuple[str, int, int]  # parameter, the partition that sends, the one that takes
ValueAt = Callable[[str, int], Tensor]  # a parameter, or what belongs to it, at a partition of this rank


class Places:
    """Where the partitions of a program are: submesh k of the devices is a run of ranks after that of submesh k - 1."""

    def __init__(self, program: Any) -> None:
        self.written: Sequence[Any] = program.PARTITIONS
        self.devices: tuple[int, ...] = program.DEVICES
        firsts = [sum(self.devices[:n]) for n in range(len(self.devices))]
        self.meshes = [
            Submesh(firsts[number % len(firsts)], tuple(partition.MESH.values()))
            for number, partition in enumerate(self.written)
        ]
        set_meshes([partition.MESH for partition in self.written[: len(firsts)]])
        self.submesh = next(n for n, mesh in enumerate(self.meshes) if dist.get_rank() in mesh.ranks)
        self.numbers = range(self.submesh, len(self.written), len(firsts))  # of this rank's partitions
        self.axes = list(self.written[self.submesh].MESH)
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
        """A rank of each submesh, of which torch learns the rank's submesh; messages go between any ranks."""
        own = None
        place = dist.get_rank() - self.meshes[self.submesh].first
        for number in range(max(self.devices)):
            ranks = [mesh.first + number % count for mesh, count in zip(self.meshes, self.devices, strict=False)]
            group = dist.new_group(ranks)
            own = group if number == place else own
        return own


class TiedParameters:
    """Parameters that several partitions hold: one parameter, with a copy and optimizer state at each.

    Every holder sums the gradients of all in one order, so that all take the same step and stay equal. `shapes` are
    those of whole parameters.
    """

    def __init__(
        self, program: Any, meshes: Sequence[Submesh], partitions: Sequence[RankPartition], shapes: Mapping[str, Shape]
    ) -> None:
        self.program, self.meshes, self.shapes = program, meshes, shapes
        self.holders: dict[str, tuple[int, ...]] = program.TIED
        self.own = {partition.number: partition for partition in partitions}
        ways = [(name, a, b) for name, own in self.holders.items() for a in own for b in own if a != b]
        self.tags = {way: tag for tag, way in enumerate(ways, 1)}
        self.transfers = {way: self._transfer(way, 2) for way in self._with_part(ways)}

    def sum_gradients(self) -> None:
        """After backward and before clipping."""
        arrived = self._exchange(self.transfers, self._gradient)
        for name, holders in self.holders.items():
            for number in self.own.keys() & set(holders):
                own = self._gradient(name, number)
                first, *others = (own if n == number else arrived[name, n, number] for n in holders)
                total = first.clone()
                for gradient in others:
                    total += gradient
                own.copy_(total)

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """All holders take the first one's values and optimizer state."""
        ways = self._with_part((name, own[0], b) for name, own in self.holders.items() for b in own[1:])
        self._take({way: self._transfer(way, 0) for way in ways}, lambda name, n: self.own[n].parameters[name].detach())
        states = [
            optimizer.state[p.updated[name]] for p in self.own.values() for name in self.holders if name in p.updated
        ]
        for key in [key for key, value in states[0].items() if isinstance(value, Tensor)] if states else []:

            def value(name: str, number: int, key: str = key) -> Tensor:
                found: Tensor = optimizer.state[self.own[number].updated[name]][key]
                return found

            self._take({way: self._of_state(way, value) for way in ways}, value)

    def _take(self, transfers: dict[Way, Transfer], value: ValueAt) -> None:
        for (name, _, number), found in self._exchange(transfers, value).items():
            value(name, number).copy_(found)

    def _of_state(self, way: Way, value: ValueAt) -> Transfer:
        """A number beside the parameter is whole everywhere; a shard may be empty between steps, so its shape tells
        nothing of its state.
        """
        name, source, target = way
        number = source if source in self.own else target
        found, layout = value(name, number), self._layout(name, number, 2)
        if found.ndim and found.shape == layout.local_shape(self.shapes[name], self.meshes[number].sizes):
            return self._transfer(way, 2)
        ends = [self.meshes[n].site(replicated(len(self.meshes[n].sizes))) for n in (source, target)]
        return Transfer(ends[0], ends[1], tuple(found.shape))

    def _gradient(self, name: str, number: int) -> Tensor:
        updated = self.own[number].updated[name]
        if updated.grad is None:
            updated.grad = torch.zeros_like(updated)
        return updated.grad

    def _with_part(self, ways: Iterable[Way]) -> list[Way]:
        """Those in which a partition of this rank sends or takes."""
        return [way for way in ways if {way[1], way[2]} & self.own.keys()]

    def _transfer(self, way: Way, column: int) -> Transfer:
        name, source, target = way
        ends = [self.meshes[n].site(self._layout(name, n, column)) for n in (source, target)]
        return Transfer(ends[0], ends[1], self.shapes[name])

    def _layout(self, name: str, number: int, column: int) -> Layout:
        """`column` is the layout's of a row of PARAMETERS."""
        return Layout.parse(row_of(self.program.PARTITIONS[number], name)[column])

    def _exchange(self, transfers: dict[Way, Transfer], value: ValueAt) -> dict[Way, Tensor]:
        """What this rank takes; all messages are under way at once."""
        ops: list[dist.P2POp] = []
        arriving: dict[Way, Arriving] = {}
        for way, transfer in transfers.items():
            name, source, target = way
            sent = value(name, source) if source in self.own else None
            if sent is not None:
                ops += transfer.send(sent, self.tags[way])
            if target in self.own:
                like = value(name, target)
                own, arriving[way] = transfer.receive(like.dtype, like.device, self.tags[way], sent)
                ops += own
        run(ops)
        return {way: tensor() for way, tensor in arriving.items()}


def smaller_of(program: Any) -> Sequence[Any]:
    """The partitions for micro-batches of fewer samples, where there are any."""
    found: Sequence[Any] = getattr(program, "SMALLER", program.PARTITIONS)
    return found


class RankPipeline:
    """`tensors` are this rank's submeshes by partition and name, `shapes` those of whole tensors of the model."""

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
            RankPartition(n, places.written[n], smaller[n], self.slices, tensors[n], around) for n in places.numbers
        ]
        ends = enumerate(pairwise(places.meshes))
        cuts: list[Cut | None] = [Cut(n, program.SENT[n], *own, self.passes, self.slices) for n, own in ends]
        cuts, column = [None, *cuts, None], places.column()
        self.stages = [
            ShardedStage(p, len(places.written), device, column, *cuts[p.number : p.number + 2])
            for p in self.partitions
        ]
        self.schedule = schedule_of(program.SCHEDULE, self.stages, self.passes)
        for partition in self.partitions:
            partition.defers = defers(self.schedule, partition.number)
        if any(partition.defers for partition in self.partitions):
            split_products(program)
        self.tied = TiedParameters(program, places.meshes, self.partitions, shapes)

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
        mean = torch.tensor(own, dtype=torch.float64, device=meeting_device(self.device))
        with record_function(ACROSS):
            dist.broadcast(mean, self.places.meshes[-1].first)
            return float(mean)
