"""The tensors of a snapshot: shards as boxes of whole tensors, in files that nothing is run by.

A shard is a product of runs of indices, so it is as many boxes as there are ways to take one run of each dim. What is
written are whole tensors, in boxes, each by one of the ranks that hold it; a run with another plan has other boxes, and
each is filled from those that it meets.

Every rank writes a safetensors file; a box is a tensor of it, under the name `weights/up.weight@8,0` with its first
index in the whole. `tensors.json` has of each tensor its type, its shape and its boxes: in which file, from where, how
large. What safetensors has no type for is stored as another of the same bits: complex numbers as pairs, others as
integers. Whoever reads a table checks all of it first (`read_table`, `check_boxes`): a snapshot may come from anywhere.
"""

from __future__ import annotations

import json
import random
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.ir.layout import Run
from shardwright.pipeline.runtime.programs.parameters import runs_of
from shardwright.pipeline.user.weights import TYPES, write_weights
from shardwright.stages.train.engines.engine import StateShard
from shardwright.stages.train.engines.tensors import sizes_of
from shardwright.stages.train.snapshots.manifest import TENSORS, Damaged, read_plain

Place = tuple[tuple[int, ...], tuple[int, ...]]  # of a box in the whole tensor: offsets and sizes
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FILE = re.compile(r"rank-\d{5,9}\.safetensors")
_DIMS, _BYTES = 64, 2**62  # more than any tensor has
_PRIME = 2**127 - 1


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
        boxes = {box.place: "" for box in self.boxes}
        return self.name, self.cut, SavedTensor(self.tensor.dtype, self.shape, boxes)


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor, in boxes that cover it, each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: dict[Place, str]  # in which file


Table = Mapping[str, SavedTensor]
BoxOffer = tuple[str, str, SavedTensor]  # what a rank could write of one tensor: its name, how it is cut, its boxes


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
    cuts: dict[str, str] = {}
    holders: dict[str, dict[Place, list[int]]] = {}
    result: dict[str, SavedTensor] = {}
    for rank, own in enumerate(offers):
        for name, cut, offered in own:
            if cuts.setdefault(name, cut) == cut:
                result.setdefault(name, replace(offered, boxes={}))
                for place in offered.boxes:
                    holders.setdefault(name, {}).setdefault(place, []).append(rank)
    load = [0] * len(offers)
    for name, places in holders.items():
        for place, ranks in places.items():
            rank = min(ranks, key=load.__getitem__)
            load[rank] += prod(place[1]) * result[name].dtype.itemsize
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


def key_of(name: str, place: Place) -> str:
    return f"{name}@{','.join(map(str, place[0]))}"


# ---- written


def write_boxes(path: Path, tensors: Iterable[BoxedTensor], mine: Mapping[str, set[Place]]) -> None:
    """Those boxes of these tensors that this rank is to write."""
    boxes = {}
    for tensor in tensors:
        for box in (box for box in tensor.boxes if box.place in mine.get(tensor.name, ())):
            part = tensor.tensor[box.within]
            if part.is_complex():
                part = torch.view_as_real(part.resolve_conj())
            elif part.dtype not in TYPES:
                part = part.view(BITS[part.dtype.itemsize])
            boxes[key_of(tensor.name, box.place)] = part
    ordered = sorted(boxes.items(), key=lambda item: -item[1].itemsize)  # each begins at a multiple of its size
    specs = {key: (part.dtype, tuple(part.shape)) for key, part in ordered}
    write_weights(path, specs, (part for _, part in ordered), {})


def write_table(folder: Path, table: Table) -> None:
    rows = {
        name: {
            "dtype": str(saved.dtype).removeprefix("torch."),
            "shape": saved.shape,
            "boxes": [[file, *place] for place, file in saved.boxes.items()],
        }
        for name, saved in table.items()
    }
    write_atomic(folder / TENSORS, json.dumps(rows, separators=(",", ":")).encode())


# ---- read


def read_table(folder: Path, files: Iterable[str]) -> Table:
    """All of it is checked: types, names of files, and that the boxes of each tensor are the whole of it."""
    try:
        rows = json.loads(read_plain(folder, TENSORS))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{TENSORS} is not whole ({type(error).__name__})") from None
    known = {name for name in files if _FILE.fullmatch(name)}
    if not isinstance(rows, dict):
        raise Damaged(f"{TENSORS} is no table of tensors")
    return {name: _tensor(name, row, known) for name, row in rows.items()}


def _tensor(name: str, row: Any, files: set[str]) -> SavedTensor:
    def require(right: bool, otherwise: str) -> None:
        if not right:
            raise Damaged(f"{TENSORS}: {name[:80]!r} {otherwise}")

    def numbers(found: Any) -> tuple[int, ...]:
        right = isinstance(found, list) and all(type(number) is int and 0 <= number < 2**62 for number in found)
        require(right, "has a size or an offset that is no number of elements")
        return tuple(found)

    right = isinstance(row, dict) and row.keys() == {"dtype", "shape", "boxes"} and isinstance(row["boxes"], list)
    require(right, "is no row with dtype, shape and boxes")
    dtype: Any = DTYPES.get(row["dtype"]) if isinstance(row["dtype"], str) else None
    right = dtype is not None and (dtype in TYPES or dtype.is_complex or dtype.itemsize in BITS)
    require(right, f"has the type {row['dtype']!r:.40}")
    shape = numbers(row["shape"])
    require(len(shape) <= _DIMS and prod(shape) * dtype.itemsize <= _BYTES, "is larger than any tensor")
    boxes: dict[Place, str] = {}
    for box in row["boxes"]:
        require(isinstance(box, list) and len(box) == 3, "has a box that is no file, offsets and sizes")
        file, offsets, sizes = box[0], numbers(box[1]), numbers(box[2])
        known = isinstance(file, str) and file in files
        require(known, f"lies in {file!r:.80}, which is no file of the snapshot")
        require(len(offsets) == len(sizes) == len(shape), "has a box of other dims")
        edges = zip(offsets, sizes, shape, strict=True)
        require(all(size >= 1 and start + size <= end for start, size, end in edges), "has a box outside of it")
        boxes[offsets, sizes] = file
    right = len(boxes) == len(row["boxes"]) and tiles(shape, boxes)
    require(right, "has boxes that overlap or leave something out")
    return SavedTensor(dtype, shape, boxes)


def tiles(shape: tuple[int, ...], places: Iterable[Place]) -> bool:
    """Whether these boxes, each within the shape, are the whole of it, with every element once.

    A box with first index o and size s is the polynomial prod_d (x_d^o_d + ... + x_d^(o_d+s_d-1)), and boxes tile the
    whole just when their sum is the polynomial of the whole. Both are compared at a point drawn at random modulo a
    prime, multiplied by prod_d (1 - x_d): whoever made the table does not know the point.
    """
    draw = random.Random(secrets.randbits(128))
    point = [draw.randrange(2, _PRIME) for _ in shape]
    power = cache(lambda x, exponent: pow(x, exponent, _PRIME))  # boxes have most of their edges in common

    def value(place: Place) -> int:
        found = 1
        for x, start, size in zip(point, *place, strict=True):
            found = found * (power(x, start) - power(x, start + size)) % _PRIME
        return found

    whole = value(((0,) * len(shape), shape)) if prod(shape) else 0
    return (sum(map(value, places)) - whole) % _PRIME == 0


def check_boxes(folder: Path, table: Table, part: int = 0, parts: int = 1) -> None:
    """Every `parts`-th file has just the boxes that the table says, in their types and shapes."""
    wanted: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for name, saved in table.items():
        dtype, pair = (saved.dtype.to_real(), [2]) if saved.dtype.is_complex else (saved.dtype, [])
        stored = TYPES[dtype if dtype in TYPES else BITS[dtype.itemsize]]
        for place, file in saved.boxes.items():
            wanted.setdefault(file, {})[key_of(name, place)] = stored, [*place[1], *pair]
    for file in sorted(wanted)[part::parts]:
        opened = _opened(folder, file)
        keys = set(opened.keys())
        for key, spec in wanted[file].items():
            view = opened.get_slice(key) if key in keys else None
            if view is None or (view.get_dtype(), list(view.get_shape())) != spec:
                raise Damaged(f"{file} has not the {key[:80]!r} of {TENSORS}")


def _opened(folder: Path, file: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open
        return opened(folder / file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{file} is no whole safetensors file ({str(error)[:80]})") from None


class TensorFiles:
    """Of one snapshot, mapped into memory when a box of them is asked for."""

    def __init__(self, folder: Path, table: Table) -> None:
        self.folder, self.table = folder, table
        self.files: dict[str, Any] = {}

    def fill(self, tensor: BoxedTensor) -> None:
        """From all boxes that it meets; nothing else is read."""
        saved = self.table[tensor.name]
        for box in tensor.boxes:
            target = tensor.tensor[box.within]
            for place, file in saved.boxes.items():
                shared = overlap(box.place, place)
                if shared is not None:
                    target[shared[0]].copy_(self._read(file, key_of(tensor.name, place), saved.dtype, shared[1]))

    def _read(self, name: str, key: str, dtype: torch.dtype, slices: tuple[slice, ...]) -> Tensor:
        if name not in self.files:
            self.files[name] = _opened(self.folder, name)
        file = self.files[name]
        found: Tensor = file.get_slice(key)[slices] if slices else file.get_tensor(key)
        if dtype.is_complex:
            return torch.view_as_complex(found.clone())  # pairs may lie where no complex number may
        return found if found.dtype == dtype else found.view(dtype)
