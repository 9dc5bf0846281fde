"""Pieces of tensors as boxes, whatever the layout, and which rank writes which box.

A piece is a product of runs of indices, so it is as many boxes as there are ways to take one run of each dim. What is
written are whole tensors, in boxes; a run with another plan has other boxes, and each is filled from those that it
meets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod

import torch
from torch import Tensor

from pipeline.ir.layout import Run
from pipeline.runtime.programs.mesh import axis_of
from pipeline.runtime.programs.parameters import runs_of
from stages.train.engines.engine import Held

Place = tuple[tuple[int, ...], tuple[int, ...]]  # of a box in the whole tensor: offsets and sizes


@dataclass(frozen=True)
class Box:
    """A part of a piece that is one box of the whole tensor."""

    offsets: tuple[int, ...]  # in the whole tensor
    sizes: tuple[int, ...]
    within: tuple[slice, ...]  # in the piece


@dataclass(frozen=True)
class Piece:
    name: str
    tensor: Tensor
    shape: tuple[int, ...]  # of the whole
    cut: str  # how the whole is cut: pieces with the same cut cover it, each element once or as replicas
    boxes: tuple[Box, ...]

    @staticmethod
    def of(held: Held) -> Piece:
        sizes = ",".join(str(axis_of(name).size) for name in held.axes)
        boxes = boxes_of(runs_of(held.shape, held.layout, held.axes))
        return Piece(held.name, held.piece.detach(), tuple(held.shape), f"{held.layout} on {sizes}", boxes)

    @staticmethod
    def whole(name: str, tensor: Tensor) -> Piece:
        return Piece(name, tensor, tuple(tensor.shape), "", boxes_of([((0, size),) for size in tensor.shape]))

    def spec(self) -> PieceSpec:
        places = tuple((box.offsets, box.sizes) for box in self.boxes)
        return PieceSpec(self.name, self.tensor.dtype, self.shape, self.cut, places)


@dataclass(frozen=True)
class PieceSpec:
    """What a rank could write of one tensor: its piece without the numbers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    cut: str
    places: tuple[Place, ...]


def boxes_of(runs: Iterable[tuple[Run, ...]]) -> tuple[Box, ...]:
    """One run of each dim, in all ways; a dim of no elements gives none."""
    dims = []
    for dim in runs:
        ends = list(accumulate(length for _, length in dim))
        dims.append(
            [
                (start, length, slice(end - length, end))
                for (start, length), end in zip(dim, ends, strict=True)
                if length
            ]
        )
    return tuple(
        Box(tuple(r[0] for r in taken), tuple(r[1] for r in taken), tuple(r[2] for r in taken))
        for taken in product(*dims)
    )


@dataclass(frozen=True)
class BoxWriters:
    """One tensor, and of each box of it the rank that writes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    writers: dict[Place, int]

    def is_whole(self) -> bool:
        return sum(prod(sizes) for _, sizes in self.writers) == prod(self.shape)


def shared_out(offers: Sequence[Sequence[PieceSpec]]) -> dict[str, BoxWriters]:
    """What each rank offers, shared out: a box is written by the one of its holders that has least to write so far.

    Ranks of different meshes may hold one tensor in different cuts, such as a tied weight: the first one is written.
    """
    first: dict[str, PieceSpec] = {}
    holders: dict[str, dict[Place, list[int]]] = {}
    for rank, own in enumerate(offers):
        for offer in own:
            if first.setdefault(offer.name, offer).cut == offer.cut:
                found = holders.setdefault(offer.name, {})
                for place in offer.places:
                    found.setdefault(place, []).append(rank)
    load = [0] * len(offers)
    result = {name: BoxWriters(offer.dtype, offer.shape, {}) for name, offer in first.items()}
    for name, places in holders.items():
        for place, ranks in places.items():
            rank = min(ranks, key=load.__getitem__)
            load[rank] += prod(place[1]) * first[name].dtype.itemsize
            result[name].writers[place] = rank
    return result


def overlap(box: Place, other: Place) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two boxes of one tensor share, as slices of each of them; None for nothing."""
    mine, theirs = [], []
    for start, size, other_start, other_size in zip(*box, *other, strict=True):
        low, high = max(start, other_start), min(start + size, other_start + other_size)
        if low >= high:
            return None
        mine.append(slice(low - start, high - start))
        theirs.append(slice(low - other_start, high - other_start))
    return tuple(mine), tuple(theirs)


def mismatch(pieces: Mapping[str, Piece], saved: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> str:
    """Why what was saved, by type and shape, cannot fill these pieces, or nothing."""
    for name, piece in pieces.items():
        if name not in saved:
            if piece.boxes:
                return f"it has no {name}"
            continue
        dtype, shape = saved[name]
        if shape != piece.shape:
            return f"{name} has shape {list(shape)} in it, and {list(piece.shape)} here"
        if dtype.is_complex and not piece.tensor.is_complex():
            return f"{name} is complex in it, and not here"
    return ""
