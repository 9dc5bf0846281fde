"""Pieces of tensors for `torch.distributed.checkpoint`, whatever the layout.

It knows a tensor as boxes, each with the place of its first element. A piece is a product of runs of indices, so it is
as many boxes as there are ways to take one run of each dim. What is written are whole tensors, in boxes; a run with
another plan has other boxes, and each is filled from those that it meets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from pipeline.ir.layout import Run
from pipeline.runtime.mesh import axis_of
from pipeline.runtime.parameters import runs_of
from stages.train.engine import Held


@dataclass(frozen=True)
class Box:
    """A part of a piece that is one box of the whole tensor."""

    offsets: torch.Size  # in the whole tensor
    sizes: torch.Size
    within: tuple[slice, ...]  # in the piece


@dataclass(frozen=True)
class Piece:
    name: str
    tensor: Tensor
    shape: torch.Size  # of the whole
    cut: str  # how the whole is cut: pieces with the same cut cover it, each element once or as replicas
    boxes: tuple[Box, ...]

    @staticmethod
    def of(held: Held) -> Piece:
        sizes = ",".join(str(axis_of(name).size) for name in held.axes)
        boxes = boxes_of(runs_of(held.shape, held.layout, held.axes))
        return Piece(held.name, held.piece.detach(), torch.Size(held.shape), f"{held.layout} on {sizes}", boxes)

    @staticmethod
    def whole(name: str, tensor: Tensor) -> Piece:
        return Piece(name, tensor, tensor.shape, "", boxes_of([((0, size),) for size in tensor.shape]))

    def box_at(self, offsets: torch.Size | None) -> Tensor:
        return next(self.tensor[box.within] for box in self.boxes if box.offsets == offsets)

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=box.offsets, sizes=box.sizes) for box in self.boxes]


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
        Box(torch.Size(r[0] for r in taken), torch.Size(r[1] for r in taken), tuple(r[2] for r in taken))
        for taken in product(*dims)
    )


class SavePlanner(DefaultSavePlanner):
    """Of a state dict whose values are pieces; `written` are the names of which this rank has written a box."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.written: set[str] = set()

    def create_local_plan(self) -> SavePlan:
        items = [item for piece in self.state_dict.values() for item in _write_items(piece)]
        self.plan = SavePlan(items, planner_data={name: piece.cut for name, piece in self.state_dict.items()})
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(_of_one_cut(all_plans))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.written = {item.index.fqn for item in new_plan.items}
        return super().finish_plan(new_plan)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        piece: Piece = self.state_dict[index.fqn]
        return piece.box_at(index.offset)


def _write_items(piece: Piece) -> list[WriteItem]:
    properties = TensorProperties(dtype=piece.tensor.dtype)
    return [
        WriteItem(
            MetadataIndex(piece.name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, piece.shape),
        )
        for chunk in piece.chunks()
    ]


def _of_one_cut(plans: list[SavePlan]) -> list[SavePlan]:
    """Ranks of different meshes may hold one tensor in different cuts, such as a tied weight: the first one is written.

    Replicas are left to the planner of torch, which knows them by equal places.
    """
    cuts: dict[str, str] = {}
    for plan in plans:
        for name, cut in plan.planner_data.items():
            cuts.setdefault(name, cut)
    return [
        replace(plan, items=[item for item in plan.items if cuts[item.index.fqn] == plan.planner_data[item.index.fqn]])
        for plan in plans
    ]


class LoadPlanner(DefaultLoadPlanner):
    """Into a state dict whose values are pieces: each box from all that was saved of it."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata), name
            items += create_read_items_for_chunk_list(name, saved, piece.chunks())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        piece: Piece = self.state_dict[index.fqn]
        return piece.box_at(index.offset)


def mismatch(pieces: Mapping[str, Piece], saved: Mapping[str, Any]) -> str:
    """Why what was saved cannot fill these pieces, or nothing."""
    for name, piece in pieces.items():
        if name not in saved and piece.boxes:
            return f"it has no {name}"
        if name in saved and tuple(saved[name].size) != tuple(piece.shape):
            return f"{name} has shape {list(saved[name].size)} in it, and {list(piece.shape)} here"
    return ""
