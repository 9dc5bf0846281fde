"""Which samples make up each step, and one rank's part of them."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.ir.layout import Layout, Run
from shardwright.pipeline.runtime.context import step
from shardwright.pipeline.runtime.programs.collectives import local_shard
from shardwright.pipeline.runtime.programs.mesh import axis_of
from shardwright.pipeline.runtime.step.slices import Slices


def sample_indices(start: int, count: int, length: int, shuffle: bool, seed: int) -> list[int]:
    """So many samples after those of earlier steps: the data set in order, or in an order of its own each epoch."""
    indices = []
    for position in range(start, start + count):
        epoch, place = divmod(position, length)
        indices.append(_order(length, seed, epoch)[place] if shuffle else place)
    return indices


@lru_cache(maxsize=1)
def _order(length: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return list(torch.randperm(length, generator=generator).tolist())


class SampleError(TrainError):
    """A sample of the user's data set that cannot be read, or is not like the others."""


class Batches:
    """This rank's part of every micro-batch, cut as the plan says; only samples that it needs are loaded."""

    def __init__(
        self,
        dataset: Dataset[Any],
        job: Mapping[str, Any],
        layouts: Mapping[str, Layout],
        axes: list[str],
        key: str = "dataset",
        slices: Slices | None = None,
    ) -> None:
        """`key` is that of the data set in its file; `slices` are those of the model's batch, where it is cut."""
        self.dataset, self.layouts, self.axes = dataset, layouts, axes
        self.specs = job["model"]["batch"]
        self.settings = job["data"]
        self.where = f"{job['where']['data']}: {key}"
        self.size = next(iter(self.specs.values()))["shape"][0]
        self.slices = slices or Slices((self.size,))
        self.length = length_of(dataset, self.where)
        for what in sample_mistakes(self._read(0), self.specs):
            raise TrainError(what, where=self.where, remedy="choose data and model that belong together")

    def _read(self, index: int) -> Any:
        """The user's code: what goes wrong there is told with the sample and the rank."""
        step.sample = index
        try:
            return self.dataset[index]
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            raise self._failed(index, f"cannot be read{_rank()}: {text}{_place_in(error)}") from error
        finally:
            step.sample = None

    def _failed(self, index: int, what: str) -> SampleError:
        told = f"sample {index} of {self.length} {what}"
        return SampleError(told, where=self.where, remedy="mend it, or leave it out of the data")

    def _sample(self, index: int) -> Mapping[str, Any]:
        sample: Mapping[str, Any] = self._read(index)
        for what in sample_mistakes(sample, self.specs):
            raise self._failed(index, f"is not as the first one{_rank()}: {what}")
        return sample

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        start, size = self.slices.start(number), self.slices.size(number)
        indices = sample_indices(start, size, self.length, self.settings["shuffle"], self.settings["seed"])
        rows = self._rows(size)
        samples = [self._sample(i) for start, count in rows for i in indices[start : start + count]]
        stacked = {name: torch.stack([torch.as_tensor(s[name]) for s in samples]) for name in self.specs}
        return {name: self._cut(name, tensor, whole=len(samples) == size) for name, tensor in stacked.items()}

    def _rows(self, size: int) -> tuple[Run, ...]:
        """The rows of a micro-batch that this rank needs of any input: its own where all are split alike on dim 0."""
        sizes = tuple(axis_of(name).size for name in self.axes)
        rank = tuple(axis_of(name).rank for name in self.axes)
        shapes = {name: (size, *spec["shape"][1:]) for name, spec in self.specs.items()}
        own = {self.layouts[name].runs(shape, sizes, rank)[0] for name, shape in shapes.items()}
        return own.pop() if len(own) == 1 else ((0, size),)

    def _cut(self, name: str, rows: Tensor, *, whole: bool) -> Tensor:
        """`whole`: the rows are all of the micro-batch."""
        held = [axis_of(axis) for axis in self.axes]
        for split in self.layouts[name].splits(tuple(axis.size for axis in held)):
            if split.dim or whole:
                rows = local_shard(rows, held[split.axis], split.dim, split.parts)
        return rows.contiguous()


def _rank() -> str:
    return f" on rank {dist.get_rank()}" if dist.is_initialized() else ""


def _place_in(error: BaseException) -> str:
    """The innermost line that is not of an installed package: the user's."""
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without ours
    own = [frame for frame in frames if not frame.filename.startswith(installed)]
    return "".join(f" ({frame.filename}:{frame.lineno})" for frame in (own or frames)[-1:])


def sample_mistakes(sample: Any, specs: Mapping[str, Any]) -> Iterator[str]:
    """What an item of the data lacks of the model's batch: names, shapes, types."""
    if not isinstance(sample, Mapping):
        yield f"an item is a {type(sample).__name__}, not a mapping from names to tensors"
        return
    size = next(iter(specs.values()))["shape"][0]
    for name, spec in specs.items():
        if name not in sample:
            yield f"an item has {sorted(map(str, sample))}, the model's batch also names {name!r}"
            continue
        try:
            value = torch.as_tensor(sample[name])
        except (TypeError, ValueError, RuntimeError):
            yield f"{name} is a {type(sample[name]).__name__}, which is no tensor"
            continue
        found, wanted = (list(value.shape), str(value.dtype)), (spec["shape"][1:], f"torch.{spec['dtype']}")
        if found != wanted:
            yield f"{name} has shape {found[0]} and {found[1]}, the model's batch wants {wanted[0]} and {wanted[1]}"
        if spec["shape"][0] != size:
            yield f"{name} has {spec['shape'][0]} samples a step, the other inputs {size}"


def length_of(dataset: Any, where: str) -> int:
    try:
        length = len(dataset) if hasattr(dataset, "__len__") else 0
    except (Exception, SystemExit) as error:
        text = f"the length of {type(dataset).__name__} cannot be told: {type(error).__name__}: {error}"
        raise TrainError(f"{text}{_place_in(error)}", where=where) from error
    if length < 1:
        raise TrainError(
            f"{type(dataset).__name__} has no length or no items", where=where, remedy="give a map-style data set"
        )
    return length
