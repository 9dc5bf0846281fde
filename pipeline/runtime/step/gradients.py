"""Between backward and the next step: gradients brought together in buckets, new values given to all.

| a parameter whose               | during backward                              | optimizer updates | after it      |
|---------------------------------|----------------------------------------------|-------------------|---------------|
| gradient is complete as it is   | nothing                                      | it                | nothing       |
| gradient is summed (DDP)        | all-reduce                                   | it                | nothing       |
| state is split further (ZeRO-1) | slice or reduce-scatter, all-reduce the rest | this rank's shard | an all-gather |

A bucket is sent when its last gradient is there and every bucket before it has been sent: all ranks send in one order,
also where buckets go over different axes. Buckets follow the parameters in reverse, the order in which backward
finishes them; the first is small so that the first message leaves early.

Over the micro-batches of a step gradients add up where they lie, on this rank alone: buckets are armed for the last
backward pass, and sent in that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.ir.layout import Layout, Place
from pipeline.runtime.programs.collectives import all_gather_into, in_memory, piece, sum_own
from pipeline.runtime.programs.mesh import MeshAxis, axis_of, joined
from pipeline.runtime.programs.uneven import own_part, room
from pipeline.runtime.step import piggyback_sums
from pipeline.runtime.step.prefetch import Ahead

Row = tuple[str, str, str]  # of a program's PARAMETERS: layout, axes over which the gradient is summed, state's layout


class Gradients:
    """A step is: start, forward, backward, wait, the optimizer on `updated`, publish.

    One of several micro-batches is: start unarmed, forward and backward of each, armed before the last; then as above.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        rows: Iterable[Row],
        axes: Iterable[str],
        first_mb: float = 1,
        bucket_mb: float = 25,
    ) -> None:
        names = list(axes)
        members = [_member(p, row, names) for p, row in zip(parameters, rows, strict=True)]
        self.complete = [m.parameter for m in members if not m.summed and not m.digits]
        grouped = _grouped([m for m in members if m.summed or m.digits], first_mb, bucket_mb)
        self.buckets: list[_Sum | _Shards] = [(_Shards if group[0].digits else _Sum)(group) for group in grouped]
        self.seats = _seats(self.buckets)
        self.updated = self._updated([m.parameter for m in members])
        self.ahead = Ahead()
        self.next = 0
        self.armed = True
        self.order: list[int] = []  # buckets in the order they were sent in this step
        self.places: dict[int, tuple[_Sum | _Shards, int]] = {}  # `id` of a parameter -> its bucket, its number there
        for bucket in self.buckets:
            for number, member in enumerate(bucket.members):
                self.places[id(member.parameter)] = bucket, number
                member.parameter.register_post_accumulate_grad_hook(self._hook(bucket, number))

    def _updated(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """What the optimizer is given: the parameters, or this rank's shards of them."""
        split = [bucket for bucket in self.buckets if isinstance(bucket, _Shards)]
        shards = {m.parameter: s for bucket in split for m, s in zip(bucket.members, bucket.shards, strict=True)}
        return [shards.get(parameter, parameter) for parameter in parameters]

    def _hook(self, bucket: _Sum | _Shards, number: int) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            bucket.take(number)
            if self.armed:
                bucket.missing.discard(number)
                if not bucket.missing:
                    self._send_complete()

        return ready

    def finish(self, parameters: Iterable[Tensor]) -> None:
        """No gradient of these comes any more in this step: for a last pass that is not armed, as it is in parts."""
        for parameter in parameters:
            if id(parameter) in self.places:
                bucket, number = self.places[id(parameter)]
                bucket.missing.discard(number)
        self._send_complete()

    def _send_complete(self) -> None:
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self._send()

    def _send(self) -> None:
        if self.next:
            self.buckets[self.next - 1].go_on()
        self.buckets[self.next].send()
        self.order.append(self.next)
        self.next += 1

    def start(self, armed: bool = True) -> None:
        """Before the first forward pass of a step; armed where it is the only one."""
        self.next = 0
        self.order = []
        self.armed = armed
        self.ahead.start()
        piggyback_sums.start(self.seats)
        for bucket in self.buckets:
            bucket.reset()
            bucket.missing = set(range(len(bucket.members)))
        for parameter in self.complete:
            if armed or parameter.grad is None:
                parameter.grad = None  # autograd puts the only gradient in its place without adding
            else:
                parameter.grad.zero_()

    def arm(self) -> None:
        """Before the last backward pass: what it finishes may be sent."""
        self.armed = True

    def wait(self) -> None:
        """After backward: sends what no gradient reached, and waits for all; then the optimizer may step."""
        self.ahead.stop()
        while self.next < len(self.buckets):
            self._send()
        for bucket in self.buckets:
            bucket.go_on()
        for bucket in self.buckets:
            bucket.wait()
        for parameter in self.complete:
            if parameter.grad is not None and parameter.grad.is_conj():  # as autograd leaves it; Adam does not take it
                parameter.grad = in_memory(parameter.grad)
        piggyback_sums.finish(self.seats)

    def publish(self) -> None:
        """After the optimizer: every rank gets the values that others have updated."""
        split = [bucket for bucket in self.buckets if isinstance(bucket, _Shards)]
        for bucket in split:
            bucket.gather()
        for bucket in split:
            bucket.spread()

    def buffers(self) -> list[Tensor]:
        """The memory in which gradients lie that are not their parameters' own."""
        return [bucket.flat for bucket in self.buckets]


@dataclass(frozen=True, eq=False)
class _Member:
    parameter: nn.Parameter
    summed: tuple[str, ...]  # axes, in the mesh's order
    digits: Mapping[str, Place]  # axes that split the state alone, in the mesh's order -> what each takes of a dim

    @property
    def key(self) -> tuple[Any, ...]:
        """Members of one bucket have this in common."""
        return self.parameter.dtype, self.parameter.device, self.summed, tuple(self.digits)

    @property
    def piece_shape(self) -> list[int]:
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

    @property
    def nbytes(self) -> int:
        return int(self.parameter.numel() * self.parameter.element_size())


def _member(parameter: nn.Parameter, row: Row, axes: list[str]) -> _Member:
    layout, summed, state = row
    sizes = tuple(axis_of(name).size for name in axes)
    further = Layout.parse(layout).further(Layout.parse(state), sizes)
    wide = {axes[axis]: place for axis, place in further.items() if sizes[axis] > 1}
    return _Member(parameter, tuple(summed.split("+")) if summed else (), wide)


def _grouped(members: list[_Member], first_mb: float, bucket_mb: float) -> list[list[_Member]]:
    """Buckets of alike members up to a size, last parameter first; their order is that of the last gradient in each."""
    groups: list[list[_Member]] = []
    ends: dict[int, int] = {}  # number of a group -> place of its last member
    filling: dict[Any, tuple[int, float]] = {}  # key -> the group that takes members, and its bytes
    for place, member in enumerate(reversed(members)):
        number, size = filling.get(member.key, (-1, 0.0))
        limit = (bucket_mb if number > 0 else first_mb) * 1e6
        if number < 0 or size + member.nbytes > limit:
            number, size = len(groups), 0.0
            groups.append([])
        groups[number].append(member)
        ends[number] = place
        filling[member.key] = number, size + member.nbytes
    return [groups[number] for number in sorted(ends, key=lambda n: ends[n])]


class _Sum:
    """Gradients that are summed over the ranks of some axes.

    Autograd makes the first of a step anew, without adding to zeros, and it is copied to its slot of the bucket, which
    takes its place: there later passes add theirs.
    """

    def __init__(self, members: list[_Member]) -> None:
        self.members = members
        self.axis = axis_of(joined(members[0].summed))
        parameters = [m.parameter for m in members]
        lengths = [parameter.numel() for parameter in parameters]
        self.flat = _flat(members[0].parameter, sum(lengths) + 1)  # a number may ride
        *slots, seat = self.flat.split([*lengths, 1])
        self.slots = [slot.view_as(parameter) for slot, parameter in zip(slots, parameters, strict=True)]
        self.seat = piggyback_sums.Seat(self.axis, seat)
        self.arrived: set[int] = set()  # numbers of those whose gradient lies in its slot
        self.missing = set(range(len(members)))  # numbers of those whose gradient the last pass has not finished
        self.work: Any = None

    def reset(self) -> None:
        self.arrived.clear()
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
            self.seat.leave()
            self.work = dist.all_reduce(self.flat, group=self.axis.group, async_op=True)

    def go_on(self) -> None:
        """One collective is all."""

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None
            self.seat.arrive()


class _Shards:
    """Parameters of which this rank updates a shard.

    The bucket has a row for each rank that the shards lie on: its pieces of all parameters, one after another. A
    gradient's pieces go to their rows, each pass adding its own, and each row leaves for its rank; what arrives is the
    gradient of the shards.
    Once the optimizer has used it, the rows take the new values of all ranks.
    """

    def __init__(self, members: list[_Member]) -> None:
        self.members = members
        split, summed = tuple(members[0].digits), members[0].summed
        self.axis = axis_of(joined(split))
        self.scatter = _joined_axis(name for name in split if name in summed)
        self.rest = _joined_axis(name for name in summed if name not in split)
        self.place = tuple(axis_of(name).rank for name in split)
        self.sliced = tuple(slice(None) if name in summed else axis_of(name).rank for name in split)
        self.lengths = [prod(m.piece_shape) for m in members]
        self.flat = _flat(members[0].parameter, self.axis.size * sum(self.lengths))
        self.rows = self.flat.view(self.axis.size, -1)
        self.sent = self.rows[: self.scatter.size]
        self.own = self.sent[self.scatter.rank]
        self.arrived: set[int] = set()  # numbers of those whose gradient lies in the rows
        self.missing = set(range(len(members)))
        self.work: Any = None
        self.sums_left = False
        self.shards = [nn.Parameter(self._piece(number)) for number in range(len(members))]
        for number, shard in enumerate(self.shards):
            shard.grad = self._slot(self.own, number).view_as(shard)

    def _piece(self, number: int) -> Tensor:
        """This rank's piece of a parameter: in the parameter's own memory where it lies there in one run."""
        member = self.members[number]
        if member.uneven is not None:
            return piece(member.parameter.detach(), self.axis, member.uneven, 1).contiguous()
        return _digits_first(member.parameter.detach(), member.digits)[self.place].contiguous().view(member.piece_shape)

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
        self.arrived.clear()

    def take(self, number: int) -> None:
        """A gradient is there: its pieces go to their rows; on axes where it is whole just this rank's is needed."""
        member = self.members[number]
        assert member.parameter.grad is not None
        first = number not in self.arrived
        if member.uneven is not None:
            self._take_uneven(number, member.parameter.grad, first)
        else:
            pieces = _digits_first(member.parameter.grad, member.digits)[self.sliced]
            slot = self._slot(self.sent, number).view(pieces.shape)
            slot.copy_(pieces) if first else slot.add_(pieces)
        member.parameter.grad = None
        self.arrived.add(number)

    def _take_uneven(self, number: int, gradient: Tensor, first: bool) -> None:
        """Piece by piece: a copy of all of it with its padding would be as large as the gradient."""
        if first:
            self._slot(self.sent, number).zero_()  # what is padding stays so
        ranks = range(self.axis.size) if self.scatter.size > 1 else (self.axis.rank,)
        for there, own in self._uneven_pieces(self.sent, number, gradient, ranks):
            there.copy_(own) if first else there.add_(own)

    def _uneven_pieces(
        self, rows: Tensor, number: int, whole: Tensor, ranks: Iterable[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each of these ranks: where its elements lie in its row of the bucket, and where in the whole."""
        member = self.members[number]
        dim, shape = member.uneven, member.piece_shape
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
            self.wait_for_work()
            self.work = dist.all_reduce(self.own, group=self.rest.group, async_op=True)
            self.sums_left = False

    def wait_for_work(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None

    def wait(self) -> None:
        self.wait_for_work()
        for number, shard in self._apart():
            shard.data = self._piece(number)

    def gather(self) -> None:
        own = self.rows[self.axis.rank]
        for number, shard in enumerate(self.shards):
            self._slot(own, number).copy_(shard.detach().flatten())
        self.work = all_gather_into(self.flat, own, group=self.axis.group, async_op=True)

    def spread(self) -> None:
        """The new values of all ranks; between steps a shard needs no memory of its own."""
        self.wait_for_work()
        for number, member in enumerate(self.members):
            whole = member.parameter.detach()
            if member.uneven is not None:
                for there, own in self._uneven_pieces(self.rows, number, whole, range(self.axis.size)):
                    own.copy_(there)
            else:
                values = _digits_first(whole, member.digits)
                values.copy_(self._slot(self.rows, number).view(values.shape))
        for _, shard in self._apart():
            shard.data = shard.data.new_empty(0)


def _seats(buckets: Iterable[_Sum | _Shards]) -> list[piggyback_sums.Seat]:
    """Of buckets that are only sent during backward: what rides is known by then."""
    return [bucket.seat for bucket in buckets if isinstance(bucket, _Sum) and bucket.axis.size > 1]


def _flat(like: Tensor, length: int) -> Tensor:
    return torch.zeros(length, dtype=like.dtype, device=like.device)


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
