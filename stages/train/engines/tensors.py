"""One rank's tensors of the user's module: drawn by its constructor or read from a file; and what the optimizer keeps.

Each is drawn, read or brought together when its turn comes: no rank ever holds the whole module, but one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.ir.layout import Layout, replicated
from shardwright.pipeline.ir.names import look_up
from shardwright.pipeline.runtime.programs.mesh import axis_of, take_first
from shardwright.pipeline.runtime.programs.parameters import runs_of, shard_of, whole_of, with_padding
from shardwright.pipeline.runtime.step.buckets import Row
from shardwright.pipeline.runtime.step.initial_values import BuiltModule, Initial
from shardwright.pipeline.user.optimizer import refuse_mixing, refuse_moving_zeros
from shardwright.pipeline.user.weights import Shape, match_names, open_weights, read_shard
from shardwright.stages.train.engines.engine import Engine, StateShard


@dataclass(frozen=True)
class StoredRows:
    """How the module's tensors lie on the mesh: the rows of a program's PARAMETERS."""

    table: Mapping[str, Row]
    axes: list[str]
    per_rank: Mapping[str, bool]  # what each rank has of its own samples; that of the first is the model's

    @staticmethod
    def of(program: Any, table: Mapping[str, Row], axes: list[str]) -> StoredRows:
        return StoredRows(table, axes, dict.fromkeys(getattr(program, "PER_RANK", ()), True))

    def row(self, name: str) -> Row:
        """Of a parameter, its gradient and the optimizer's state; nothing for one that is not trained."""
        return look_up(self.table, name) or ("", "", "")

    def is_trained(self, name: str, tensor: Tensor) -> bool:
        return bool(self.row(name)[0]) and isinstance(tensor, nn.Parameter) and tensor.requires_grad

    def layout(self, name: str, tensor: Tensor) -> Layout:
        return Layout.parse(self.row(name)[0]) if self.is_trained(name, tensor) else replicated(len(self.axes))


def sizes_of(axes: Iterable[str]) -> tuple[int, ...]:
    return tuple(axis_of(axis).size for axis in axes)


class OwnTensors:
    """By the names under which the module lists its buffers and parameters: tied ones once.

    `wanted` are the names that this rank has a shard of, where it has not one of all.
    """

    def __init__(self, engine: Engine, stored: StoredRows, wanted: Callable[[str], bool] = lambda name: True) -> None:
        engine.seed()
        self.stored = stored
        initial = (Initial if dist.get_world_size() > 1 else BuiltModule)(engine.build_module)
        self.held_whole = initial.whole  # why this rank had to hold the whole module, or nothing
        named = named_tensors(initial.module)
        self.shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in named.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in named.items()}  # before they are placed
        self.state = state_names(initial.module, named)
        named = {name: tensor for name, tensor in named.items() if wanted(name)}
        self.tensors: dict[str, Tensor] = dict.fromkeys(named)  # in this order; each is there when its shard is
        path = engine.job["train"]["init_from"]
        read = self._read(Path(path), named, engine.where("train", "init_from")) if path else ()
        left = {name: tensor for name, tensor in named.items() if not path or name not in self.state.values()}
        for shards in (read, self._drawn(initial, left)):
            for name, shard in shards:
                own = engine.placed(shard)
                self.tensors[name] = nn.Parameter(own) if stored.is_trained(name, named[name]) else own

    def _drawn(self, initial: Initial | BuiltModule, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for (name, tensor), value in zip(named.items(), initial.values(named.values()), strict=True):
            yield name, shard_of(value, self.stored.layout(name, tensor), self.stored.axes)

    def _read(self, path: Path, named: Mapping[str, Tensor], where: str) -> Iterator[tuple[str, Tensor]]:
        """All that the module's state dict has, in the module's types."""
        weights = open_weights(path, where)
        found = match_names(weights, self.state, self.shapes, where)
        for name, key in ((name, found[name]) for name in found if name in named):
            lies = self.shapes[name], self.stored.layout(name, named[name]), self.stored.axes
            shard = read_shard(weights, key, runs_of(*lies)).to(named[name].dtype)
            yield name, with_padding(shard, *lies)

    def shards(self, engine: Engine, updated: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[StateShard]:
        """Of these tensors, and of what the optimizer keeps of those that it is given as `updated`."""
        axes, names = tuple(self.stored.axes), list(names)
        for name in names:
            layout = self.stored.layout(name, self.tensors[name])
            drifts = bool(look_up(self.stored.per_rank, name))
            yield StateShard(f"weights/{name}", self.tensors[name].detach(), self.shapes[name], layout, axes, drifts)
        for name in (name for name in names if name in updated):
            layout = Layout.parse(self.stored.row(name)[2])
            yield from _optimizer_state(engine, StateShard(name, updated[name], self.shapes[name], layout, axes))

    def take_first(self) -> None:
        """What each rank has of its own samples becomes that of the first; all ranks of the mesh ask together."""
        own = (tensor for name, tensor in self.tensors.items() if look_up(self.stored.per_rank, name))
        take_first(own, self.stored.axes)

    def whole(self, name: str) -> Tensor:
        """On every rank of the mesh; all of them ask for it together."""
        tensor = self.tensors[name]
        return whole_of(tensor, self.shapes[name], self.stored.layout(name, tensor), self.stored.axes)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


def state_names(module: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
    """Name in the state dict -> the name under which the module lists the tensor."""
    own = {id(tensor): name for name, tensor in named.items()}
    return {key: own[id(value)] for key, value in module.state_dict(keep_vars=True).items() if id(value) in own}


# ---- the optimizer's


def refuse_optimizer(engine: Engine, stored: list[tuple[StoredRows, str, Shape]]) -> None:
    """One that cannot work on shards, or on their padding, where there are such."""
    given = engine.job["train"]["optimizer"], engine.where("train", "optimizer")
    split, padded = [], []
    for rows, name, shape in stored:
        own, _, state = rows.row(name)
        if state and any(one.kind == "S" for one in Layout.parse(state).states):
            split.append(name)
        if any(Layout.parse(text).uneven(shape, sizes_of(rows.axes)) for text in (own, state) if text):
            padded.append(name)
    for name in split[:1]:
        refuse_mixing(*given, name, engine.device.type)
    for name in padded[:1]:
        refuse_moving_zeros(*given, name, engine.device.type)


def _optimizer_state(engine: Engine, of: StateShard) -> Iterator[StateShard]:
    """What the optimizer keeps of one parameter: `of` has its name, what the optimizer was given, and how that lies.

    A shard that ZeRO-1 updates is empty between steps: what is split is known by the layout, not by the shard's shape.
    Sums over a dim, such as Adafactor keeps, are not those of the whole where the parameter is split.
    """
    sizes = sizes_of(of.axes)
    for key, value in engine.optimizer.state.get(of.tensor, {}).items():
        if not isinstance(value, Tensor):
            continue
        shard = replace(of, name=f"optimizer/{of.name}/{key}", tensor=value)
        if value.ndim and value.shape == of.layout.local_shape(of.shape, sizes):
            yield shard
            continue
        if value.ndim and of.layout.shards(sizes) > 1:
            raise TrainError(
                f"{type(engine.optimizer).__name__} keeps the {key} of {of.name} in the shape {list(value.shape)}, and"
                " the plan splits the parameter",
                where=engine.where("train", "snapshots"),
                remedy="set `every: 0`, or name an optimizer whose state has the shape of its parameter",
            )
        yield replace(shard, shape=tuple(value.shape), layout=replicated(len(of.axes)))
