"""Shards of tensors as boxes, whatever the layout, and which rank writes which box.

A shard is a product of runs of indices, so it is as many boxes as there are ways to take one run of each dim. What is
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
from pipeline.runtime.programs.parameters import runs_of
from stages.train.engines.engine import StateShard
from stages.train.engines.tensors import sizes_of

Place = tuple[tuple[int, ...], tuple[int, ...]]  # of a box in the whole tensor: offsets and sizes


@dataclass(frozen=True)
class Box:
    """A part of a shard that is one box of the whole tensor."""

    place: Place
    within: tuple[slice, ...]  # in the shard


@dataclass(frozen=True)
class BoxedTensor:
    """A shard, in boxes."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]  # of the whole
    cut: str  # how the whole is cut: shards with the same cut cover it, each element once or as replicas
    boxes: tuple[Box, ...]

    @staticmethod
    def of(shard: StateShard) -> BoxedTensor:
        cut = f"{shard.layout} on {','.join(map(str, sizes_of(shard.axes)))}"
        boxes = boxes_of(runs_of(shard.shape, shard.layout, shard.axes))
        return BoxedTensor(shard.name, shard.tensor.detach(), tuple(shard.shape), cut, boxes)

    @staticmethod
    def whole(name: str, tensor: Tensor) -> BoxedTensor:
        return BoxedTensor(name, tensor, tuple(tensor.shape), "", boxes_of([((0, size),) for size in tensor.shape]))

    def offer(self) -> BoxOffer:
        return BoxOffer(self.name, self.tensor.dtype, self.shape, self.cut, tuple(box.place for box in self.boxes))


@dataclass(frozen=True)
class BoxOffer:
    """What a rank could write of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    cut: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor, in boxes that cover it, each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: dict[Place, str]  # in which file

    def is_whole(self) -> bool:
        return sum(prod(sizes) for _, sizes in self.boxes) == prod(self.shape)


Table = Mapping[str, SavedTensor]


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def boxes_of(runs: Iterable[tuple[Run, ...]]) -> tuple[Box, ...]:
    """One run of each dim, in all ways; a dim of no elements gives none."""
    dims = []
    for dim in runs:
        ends = accumulate(length for _, length in dim)
        parts = [(start, length, slice(end - length, end)) for (start, length), end in zip(dim, ends, strict=True)]
        dims.append([part for part in parts if part[1]])
    chosen = ([tuple(column) for column in zip(*parts, strict=True)] or [(), (), ()] for parts in product(*dims))
    return tuple(Box((offsets, sizes), within) for offsets, sizes, within in chosen)


def shared_out(offers: Sequence[Sequence[BoxOffer]]) -> dict[str, SavedTensor]:
    """What each rank offers, shared out: a box is written by the one of its holders that has least to write so far.

    Ranks of different meshes may hold one tensor in different cuts, such as a tied weight: the first one is written.
    """
    first: dict[str, BoxOffer] = {}
    holders: dict[str, dict[Place, list[int]]] = {}
    for rank, own in enumerate(offers):
        for offer in own:
            if first.setdefault(offer.name, offer).cut == offer.cut:
                found = holders.setdefault(offer.name, {})
                for place in offer.places:
                    found.setdefault(place, []).append(rank)
    load = [0] * len(offers)
    result = {name: SavedTensor(offer.dtype, offer.shape, {}) for name, offer in first.items()}
    for name, places in holders.items():
        for place, ranks in places.items():
            rank = min(ranks, key=load.__getitem__)
            load[rank] += prod(place[1]) * first[name].dtype.itemsize
            result[name].boxes[place] = file_of(rank)
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
