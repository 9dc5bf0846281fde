"""The process group of each mesh axis, by name. Set once by the program that trains, read by every collective.

Several axes taken as one have their names joined, in the order of the mesh: `d0+d1`, the last one innermost. For local
forms of ops (`position`, `combine`) no name is an axis of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class MeshAxis:
    size: int
    rank: int
    group: dist.ProcessGroup | None


_axes: dict[str, MeshAxis] = {}


def joined(names: tuple[str, ...]) -> str:
    return "+".join(names)


def set_mesh(sizes: Mapping[str, int]) -> None:
    """Builds a group for every axis and every set of axes; the world is the product of the axes."""
    set_meshes([sizes])


def set_meshes(meshes: Sequence[Mapping[str, int]]) -> None:
    """The same for several meshes, each on a run of ranks after that of the one before; a rank keeps its own."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    counts = [prod(sizes.values()) for sizes in meshes]
    if sum(counts) != world:
        shown = ", ".join(str(dict(sizes)) for sizes in meshes)
        raise ValueError(f"the plan's mesh {shown} has {sum(counts)} ranks, this run has {world}")
    _axes.clear()
    first = 0
    for sizes, count in zip(meshes, counts, strict=True):
        _set_axes(sizes, torch.arange(first, first + count).reshape(tuple(sizes.values())), world, rank)
        first += count


def _set_axes(sizes: Mapping[str, int], grid: Tensor, world: int, rank: int) -> None:
    """Those of a mesh on a grid of ranks: every rank makes every group, in the same order, and keeps its own."""
    groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {(): None}
    for count in range(1, len(sizes) + 1):
        for names in combinations(sizes, count):
            dims = [dim for dim, name in enumerate(sizes) if name in names]
            size = prod(sizes[name] for name in names)
            rows = grid.movedim(dims, list(range(-count, 0))).reshape(-1, size).tolist()
            wide = tuple(name for name in names if sizes[name] > 1)  # an axis of size one adds no rank
            if wide not in groups:  # in each row are the ranks that differ on these axes alone
                made = [dist.group.WORLD if len(row) == world else dist.new_group(row) for row in rows]
                groups[wide] = next((group for group, row in zip(made, rows, strict=True) if rank in row), None)
            for own in [row for row in rows if rank in row]:
                _axes[joined(names)] = MeshAxis(size, own.index(rank), groups[wide])


def axis_of(name: str) -> MeshAxis:
    return _axes[name]


def position(axis: str) -> tuple[int, int]:
    """Which shard of a dim this rank holds, and of how many."""
    return (axis_of(axis).rank, axis_of(axis).size) if axis else (0, 1)


def is_first(axes: Iterable[str]) -> bool:
    """Whether this rank is the first of the mesh of these axes."""
    return all(axis_of(name).rank == 0 for name in axes)


def take_first(tensors: Iterable[Tensor], axes: Iterable[str]) -> None:
    """All ranks of the mesh of these axes take what its first one has."""
    axis = _axes.get(joined(tuple(axes)))  # a program of one rank may have no axis
    if axis is not None and axis.size > 1 and axis.group is not None:
        for tensor in tensors:
            dist.broadcast(tensor, dist.get_global_rank(axis.group, 0), group=axis.group)


def combine(x: Tensor, axis: str, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum or the largest over the ranks, without gradient."""
    return combining(x, axis, how)()


def combining(x: Tensor, axis: str, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Callable[[], Tensor]:
    """The same, under way until it is called."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    if position(axis)[1] == 1:
        return lambda: total
    work = dist.all_reduce(total, op=how, group=axis_of(axis).group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return total

    return finish
