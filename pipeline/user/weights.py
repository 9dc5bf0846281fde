"""Weights of the unsplit model in files, read and written one tensor, or one shard of a tensor, at a time.

A safetensors file is eight bytes with the length of its header, the header (JSON: name -> type, shape and where the
bytes lie), and the bytes; so it is written as a stream, once the names and shapes are known.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.base.files import writing_whole
from shardwright.pipeline.ir.layout import Run

Shape = tuple[int, ...]
SHOWN = 3  # names that an error lists
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


class WeightsError(ShardwrightError):
    """A file of weights cannot be read, or is not of this model."""


class WeightFile(Protocol):
    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """The elements in these slices of the dims."""


def open_weights(path: Path, where: str) -> WeightFile:
    """Nothing but names and shapes is read yet."""
    try:
        if path.name.endswith(".index.json"):
            return _SafetensorsIndex(path)
        return _Safetensors(path) if path.suffix == ".safetensors" else _StateDict(path)
    except Exception as error:  # of several libraries, each with errors of its own
        first = (str(error).splitlines() or [""])[0]
        raise WeightsError(
            f"{path} cannot be read: {type(error).__name__}: {first}",
            where=where,
            remedy="give a safetensors file, its index, or a state dict of tensors alone",
        ) from error


class _Safetensors:
    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        opened: Any = safe_open
        self.file = opened(path, framework="pt")
        self.shapes = {name: tuple(self.file.get_slice(name).get_shape()) for name in self.file.keys()}  # noqa: SIM118

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        found: Tensor = self.file.get_slice(name)[box] if box else self.file.get_tensor(name)
        return found.clone()  # it may be a view of the file


class _SafetensorsIndex:
    """A model in several files, which an index lists."""

    def __init__(self, index: Path) -> None:
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        if outside := [place for place in places.values() if Path(place).is_absolute() or ".." in Path(place).parts]:
            raise ValueError(f"it names {outside[0]!r:.80}, which lies outside of its folder")
        files = {file: _Safetensors(index.parent / file) for file in sorted(set(places.values()))}
        self.files = {name: files[file] for name, file in places.items()}
        self.shapes = {name: file.shapes[name] for name, file in self.files.items()}

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        return self.files[name].read(name, box)


class _StateDict:
    """A state dict that torch saved: mapped into memory, not read, where its form allows that."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # of before torch 1.6
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise ValueError("it is no mapping from names to tensors")
        self.tensors: Mapping[str, Tensor] = loaded
        self.shapes = {name: tuple(tensor.shape) for name, tensor in loaded.items()}

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        return self.tensors[name][box].clone()


def read_shard(weights: WeightFile, name: str, runs: Sequence[Sequence[Run]]) -> Tensor:
    """The elements whose indices lie in these runs of each dim; nothing else is read."""
    boxes = [[slice(start, start + count) for start, count in dim] for dim in runs]
    shards = [weights.read(name, box) for box in product(*boxes)]
    for dim in reversed(range(len(runs))):  # the last dim varies fastest
        count = len(boxes[dim])
        groups = [shards[i : i + count] for i in range(0, len(shards), count)]
        shards = [torch.cat(group, dim) if count > 1 else group[0] for group in groups]
    return shards[0]


def match_names(file: WeightFile, names: Mapping[str, str], shapes: Mapping[str, Shape], where: str) -> dict[str, str]:
    """Tensor of the model -> its name in the file, which has them all, and no others.

    `names` has all names in the model's state dict: of tied weights any will do, and the last one counts, as it does
    for `load_state_dict`.
    """
    found = {own: name for name, own in names.items() if name in file.shapes}
    missing = [name for name, own in names.items() if own not in found]
    extra = [name for name in file.shapes if name not in names]
    wrong = [
        f"{name} has shape {list(file.shapes[name])} instead of {list(shapes[own])}"
        for name, own in names.items()
        if file.shapes.get(name, shapes[own]) != shapes[own]
    ]
    problems = [f"it has no {_some(missing)}"] if missing else []
    problems += [f"the model has no {_some(extra)}"] if extra else []
    problems += [_some(wrong)] if wrong else []
    if problems:
        raise WeightsError(f"these are not weights of this model: {'; '.join(problems)}", where=where)
    return found


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


def write_weights(
    path: Path, specs: Mapping[str, tuple[torch.dtype, Shape]], tensors: Iterable[Tensor], about: Mapping[str, str]
) -> None:
    """A safetensors file of these tensors, given one after another; it is whole or absent."""
    entries: dict[str, Any] = {"__metadata__": dict(about)}
    end = 0
    for name, (dtype, shape) in specs.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with writing_whole(path) as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for (name, (dtype, shape)), tensor in zip(specs.items(), tensors, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), name
            file.write(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
