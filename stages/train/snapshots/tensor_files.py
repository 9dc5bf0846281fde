"""The tensors of a snapshot in files that nothing is run by: safetensors, one of each rank, and a table in JSON.

`tensors.json` has of each tensor its type, its shape and its boxes: in which file, from where, how large. A box is a
tensor of its file, under the name `weights/up.weight@8,0` with its first index in the whole. What safetensors has no
type for is stored as another of the same bits: complex numbers as pairs, others as integers.

Whoever reads a table checks all of it first (`read_table`, `check_boxes`): a snapshot may come from anywhere.
"""

from __future__ import annotations

import json
import random
import re
import secrets
from collections.abc import Iterable, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.base.files import write_atomic
from pipeline.user.weights import TYPES, write_weights
from stages.train.snapshots.boxes import BoxedTensor, Place, SavedTensor, Table, overlap
from stages.train.snapshots.manifest import TENSORS, Damaged, read_plain

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FILE = re.compile(r"rank-\d{5,9}\.safetensors")
_DIMS, _BYTES = 64, 2**62  # more than any tensor has
_PRIME = 2**127 - 1


def key_of(name: str, place: Place) -> str:
    return f"{name}@{','.join(map(str, place[0]))}"


# ---- written


def write_boxes(path: Path, tensors: Iterable[BoxedTensor], mine: Mapping[str, set[Place]]) -> None:
    """Those boxes of these tensors that this rank is to write."""
    boxes = {
        key_of(tensor.name, box.place): _as_stored(tensor.tensor[box.within])
        for tensor in tensors
        for box in tensor.boxes
        if box.place in mine.get(tensor.name, ())
    }
    ordered = sorted(boxes.items(), key=lambda item: -item[1].itemsize)  # each begins at a multiple of its size
    specs = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in ordered}
    write_weights(path, specs, (tensor for _, tensor in ordered), {})


def _as_stored(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.dtype in TYPES else tensor.view(_BITS[tensor.dtype.itemsize])


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
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "boxes"} or not isinstance(row["boxes"], list):
        raise _wrong(name, "is no row with dtype, shape and boxes")
    dtype = DTYPES.get(row["dtype"]) if isinstance(row["dtype"], str) else None
    if dtype is None or not (dtype in TYPES or dtype.is_complex or dtype.itemsize in _BITS):
        raise _wrong(name, f"has the type {row['dtype']!r:.40}")
    shape = _numbers(name, row["shape"])
    if len(shape) > _DIMS or prod(shape) * dtype.itemsize > _BYTES:
        raise _wrong(name, "is larger than any tensor")
    boxes = dict(_box(name, box, shape, files) for box in row["boxes"])
    if len(boxes) != len(row["boxes"]) or not tiles(shape, boxes):
        raise _wrong(name, "has boxes that overlap or leave something out")
    return SavedTensor(dtype, shape, boxes)


def _box(name: str, box: Any, shape: tuple[int, ...], files: set[str]) -> tuple[Place, str]:
    if not isinstance(box, list) or len(box) != 3:
        raise _wrong(name, "has a box that is no file, offsets and sizes")
    file, offsets, sizes = box[0], _numbers(name, box[1]), _numbers(name, box[2])
    if not isinstance(file, str) or file not in files:
        raise _wrong(name, f"lies in {file!r:.80}, which is no file of the snapshot")
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        raise _wrong(name, "has a box of other dims")
    if any(size < 1 or start + size > whole for start, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise _wrong(name, "has a box outside of it")
    return (offsets, sizes), file


def _numbers(name: str, found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or any(type(number) is not int or not 0 <= number < 2**62 for number in found):
        raise _wrong(name, "has a size or an offset that is no number of elements")
    return tuple(found)


def _wrong(name: str, what: str) -> Damaged:
    return Damaged(f"{TENSORS}: {name[:80]!r} {what}")


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
        for place, file in saved.boxes.items():
            wanted.setdefault(file, {})[key_of(name, place)] = _stored_as(saved.dtype, place[1])
    for file in sorted(wanted)[part::parts]:
        opened = _opened(folder, file)
        keys = set(opened.keys())
        for key, spec in wanted[file].items():
            view = opened.get_slice(key) if key in keys else None
            if view is None or (view.get_dtype(), list(view.get_shape())) != spec:
                raise Damaged(f"{file} has not the {key[:80]!r} of {TENSORS}")


def _stored_as(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[str, list[int]]:
    if dtype.is_complex:
        return TYPES[dtype.to_real()], [*sizes, 2]
    return TYPES[dtype if dtype in TYPES else _BITS[dtype.itemsize]], list(sizes)


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
