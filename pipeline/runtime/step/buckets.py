"""Buckets: gradients of several parameters that are summed, or scattered, by one collective.

They follow the parameters in reverse, the order in which backward finishes them; the first is small so that the first
message leaves early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardwright.pipeline.ir.buckets import bucket_members
from shardwright.pipeline.ir.layout import Layout, Place
from shardwright.pipeline.runtime.context import PiggybackSlot
from shardwright.pipeline.runtime.programs.collectives import all_gather_into, local_shard, own_part, room, sum_own
from shardwright.pipeline.runtime.programs.mesh import MeshAxis, axis_of, joined

Row = tuple[str, str, str]  # of a program's PARAMETERS: layout, axes over which the gradient is summed, state's layout


@dataclass(frozen=True, eq=False)
class BucketMember:
    parameter: nn.Parameter
    summed: tuple[str, ...]  # axes, in the mesh's order
    digits: Mapping[str, Place]  # axes that split the state alone, in the mesh's order -> what each takes of a dim

    @property
    def key(self) -> tuple[Any, ...]:
        """Members of one bucket have this in common."""
        return self.parameter.dtype, self.parameter.device, self.summed, tuple(self.digits)

    @property
    def shard_shape(self) -> list[int]:
        """Of this rank's shard."""
        shape = list(self.parameter.shape)
        for name, place in self.digits.items():
            shape[place.dim] = room(shape[place.dim], axis_of(name).size)
        return shape

    @property
    def uneven(self) -> int | None:
        """The dim on which shards are padded: one axis alone splits it, and no other the parameter's state."""
        for name, place in self.digits.items():
            if self.parameter.shape[place.dim] % (place.outside * axis_of(name).size):
                assert len(self.digits) == 1 and place.outside == 1, f"uneven shards on {list(self.digits)}"
                return place.dim
        return None


def members_of(parameters: Iterable[nn.Parameter], rows: Iterable[Row], axes: Iterable[str]) -> list[BucketMember]:
    names = list(axes)
    sizes = tuple(axis_of(name).size for name in names)
    found = []
    for parameter, (layout, summed, state) in zip(parameters, rows, strict=True):
        further = Layout.parse(layout).further(Layout.parse(state), sizes)
        wide = {names[axis]: place for axis, place in further.items() if sizes[axis] > 1}
        found.append(BucketMember(parameter, tuple(summed.split("+")) if summed else (), wide))
    return found


def buckets_of(members: list[BucketMember], first_mb: float, bucket_mb: float) -> list[SumBucket | ShardBucket]:
    """Of alike members up to a size, last parameter first."""
    sizes = [(member.key, member.parameter.nbytes) for member in members]
    groups = [[members[n] for n in numbers] for numbers in bucket_members(sizes, first_mb * 1e6, bucket_mb * 1e6)]
    return [(ShardBucket if group[0].digits else SumBucket)(group) for group in groups]


class SumBucket:
    """Gradients that are summed over the ranks of some axes.

    Autograd makes the first of a step anew, without adding to zeros, and it is copied to its slot of the bucket, which
    takes its place: there later passes add theirs.
    """

    def __init__(self, members: list[BucketMember]) -> None:
        self.members = members
        self.axis = axis_of(joined(members[0].summed))
        parameters = [m.parameter for m in members]
        lengths = [parameter.numel() for parameter in parameters]
        self.flat = parameters[0].new_zeros(sum(lengths) + 1)  # with room for a number that is summed too
        *slots, last = self.flat.split([*lengths, 1])
        self.slots = [slot.view_as(parameter) for slot, parameter in zip(slots, parameters, strict=True)]
        self.slot = PiggybackSlot(self.axis, last)
        self.arrived: set[int] = set()  # numbers of those whose gradient lies in its slot
        self.missing = set(range(len(members)))  # numbers of those whose gradient the last pass has not finished
        self.work: Any = None

    def reset(self) -> None:
        self.arrived, self.missing = set(), set(range(len(self.members)))
        for member in self.members:
            member.parameter.grad = None

    def take(self, number: int) -> None:
        if number not in self.arrived:
            parameter, slot = self.members[number].parameter, self.slots[number]
            assert parameter.grad is not None
            slot.copy_(parameter.grad)
            parameter.grad = slot
            self.arrived.add(number)

    def send(self) -> None:
        for number in set(range(len(self.members))) - self.arrived:
            self.members[number].parameter.grad = self.slots[number].zero_()
        if self.axis.size > 1:
            self.slot.write()
            self.work = dist.all_reduce(self.flat, group=self.axis.group, async_op=True)

    def go_on(self) -> None:
        """One collective is all."""

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None
            self.slot.read()


class ShardBucket:
    """Parameters of which this rank updates a shard.

    The bucket has a row for each rank that the shards lie on: its shards of all parameters, one after another. A
    gradient's shards go to their rows, each pass adding its own, and each row leaves for its rank; what arrives is the
    gradient of the shards.
    Once the optimizer has used it, the rows take the new values of all ranks.
    """

    def __init__(self, members: list[BucketMember]) -> None:
        self.members = members
        split, summed = tuple(members[0].digits), members[0].summed
        self.axis = axis_of(joined(split))
        self.scatter = _joined_axis(name for name in split if name in summed)
        self.rest = _joined_axis(name for name in summed if name not in split)
        self.place = tuple(axis_of(name).rank for name in split)
        self.sliced = tuple(slice(None) if name in summed else axis_of(name).rank for name in split)
        self.lengths = [prod(m.shard_shape) for m in members]
        self.flat = members[0].parameter.new_zeros(self.axis.size * sum(self.lengths))
        self.rows = self.flat.view(self.axis.size, -1)
        self.sent = self.rows[: self.scatter.size]
        self.own = self.sent[self.scatter.rank]
        self.arrived: set[int] = set()  # numbers of those whose gradient lies in the rows
        self.missing = set(range(len(members)))
        self.work: Any = None
        self.sums_left = False
        self.shards = [nn.Parameter(self._shard(number)) for number in range(len(members))]
        for number, shard in enumerate(self.shards):
            shard.grad = self._slot(self.own, number).view_as(shard)

    def _shard(self, number: int) -> Tensor:
        """This rank's shard of a parameter: in the parameter's own memory where it lies there in one run."""
        member = self.members[number]
        if member.uneven is not None:
            return local_shard(member.parameter.detach(), self.axis, member.uneven, 1).contiguous()
        return _digits_first(member.parameter.detach(), member.digits)[self.place].contiguous().view(member.shard_shape)

    def _slot(self, rows: Tensor, number: int) -> Tensor:
        """A parameter's part of one row or of each."""
        start = sum(self.lengths[:number])
        return rows[..., start : start + self.lengths[number]]

    def _apart(self) -> Iterable[tuple[int, nn.Parameter]]:
        """The shards that have memory of their own, with their numbers."""
        for number, (member, shard) in enumerate(zip(self.members, self.shards, strict=True)):
            if shard.untyped_storage().data_ptr() != member.parameter.untyped_storage().data_ptr():
                yield number, shard

    def reset(self) -> None:
        self.arrived, self.missing = set(), set(range(len(self.members)))

    def take(self, number: int) -> None:
        """A gradient is there: its shards go to their rows; on axes where it is whole just this rank's is needed."""
        member = self.members[number]
        gradient = member.parameter.grad
        assert gradient is not None
        first = number not in self.arrived
        if member.uneven is not None:  # shard by shard: a copy of all with its padding would be as large
            if first:
                self._slot(self.sent, number).zero_()  # what is padding stays so
            ranks = range(self.axis.size) if self.scatter.size > 1 else (self.axis.rank,)
            pairs = list(self._uneven_shards(self.sent, number, gradient, ranks))
        else:
            shards = _digits_first(gradient, member.digits)[self.sliced]
            pairs = [(self._slot(self.sent, number).view(shards.shape), shards)]
        for there, own in pairs:
            there.copy_(own) if first else there.add_(own)
        member.parameter.grad = None
        self.arrived.add(number)

    def _uneven_shards(
        self, rows: Tensor, number: int, whole: Tensor, ranks: Iterable[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each of these ranks: where its elements lie in its row of the bucket, and where in the whole."""
        member = self.members[number]
        dim, shape = member.uneven, member.shard_shape
        assert dim is not None
        for row, rank in zip(self._slot(rows, number), ranks, strict=True):
            start, count = own_part(whole.shape[dim], rank, self.axis.size)
            yield row.view(shape).narrow(dim, 0, count), whole.narrow(dim, start, count)

    def send(self) -> None:
        for number in set(range(len(self.members))) - self.arrived:
            self._slot(self.sent, number).zero_()
        self.sums_left = self.rest.size > 1
        if self.scatter.size > 1:
            self.work = sum_own(self.sent, self.scatter)

    def go_on(self) -> None:
        """What is scattered may have to be summed over other axes, when it is there."""
        if self.sums_left:
            self._wait_for_work()
            self.work = dist.all_reduce(self.own, group=self.rest.group, async_op=True)
            self.sums_left = False

    def _wait_for_work(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None

    def wait(self) -> None:
        self._wait_for_work()
        for number, shard in self._apart():
            shard.data = self._shard(number)
        for number, shard in enumerate(self.shards):
            if shard.grad is None:  # as `zero_grad` leaves it
                shard.grad = self._slot(self.own, number).view_as(shard)

    def gather(self) -> None:
        own = self.rows[self.axis.rank]
        for number, shard in enumerate(self.shards):
            self._slot(own, number).copy_(shard.detach().flatten())
        self.work = all_gather_into(self.flat, own, group=self.axis.group, async_op=True)

    def spread(self) -> None:
        """The new values of all ranks; between steps a shard needs no memory of its own."""
        self._wait_for_work()
        for number, member in enumerate(self.members):
            whole = member.parameter.detach()
            if member.uneven is not None:
                for there, own in self._uneven_shards(self.rows, number, whole, range(self.axis.size)):
                    own.copy_(there)
            else:
                values = _digits_first(whole, member.digits)
                values.copy_(self._slot(self.rows, number).view(values.shape))
        for _, shard in self._apart():
            shard.data = shard.data.new_empty(0)


def _joined_axis(names: Iterable[str]) -> MeshAxis:
    found = tuple(names)
    return axis_of(joined(found)) if found else MeshAxis(1, 0, None)


def _digits_first(x: Tensor, digits: Mapping[str, Place]) -> Tensor:
    """The tensor with each of these digits of its dims as a dim of its own, in front of all others."""
    shape: list[int] = []
    front: dict[str, int] = {}
    for dim, length in enumerate(x.shape):
        inside = 1
        for name in sorted((n for n in digits if digits[n].dim == dim), key=lambda n: digits[n].outside):
            shape += [digits[name].outside // inside, axis_of(name).size]
            front[name] = len(shape) - 1
            inside = digits[name].outside * axis_of(name).size
        shape.append(length // inside)
    first = [front[name] for name in digits]
    return x.reshape(shape).permute(*first, *(n for n in range(len(shape)) if n not in first))
