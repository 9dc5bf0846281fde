"""The process group of each mesh axis, by name. Set once by the program that trains, read by every collective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class MeshAxis:
    size: int
    rank: int
    group: dist.ProcessGroup | None


_axes: dict[str, MeshAxis] = {}


def set_mesh(sizes: Mapping[str, int]) -> None:
    """Builds a group for every axis; the world is the product of the axes, the last one innermost."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    product = 1
    for size in sizes.values():
        product *= size
    if product != world:
        raise ValueError(f"the plan's mesh {dict(sizes)} has {product} ranks, this run has {world}")
    _axes.clear()
    stride = world
    for name, size in sizes.items():
        stride //= size
        _axes[name] = MeshAxis(size, rank // stride % size, _group(size, stride, world, rank))


def _group(size: int, stride: int, world: int, rank: int) -> dist.ProcessGroup | None:
    """Every rank makes every group, in the same order, and keeps its own."""
    if size == 1:
        return None
    if size == world:
        return dist.group.WORLD
    own = None
    for start in range(world):
        if start // stride % size == 0:
            ranks = [start + i * stride for i in range(size)]
            group = dist.new_group(ranks)
            own = group if rank in ranks else own
    return own


def axis_of(name: str) -> MeshAxis:
    return _axes[name]
