"""Parameters on one rank: its pieces of the unsplit ones, and a module's by their names inside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pipeline.ir.layout import Layout, Run
from pipeline.runtime.programs.collectives import gather, padded, piece
from pipeline.runtime.programs.mesh import axis_of


def piece_of(tensor: Tensor, layout: Layout, axes: Iterable[str]) -> Tensor:
    """This rank's piece of an unsplit tensor."""
    over = [axis_of(name) for name in axes]
    for split in layout.splits(tuple(axis.size for axis in over)):
        tensor = piece(tensor, over[split.axis], split.dim, split.parts)
    return tensor.contiguous().clone()


def whole_of(piece: Tensor, shape: tuple[int, ...], layout: Layout, axes: Iterable[str]) -> Tensor:
    """The unsplit tensor, of that shape, on every rank; all ranks ask for it together."""
    names = list(axes)
    sizes = tuple(axis_of(name).size for name in names)
    uneven = layout.uneven(shape, sizes)
    with torch.no_grad():
        for split in reversed(layout.splits(sizes)):
            size = shape[split.dim] if split.dim in uneven else None
            piece = gather(piece, names[split.axis], split.dim, split.parts, size)
    return piece.detach()


def with_padding(piece: Tensor, shape: tuple[int, ...], layout: Layout, axes: Iterable[str]) -> Tensor:
    """This rank's own elements of an unsplit tensor of that shape, with zeros behind them where pieces are uneven."""
    for dim, size in enumerate(layout.local_shape(shape, tuple(axis_of(name).size for name in axes))):
        piece = padded(piece, dim, size)
    return piece


def own_elements(piece: Tensor, shape: tuple[int, ...], layout: Layout, axes: Iterable[str]) -> Tensor:
    """The piece without its padding."""
    for dim, runs in enumerate(runs_of(shape, layout, axes)):
        piece = piece.narrow(dim, 0, sum(length for _, length in runs))
    return piece


def runs_of(shape: tuple[int, ...], layout: Layout, axes: Iterable[str]) -> tuple[tuple[Run, ...], ...]:
    """This rank's piece as runs of indices of each dim of the unsplit tensor."""
    over = [axis_of(name) for name in axes]
    return layout.runs(shape, tuple(axis.size for axis in over), tuple(axis.rank for axis in over))


def scope(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a module's name, by their names inside it."""
    start = f"{prefix}." if prefix else ""
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
