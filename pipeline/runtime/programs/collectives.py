"""The conversion table as autograd functions on local tensors: each fixes what happens forward and backward.

torch's own functional collectives pair an all-reduce with an all-reduce, which makes the gradient of `P -> R` too
large by the number of ranks; so each pair of the table is written out here.

`parts` says in how many equal parts the dim lies on a rank, each of which is split: 1, or more where the axis splits an
inner factor of the dim. `size` is that of a dim that comes together and does not divide by the ranks: every rank has
room for as much of it as the first one holds. What lies behind its own elements is padding, which the whole has not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from shardwright.pipeline.ir.program import GATHERED_ALONE
from shardwright.pipeline.ops.rule import FEW_RANKS
from shardwright.pipeline.runtime.context import step
from shardwright.pipeline.runtime.pipelining.deferred_weight_grads import at_border
from shardwright.pipeline.runtime.programs.mesh import MeshAxis, axis_of, combining

Move = tuple[Any, ...]  # a function of one rank's tensor and an axis, and its further arguments
Split = tuple[int, int, int | None]  # the dim on which a tensor is split, its parts, and its size where it is uneven
SHORT = 1 << 18  # bytes of a message that takes as long as it takes to be noticed
AROUND = "shardwright reduce_scatter"  # the profiler's label of messages that are one
_TAG = 1  # of those: messages of pipelines have none

# torch 2.13 renamed the collectives on one tensor.
all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_from: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, forward: Move, backward: Move) -> Tensor:
        ctx.axis, ctx.back = axis, backward
        move, *given = forward
        y: Tensor = move(in_memory(x), axis, *given)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        move, *given = ctx.back
        return move(in_memory(gradients[0]), ctx.axis, *given), None, None, None


def _apply(x: Tensor, axis: str, forward: Move, backward: Move) -> Tensor:
    made = _Pair.apply(x, axis_of(axis), forward, backward)  # type: ignore[no-untyped-call]
    (result,) = at_border([x], [made])
    return result


def in_memory(x: Tensor) -> Tensor:
    """Memory that holds what the tensor says: torch conjugates and negates complex numbers where they are read."""
    return x.resolve_conj().resolve_neg()


def as_real(x: Tensor) -> Tensor:
    """The same memory as real numbers."""
    return torch.view_as_real(x) if x.is_complex() else x


# ---- dims that do not divide


def room(whole: int, count: int) -> int:
    """Elements that each of so many ranks has room for."""
    return -(-whole // count)


def own_part(whole: int, rank: int, count: int) -> tuple[int, int]:
    """Where a rank's elements of a dim begin, and how many they are; the last ranks may have fewer or none."""
    start = min(rank * room(whole, count), whole)
    return start, min(room(whole, count), whole - start)


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """With zeros behind it up to that size of the dim; itself where it has that."""
    if x.shape[dim] == size:
        return x
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, size - x.shape[dim]))


# ---- moves of one rank's tensor: each returns its argument, or a new tensor; none writes into its argument


def _nothing(x: Tensor, axis: MeshAxis) -> Tensor:
    return x


def _sum(x: Tensor, axis: MeshAxis, may_wait: bool = False) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    if axis.size > 1 and may_wait and step.slots:
        step.add_up(total, axis)
    elif axis.size > 1:
        dist.all_reduce(total, group=axis.group)
    return total


def _shards(x: Tensor, size: int, dim: int, parts: int) -> Tensor:
    """The shards of each rank on a new first dim, where they lie if they can be seen so; uneven ones are padded."""
    if parts == 1:
        length = room(x.shape[dim], size)
        return padded(x, dim, size * length).unflatten(dim, (size, length)).movedim(dim, 0)
    digits = x.unflatten(dim, (parts, size, x.shape[dim] // (parts * size)))
    return digits.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def _joined(shards: Tensor, dim: int, parts: int, size: int | None = None) -> Tensor:
    """The whole of such shards."""
    if size is not None and size != len(shards) * shards.shape[dim + 1]:
        if dim == 0:
            return shards.flatten(0, 1)[:size]
        own = [shard.narrow(dim, 0, own_part(size, n, len(shards))[1]) for n, shard in enumerate(shards)]
        return torch.cat(own, dim)
    if parts > 1:
        digits = shards.unflatten(dim + 1, (parts, shards.shape[dim + 1] // parts))
        return digits.movedim(0, dim + 1).flatten(dim, dim + 2)
    return shards.flatten(0, 1) if dim == 0 else torch.cat(shards.unbind(), dim)


def _join(x: Tensor, axis: MeshAxis, dim: int, parts: int, size: int | None = None) -> Tensor:
    if axis.size == 1:
        return x
    shards = x.new_empty((axis.size, *x.shape))
    all_gather_into(shards.view(-1), x.contiguous().view(-1), group=axis.group)
    return _joined(shards, dim, parts, size)


def _sum_and_split(x: Tensor, axis: MeshAxis, dim: int, parts: int) -> Tensor:
    if axis.size == 1:
        return x
    shards = _shards(x, axis.size, dim, parts).contiguous()  # one after another also for images by channel
    is_view = shards.data_ptr() == x.data_ptr()
    return own_sum(shards.clone() if is_view and _sums_in_place(axis) else shards, axis)


def own_sum(rows: Tensor, axis: MeshAxis) -> Tensor:
    """This rank's row of the sum over the ranks, in memory of its own; what is left in `rows` is of no use."""
    if rows.is_complex():  # the backends sum real numbers
        return torch.view_as_complex(own_sum(as_real(rows), axis))
    if not _sums_in_place(axis):
        own = torch.empty_like(rows[0])
        reduce_scatter_from(own.view(-1), rows.view(-1), group=axis.group)
        return own
    if rows.is_cuda:  # two ranks on one GPU: gloo has no messages of that
        dist.all_reduce(rows, group=axis.group)
        return rows[axis.rank].clone()
    if rows.nbytes >= SHORT:
        return _around(rows, axis)
    # Each row goes to its rank, which adds them up: as fast as a message, in as much room as all rows have.
    arrived = torch.empty_like(rows)
    dist.all_to_all_single(arrived.view(-1), rows.view(-1), group=axis.group)
    return arrived.sum(0, dtype=rows.dtype)


def _around(rows: Tensor, axis: MeshAxis) -> Tensor:
    """Each row goes around once, and every rank adds its own to it: half of what an all-reduce moves."""
    size, rank = axis.size, axis.rank
    own = torch.empty_like(rows[0])
    with record_function(AROUND):
        for step in range(1, size):
            leaves, comes = rows[(rank - step) % size], rows[(rank - step - 1) % size]
            sent = dist.isend(leaves, group=axis.group, group_dst=(rank + 1) % size, tag=_TAG)
            dist.recv(own, group=axis.group, group_src=(rank - 1) % size, tag=_TAG)
            sent.wait()
            own.add_(comes) if step == size - 1 else comes.add_(own)
    return own


def sum_own(rows: Tensor, axis: MeshAxis) -> Any:
    """The same where this rank's row lies, without waiting for it: gloo sums all rows for each rank."""
    rows = as_real(rows)
    if _sums_in_place(axis):
        return dist.all_reduce(rows, group=axis.group, async_op=True)
    return reduce_scatter_from(rows[axis.rank], rows.view(-1), group=axis.group, async_op=True)


def _sums_in_place(axis: MeshAxis) -> bool:
    """gloo has no reduce-scatter. Torch has it sum a copy of all rows, which takes time, and memory until the end."""
    return bool(dist.get_backend(axis.group) == "gloo")


def _own_shard(x: Tensor, axis: MeshAxis, dim: int, parts: int) -> Tensor:
    return local_shard(x, axis, dim, parts).contiguous()


def own_copy(x: Tensor, axis: MeshAxis, dim: int, parts: int) -> Tensor:
    """The same in memory of its own: a parameter keeps its gradient, and would keep the whole behind a view of it."""
    return local_shard(x, axis, dim, parts).clone(memory_format=torch.contiguous_format)


def local_shard(x: Tensor, axis: MeshAxis, dim: int, parts: int) -> Tensor:
    """This rank's shard of what it holds whole."""
    if parts == 1:
        own = x.narrow(dim, *own_part(x.shape[dim], axis.rank, axis.size))
        return padded(own, dim, room(x.shape[dim], axis.size))
    digits = x.unflatten(dim, (parts, axis.size, x.shape[dim] // (parts * axis.size)))
    return digits.select(dim + 1, axis.rank).flatten(dim, dim + 1)


def _in_zeros(x: Tensor, axis: MeshAxis, dim: int, parts: int, size: int | None = None) -> Tensor:
    length = x.shape[dim] // parts
    whole = x.new_zeros((*x.shape[:dim], parts, axis.size, length, *x.shape[dim + 1 :]))
    whole.select(dim + 1, axis.rank).copy_(x.unflatten(dim, (parts, length)))
    whole = whole.flatten(dim, dim + 2)
    return whole if size in (None, whole.shape[dim]) else whole.narrow(dim, 0, size).contiguous()


def _on_first(x: Tensor, axis: MeshAxis) -> Tensor:
    return x if axis.rank == 0 else torch.zeros_like(x)


def _exchange(x: Tensor, axis: MeshAxis, split: tuple[int, int], join: Split) -> Tensor:
    """Splits one dim and joins another, each given with its parts."""
    if axis.size == 1:
        return x
    outgoing = _shards(x, axis.size, *split).contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=axis.group)
    return _joined(incoming, *join)


# ---- moves of several tensors at once: one collective, in which each rank's shards of all lie one after another


class Joining:
    """The wholes of shards of one dtype, while they come together.

    What is large comes by a collective of its own: it gains nothing by being joined, and where it is split on its first
    dim, what the collective receives is the whole, with no copy to be made of it.
    """

    def __init__(self, shards: Sequence[Tensor], splits: Sequence[Split], axis: MeshAxis, waits: bool = True) -> None:
        self.shapes, self.splits = [shard.shape for shard in shards], splits
        self.runs = _runs([axis.size * shard.nbytes for shard in shards])
        self.sent = [  # a single one is not copied
            torch.cat([shards[n].reshape(-1) for n in run]) if len(run) > 1 else in_memory(shards[run[0]]).reshape(-1)
            for run in self.runs
        ]
        self.rows = [flat.new_empty((axis.size, flat.numel())) for flat in self.sent]
        options = {} if waits and len(self.runs) == 1 else {"async_op": True}
        self.works = [
            all_gather_into(rows.view(-1), flat, group=axis.group, **options)
            for rows, flat in zip(self.rows, self.sent, strict=True)
        ]

    def finish(self) -> list[Tensor]:
        for work in self.works:
            if work is not None:
                work.wait()
        received = self.rows
        del self.sent, self.rows, self.works  # before the wholes are made
        found: dict[int, Tensor] = {}
        for run in reversed(self.runs):
            parts = received.pop().split([self.shapes[n].numel() for n in run], 1)
            for n, part in zip(run, parts, strict=True):
                # A row of each rank may be seen as a whole where it lies; in memory of its own it lies as it will in
                # backward, where others are gathered with it.
                found[n] = _joined(part.unflatten(1, self.shapes[n]), *self.splits[n]).contiguous()
        return [found[n] for n in range(len(self.shapes))]


def sum_and_split_several(wholes: Sequence[Tensor], splits: Sequence[Split], axis: MeshAxis) -> list[Tensor]:
    """This rank's shards of the sums over the ranks; what is sent of large ones is there for one after the other."""
    found: dict[int, Tensor] = {}
    for run in _runs([whole.nbytes for whole in wholes]):
        parts = [_shards(wholes[n], axis.size, *splits[n][:2]) for n in run]
        own = own_sum(torch.cat([part.reshape(axis.size, -1) for part in parts], 1), axis)
        shards = own.split([part.numel() // axis.size for part in parts])
        found |= {n: x.view(part.shape[1:]) for n, x, part in zip(run, shards, parts, strict=True)}
    return [found[n] for n in range(len(wholes))]


def _runs(sizes: Sequence[int]) -> list[list[int]]:
    """Numbers of those that one collective moves: each of the large ones alone, all others together."""
    large = [n for n, nbytes in enumerate(sizes) if nbytes >= GATHERED_ALONE]
    small = [n for n, nbytes in enumerate(sizes) if nbytes < GATHERED_ALONE]
    return [*([n] for n in large), *([small] if small else [])]


# The conversions, by the names that generated programs use.


def sum_gradient(x: Tensor, axis: str) -> Tensor:
    """R -> B"""
    return _apply(x, axis, (_nothing,), (_sum,))


def all_reduce(x: Tensor, axis: str, is_last: bool = False) -> Tensor:
    """P -> R; the last of a program, which is the loss, need not be there before the gradients are"""
    return _apply(x, axis, (_sum, is_last), (_nothing,))


def all_reduce_both(x: Tensor, axis: str) -> Tensor:
    """P -> B"""
    return _apply(x, axis, (_sum,), (_sum,))


def summing_few(x: Tensor, axis: str) -> Callable[[], Tensor]:
    """The sum of what is no part of autograd's graph and so small that the rounds of a collective are all that counts.

    It is under way until it is called. A ring brings each of a few ranks what all others have in half the rounds of a
    sum.
    """
    if axis_of(axis).size > FEW_RANKS:
        return combining(x, axis)
    found = _gathering(x, axis_of(axis))
    return lambda: found().sum(0)


def shards_of_all(x: Tensor, axis: str) -> Tensor:
    """Of what is no part of autograd's graph: each rank's, on a new first dim."""
    return _gathering(x, axis_of(axis))()


def _gathering(x: Tensor, axis: MeshAxis) -> Callable[[], Tensor]:
    rows = x.new_empty((axis.size, *x.shape))
    if axis.size == 1:
        return lambda: x[None]
    work = all_gather_into(rows.view(-1), in_memory(x).view(-1), group=axis.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return rows

    return finish


def all_gather(x: Tensor, axis: str, dim: int, parts: int = 1, size: int | None = None) -> Tensor:
    """S(dim) -> B"""
    return _apply(x, axis, (_join, dim, parts, size), (_sum_and_split, dim, parts))


def gather(x: Tensor, axis: str, dim: int, parts: int = 1, size: int | None = None) -> Tensor:
    """S(dim) -> R"""
    return _apply(x, axis, (_join, dim, parts, size), (own_copy, dim, parts))


def reduce_scatter(x: Tensor, axis: str, dim: int, parts: int = 1) -> Tensor:
    """P -> S(dim)"""
    return _apply(x, axis, (_sum_and_split, dim, parts), (_join, dim, parts, x.shape[dim]))


def shard(x: Tensor, axis: str, dim: int, parts: int = 1) -> Tensor:
    """R -> S(dim)"""
    return _apply(x, axis, (_own_shard, dim, parts), (_join, dim, parts, x.shape[dim]))


def narrow(x: Tensor, axis: str, dim: int, parts: int = 1) -> Tensor:
    """B -> S(dim)"""
    return _apply(x, axis, (_own_shard, dim, parts), (_in_zeros, dim, parts, x.shape[dim]))


def pad(x: Tensor, axis: str, dim: int, parts: int = 1, size: int | None = None) -> Tensor:
    """S(dim) -> P"""
    return _apply(x, axis, (_in_zeros, dim, parts, size), (_own_shard, dim, parts))


def all_to_all(
    x: Tensor, axis: str, dim: int, to: int, parts: int = 1, to_parts: int = 1, size: int | None = None
) -> Tensor:
    """S(dim) -> S(to)"""
    count = axis_of(axis).size
    # Within one dim, the inner of the two factors lies in fewer parts once the outer one is split.
    had = dim, parts // count if dim == to and parts > to_parts else parts
    want = to, to_parts // count if dim == to and to_parts > parts else to_parts
    whole = None if dim == to else x.shape[to]
    return _apply(x, axis, (_exchange, want, (*had, size)), (_exchange, had, (*want, whole)))


def mask(x: Tensor, axis: str) -> Tensor:
    """R -> P"""
    return _apply(x, axis, (_on_first,), (_nothing,))


def mask_gradient(x: Tensor, axis: str) -> Tensor:
    """B -> R"""
    return _apply(x, axis, (_nothing,), (_on_first,))


def mask_both(x: Tensor, axis: str) -> Tensor:
    """B -> P"""
    return _apply(x, axis, (_on_first,), (_on_first,))
