"""Parameters on one rank: its pieces of the unsplit ones, and a module's by their names inside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from pipeline.ir.layout import Layout
from pipeline.runtime.collectives import piece
from pipeline.runtime.mesh import axis_of


def piece_of(tensor: Tensor, layout: Layout, axes: Iterable[str]) -> Tensor:
    """This rank's piece of an unsplit tensor."""
    held = [axis_of(name) for name in axes]
    for split in layout.splits(tuple(axis.size for axis in held)):
        tensor = piece(tensor, held[split.axis], split.dim, split.parts)
    return tensor.contiguous().clone()


def scope(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a module's name, by their names inside it."""
    start = f"{prefix}." if prefix else ""
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
