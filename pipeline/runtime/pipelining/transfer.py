"""A tensor from the ranks of one mesh to those of another, whatever its layouts on both.

Every element goes once to each rank that holds it. Which rank sends it:

| the sender's axis | sends                                                                                 |
|-------------------|---------------------------------------------------------------------------------------|
| S                 | the shard that overlaps with what the reader holds                                     |
| R, B              | one of the equal ranks, another for each reader                                        |
| P                 | all of them, and the reader adds up                                                    |

On an axis where the reader's layout is P the first rank takes the values and the others have zeros. Where both meshes
and layouts are alike each rank has one reader, and what it holds goes as it is. The gradient takes the same ways back:
of a tensor in B it lies in P, of one in P in R (`of_gradient`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.pipeline.ir.layout import B, Layout, P, R, Run, of_gradient
from shardwright.pipeline.runtime.programs.collectives import in_memory

ACROSS = "shardwright across partitions"  # as the profiler sees collectives of all partitions, in which ranks wait

Shape = tuple[int, ...]
Index = tuple[slice | Tensor, ...]  # of a tensor's elements
Arriving = Callable[[], Tensor]  # a tensor under way to this rank


@dataclass(frozen=True)
class Submesh:
    """A run of ranks, such as those of a partition, and the sizes of their mesh."""

    first: int
    sizes: tuple[int, ...]

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + prod(self.sizes))

    def place(self, rank: int) -> tuple[int, ...]:
        """On each axis of the mesh."""
        found, rest = [], rank - self.first
        for size in reversed(self.sizes):
            found.append(rest % size)
            rest //= size
        return tuple(reversed(found))

    def site(self, layout: Layout) -> Site:
        return Site(self.first, self.sizes, layout)


@dataclass(frozen=True)
class Site(Submesh):
    """Where a tensor lies: its layout on a submesh."""

    layout: Layout

    def runs(self, shape: Shape, rank: int) -> tuple[tuple[Run, ...], ...]:
        return self.layout.runs(shape, self.sizes, self.place(rank))

    def of_gradient(self) -> Site:
        return self.site(of_gradient(self.layout))


@dataclass(frozen=True, eq=False)
class Message:
    """What one rank sends another: these elements of its shard, for those of the reader's."""

    source: int
    target: int
    read: Index
    written: Index


def messages(source: Site, target: Site, shape: Shape) -> Iterator[Message]:
    """In the order of the readers, and for each of the senders."""
    if source.sizes == target.sizes and source.layout == target.layout:
        every = tuple(slice(None) for _ in shape)
        yield from (Message(a, b, every, every) for a, b in zip(source.ranks, target.ranks, strict=True))
        return
    for reader in target.ranks:
        if any(n for n, state in zip(target.place(reader), target.layout.states, strict=True) if state == P):
            continue
        wanted = target.runs(shape, reader)
        for sender in source.ranks:
            if _is_asked(source, sender, reader - target.first):
                overlaps = [_overlap(have, want) for have, want in zip(source.runs(shape, sender), wanted, strict=True)]
                if all(overlaps):
                    read = _index([[(a, length) for a, _, length in dim] for dim in overlaps])
                    written = _index([[(b, length) for _, b, length in dim] for dim in overlaps])
                    yield Message(sender, reader, read, written)


def _is_asked(source: Site, sender: int, number: int) -> bool:
    """Of ranks that hold the same, each reader asks one."""
    place = source.place(sender)
    for axis in reversed([n for n, state in enumerate(source.layout.states) if state in (R, B)]):
        if place[axis] != number % source.sizes[axis]:
            return False
        number //= source.sizes[axis]
    return True


def _overlap(have: Sequence[Run], want: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Of two shards of a dim, what both hold: its start in each of them, and its length."""
    found = []
    at_a = 0
    for a, count_a in have:
        at_b = 0
        for b, count_b in want:
            low, high = max(a, b), min(a + count_a, b + count_b)
            if low < high:
                found.append((at_a + low - a, at_b + low - b, high - low))
            at_b += count_b
        at_a += count_a
    return found


def _index(dims: list[list[Run]]) -> Index:
    """Of the product of the dims, given by their runs: slices where each is one, else as torch takes numbers."""
    if all(sum(one) == other[0] for runs in dims for one, other in pairwise(runs)):
        return tuple(slice(runs[0][0], sum(runs[-1])) for runs in dims)
    numbers = [torch.cat([torch.arange(start, start + count) for start, count in runs]) for runs in dims]
    return tuple(dim.view(-1, *[1] * (len(dims) - 1 - n)) for n, dim in enumerate(numbers))


class Transfer:
    """The messages of a tensor, as far as this rank has part in them; all of a step's tags are different."""

    def __init__(self, source: Site, target: Site, shape: Shape, rank: int | None = None) -> None:
        rank = dist.get_rank() if rank is None else rank
        self.shape: Shape | None = None  # of this rank's shard, where it is a reader
        if rank in target.ranks:
            self.shape = target.layout.local_shape(shape, target.sizes)
        self.sums = P in source.layout.states
        own = [m for m in messages(source, target, shape) if rank in (m.source, m.target)]
        self.sent = [message for message in own if message.source == rank]
        self.received = [message for message in own if message.target == rank]
        self.as_it_is = source.sizes == target.sizes and source.layout == target.layout

    def send(self, shard: Tensor, tag: int) -> list[dist.P2POp]:
        """To all readers but this rank itself."""
        others = [message for message in self.sent if message.source != message.target]
        packed = [self.pack(message, shard) for message in others]
        sent = [each.to(meeting_device(each.device)) for each in packed]
        return [dist.P2POp(dist.isend, each, m.target, tag=tag) for m, each in zip(others, sent, strict=True)]

    def receive(
        self, dtype: torch.dtype, device: torch.device, tag: int, own: Tensor | None = None
    ) -> tuple[list[dist.P2POp], Arriving]:
        """The messages, and the tensor when they are there; `own` is this rank's shard, where it is a sender too."""
        assert self.shape is not None
        blocks: list[Tensor] = []
        ops = []
        for message in self.received:
            if message.source == message.target:
                assert own is not None
                blocks.append(self.pack(message, own).clone())
                continue
            like = torch.empty(self.shape, dtype=dtype, device="meta")[message.written]
            block = torch.empty(like.shape, dtype=dtype, device=meeting_device(device))
            ops.append(dist.P2POp(dist.irecv, block, message.source, tag=tag))
            blocks.append(block)
        return ops, partial(self.unpack, blocks, dtype, device)

    def pack(self, message: Message, shard: Tensor) -> Tensor:
        """What the message carries of the sender's shard."""
        own = shard if self.as_it_is else shard[message.read]
        return in_memory(own.detach()).contiguous()

    def unpack(self, blocks: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The reader's shard, of what all its messages carry."""
        assert self.shape is not None
        if self.as_it_is:
            return blocks[0].to(device)
        whole = torch.zeros(self.shape, dtype=dtype, device=device)
        for message, block in zip(self.received, blocks, strict=True):
            at = message.written
            whole[at] = whole[at] + block.to(device) if self.sums else block.to(device)
        return whole


def run(ops: list[dist.P2POp]) -> None:
    """Until all are done."""
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()


def meeting_device(device: torch.device) -> torch.device:
    """Where the backend takes messages from: gloo sends from the host alone."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device
