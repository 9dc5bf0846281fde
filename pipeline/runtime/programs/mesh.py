"""The process group of each mesh axis, by name. Set once by the program that trains, read by every collective.

Several axes taken as one have their names joined, in the order of the mesh: `d0+d1`, the last one innermost. For local
forms of ops (`position`, `combine`) no name is an axis of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        found = _axes_of(sizes, first, world, rank)
        _axes.update(found if first <= rank < first + count else {})
        first += count


def _axes_of(sizes: Mapping[str, int], first: int, world: int, rank: int) -> dict[str, MeshAxis]:
    """Of a mesh that begins at a rank; every rank of the world takes part, and what is not its own is nothing to it."""
    groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
    found = {}
    for count in range(1, len(sizes) + 1):
        for names in combinations(sizes, count):
            wide = tuple(name for name in names if sizes[name] > 1)  # an axis of size one adds no rank
            if wide not in groups:
                groups[wide] = _group(wide, sizes, first, world, rank)
            size = prod(sizes[name] for name in names)
            found[joined(names)] = MeshAxis(size, _place(rank - first, names, sizes), groups[wide])
    return found


def _place(rank: int, names: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """The rank's number among those that differ on these axes alone."""
    place, stride = 0, prod(sizes.values())
    for name, size in sizes.items():
        stride //= size
        place = place * size + rank // stride % size if name in names else place
    return place


def _group(
    names: tuple[str, ...], sizes: Mapping[str, int], first: int, world: int, rank: int
) -> dist.ProcessGroup | None:
    """Every rank makes every group, in the same order, and keeps its own."""
    if not names:
        return None
    if prod(sizes[name] for name in names) == world:
        return dist.group.WORLD
    others = tuple(name for name in sizes if name not in names)
    own = None
    for place in range(prod(sizes[name] for name in others)):
        ranks = [first + r for r in range(prod(sizes.values())) if _place(r, others, sizes) == place]
        group = dist.new_group(ranks)
        own = group if rank in ranks else own
    return own


def axis_of(name: str) -> MeshAxis:
    return _axes[name]


def position(axis: str) -> tuple[int, int]:
    """Which piece of a dim this rank holds, and of how many."""
    return (axis_of(axis).rank, axis_of(axis).size) if axis else (0, 1)


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
