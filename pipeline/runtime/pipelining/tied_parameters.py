"""Parameters that several partitions of a pipeline hold: one parameter, with a copy and optimizer state at each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.ir.layout import Layout, replicated
from pipeline.ir.names import look_up
from pipeline.runtime.pipelining.partition import Partition
from pipeline.runtime.pipelining.stage import Mesh
from pipeline.runtime.pipelining.transfer import Arriving, Shape, Site, Transfer, run
from pipeline.runtime.step.gradients import Row

Way = tuple[str, int, int]  # parameter, the partition that sends, the one that takes
Held = Callable[[str, int], Tensor]  # a parameter, or what belongs to it, at a partition of this rank


class Tied:
    """Every holder sums the gradients of all in one order, so that all take the same step and stay equal."""

    def __init__(
        self, program: Any, meshes: Sequence[Mesh], partitions: Sequence[Partition], shapes: Mapping[str, Shape]
    ) -> None:
        """`shapes` of whole parameters."""
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
        ways = list(self._with_part((name, own[0], b) for name, own in self.holders.items() for b in own[1:]))
        self._take({way: self._transfer(way, 0) for way in ways}, lambda name, n: self.own[n].parameters[name].detach())
        states = [
            optimizer.state[p.updated[name]] for p in self.own.values() for name in self.holders if name in p.updated
        ]
        for key in [key for key, value in states[0].items() if isinstance(value, Tensor)] if states else []:

            def value(name: str, number: int, key: str = key) -> Tensor:
                found: Tensor = optimizer.state[self.own[number].updated[name]][key]
                return found

            self._take({way: self._of_state(way, value) for way in ways}, value)

    def _take(self, transfers: dict[Way, Transfer], held: Held) -> None:
        for (name, _, number), found in self._exchange(transfers, held).items():
            held(name, number).copy_(found)

    def _of_state(self, way: Way, value: Held) -> Transfer:
        """A number beside the parameter is whole everywhere; a shard may be empty between steps, so its shape tells
        nothing of its state.
        """
        name, source, target = way
        number = source if source in self.own else target
        found, layout = value(name, number), Layout.parse(self._row(name, number)[2])
        if found.ndim and found.shape == layout.local_shape(self.shapes[name], self.meshes[number].sizes):
            return self._transfer(way, 2)
        ends = [self._site(n, replicated(len(self.meshes[n].sizes))) for n in (source, target)]
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
        """`column` is the layout's of a row of PARAMETERS."""
        name, source, target = way
        ends = [self._site(n, Layout.parse(self._row(name, n)[column])) for n in (source, target)]
        return Transfer(ends[0], ends[1], self.shapes[name])

    def _site(self, number: int, layout: Layout) -> Site:
        return Site(self.meshes[number].first, self.meshes[number].sizes, layout)

    def _row(self, name: str, number: int) -> Row:
        row: Row | None = look_up(self.program.PARTITIONS[number].PARAMETERS, name)
        assert row is not None
        return row

    def _exchange(self, transfers: dict[Way, Transfer], held: Held) -> dict[Way, Tensor]:
        """What this rank takes; all messages are under way at once."""
        ops: list[dist.P2POp] = []
        arriving: dict[Way, Arriving] = {}
        for way, transfer in transfers.items():
            name, source, target = way
            sent = held(name, source) if source in self.own else None
            if sent is not None:
                ops += transfer.send(sent, self.tags[way])
            if target in self.own:
                like = held(name, target)
                arriving[way] = transfer.receive(like.dtype, like.device, self.tags[way], sent)
                ops += arriving[way].ops
        run(ops)
        return {way: each.tensor() for way, each in arriving.items()}
