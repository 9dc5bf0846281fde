"""A tensor of the unsplit model of which this rank holds a shard, as torch.distributed.checkpoint saves and loads it.

It has the shape of the whole. Its shard is one or more boxes of that (stages/train/snapshots/boxes.py), each of which
is a chunk of the checkpoint: so the files are those of the unsplit tensor, and any other number of ranks reads its own
boxes from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwright.api.given import ArgumentError
from shardwright.pipeline.runtime.programs.parameters import runs_of, whole_of
from shardwright.stages.train.engines.engine import StateShard
from shardwright.stages.train.snapshots.boxes import Box, boxes_of


class SplitTensor(Tensor):
    """`shard` is this rank's, or None where the tensor lies on other ranks alone (partitions of a pipeline)."""

    @staticmethod
    def __new__(
        cls: type[SplitTensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        shard: StateShard | None,
    ) -> SplitTensor:
        made: SplitTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.shard = shard
        made.boxes = boxes_of(runs_of(shard.shape, shard.layout, shard.axes)) if shard else ()
        return made

    shard: StateShard | None
    boxes: tuple[Box, ...]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        remedy = "call full_tensor() on all ranks, or take state_dict(gathered=True)"
        raise ArgumentError(f"{func} needs all of a tensor that is split", where="state_dict", remedy=remedy)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        lies = str(self.shard.layout) if self.shard else "on other ranks"
        return f"SplitTensor({list(self.shape)}, {self.dtype}, {lies})"

    def full_tensor(self) -> Tensor:
        """The whole, on every rank that holds a shard of it; they ask for it together."""
        if self.shard is None:
            what = "it lies on other ranks"
            raise ArgumentError(what, where="full_tensor", remedy="take state_dict(gathered=True)")
        return whole_of(self.shard.tensor, self.shard.shape, self.shard.layout, self.shard.axes)

    # ---- what torch.distributed.checkpoint asks of it (torch/distributed/_checkpointable.py)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties, shape = TensorProperties(dtype=self.dtype), torch.Size(self.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.place[0])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, shape),
            )
            for box, chunk in zip(self.boxes, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(*map(torch.Size, box.place)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert self.shard is not None and index.offset is not None, index
        box = next(box for box in self.boxes if box.place[0] == tuple(index.offset))
        return self.shard.tensor[box.within]


def entry_of(shard: StateShard, split: Callable[[StateShard], bool]) -> Tensor:
    """As a state dict has it: a plain tensor where every rank has all of it."""
    if not split(shard):
        return shard.tensor
    return SplitTensor(shard.shape, shard.tensor.dtype, shard.tensor.device, shard)
