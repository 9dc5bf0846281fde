"""The process group of each mesh axis, by name. Set once by the program that trains, read by every collective.

Several axes taken as one have their names joined, in the order of the mesh: `d0+d1`, the last one innermost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch.distributed as dist


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
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if prod(sizes.values()) != world:
        raise ValueError(f"the plan's mesh {dict(sizes)} has {prod(sizes.values())} ranks, this run has {world}")
    _axes.clear()
    groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
    for count in range(1, len(sizes) + 1):
        for names in combinations(sizes, count):
            wide = tuple(name for name in names if sizes[name] > 1)  # an axis of size one adds no rank
            if wide not in groups:
                groups[wide] = _group(wide, sizes, world, rank)
            size = prod(sizes[name] for name in names)
            _axes[joined(names)] = MeshAxis(size, _place(rank, names, sizes), groups[wide])


def _place(rank: int, names: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """The rank's number among those that differ on these axes alone."""
    place, stride = 0, prod(sizes.values())
    for name, size in sizes.items():
        stride //= size
        place = place * size + rank // stride % size if name in names else place
    return place


def _group(names: tuple[str, ...], sizes: Mapping[str, int], world: int, rank: int) -> dist.ProcessGroup | None:
    """Every rank makes every group, in the same order, and keeps its own."""
    if not names:
        return None
    if prod(sizes[name] for name in names) == world:
        return dist.group.WORLD
    others = tuple(name for name in sizes if name not in names)
    own = None
    for place in range(prod(sizes[name] for name in others)):
        ranks = [r for r in range(world) if _place(r, others, sizes) == place]
        group = dist.new_group(ranks)
        own = group if rank in ranks else own
    return own


def axis_of(name: str) -> MeshAxis:
    return _axes[name]
