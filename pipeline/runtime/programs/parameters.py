"""Parameters on one rank: its shards of the unsplit ones, and a module's by their names inside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shardwright.pipeline.ir.layout import Layout, Run
from shardwright.pipeline.runtime.programs.collectives import gather, local_shard, padded
from shardwright.pipeline.runtime.programs.mesh import axis_of


def shard_of(tensor: Tensor, layout: Layout, axes: Iterable[str]) -> Tensor:
    """This rank's shard of an unsplit tensor."""
    over = [axis_of(name) for name in axes]
    for split in layout.splits(tuple(axis.size for axis in over)):
        tensor = local_shard(tensor, over[split.axis], split.dim, split.parts)
    return tensor.contiguous().clone()


def whole_of(shard: Tensor, shape: tuple[int, ...], layout: Layout, axes: Iterable[str]) -> Tensor:
    """The unsplit tensor, of that shape, on every rank; all ranks ask for it together."""
    names = list(axes)
    sizes = tuple(axis_of(name).size for name in names)
    uneven = layout.uneven(shape, sizes)
    with torch.no_grad():
        for split in reversed(layout.splits(sizes)):
            size = shape[split.dim] if split.dim in uneven else None
            shard = gather(shard, names[split.axis], split.dim, split.parts, size)
    return shard.detach()


def with_padding(shard: Tensor, shape: tuple[int, ...], layout: Layout, axes: Iterable[str]) -> Tensor:
    """This rank's own elements of an unsplit tensor of that shape, with zeros behind them where shards are uneven."""
    for dim, size in enumerate(layout.local_shape(shape, tuple(axis_of(name).size for name in axes))):
        shard = padded(shard, dim, size)
    return shard


def own_elements(shard: Tensor, shape: tuple[int, ...], layout: Layout, axes: Iterable[str]) -> Tensor:
    """The shard without its padding."""
    for dim, runs in enumerate(runs_of(shape, layout, axes)):
        shard = shard.narrow(dim, 0, sum(length for _, length in runs))
    return shard


def runs_of(shape: tuple[int, ...], layout: Layout, axes: Iterable[str]) -> tuple[tuple[Run, ...], ...]:
    """This rank's shard as runs of indices of each dim of the unsplit tensor."""
    over = [axis_of(name) for name in axes]
    return layout.runs(shape, tuple(axis.size for axis in over), tuple(axis.rank for axis in over))


def scope(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a module's name, by their names inside it."""
    start = f"{prefix}." if prefix else ""
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
