"""State dicts of a parallel module and its optimizer, by the names of the unsplit module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shardwright.api.engines import PipelinedOnObjects, PlannedOnObjects
from shardwright.api.given import ArgumentError
from shardwright.api.split import SplitTensor, entry_of
from shardwright.pipeline.runtime.programs.parameters import shard_of
from shardwright.stages.train.engines.engine import StateShard
from shardwright.stages.train.engines.tensors import sizes_of
from shardwright.stages.train.snapshots.resume import make_optimizer_state

if TYPE_CHECKING:
    from shardwright.api.parallel import ParallelModule

AnyEngine = PlannedOnObjects | PipelinedOnObjects
WEIGHTS, STATE = "weights/", "optimizer/"


def is_split(shard: StateShard) -> bool:
    return shard.layout.shards(sizes_of(shard.axes)) > 1


def shards_of(engine: AnyEngine, kind: str) -> dict[str, StateShard]:
    return {shard.name.removeprefix(kind): shard for shard in engine.state() if shard.name.startswith(kind)}


def fill(shard: StateShard, given: Any, name: str) -> None:
    """Writes a whole tensor, or a shard that lies alike, into this rank's shard."""
    if isinstance(given, SplitTensor):
        theirs = given.shard
        alike = theirs is not None and (theirs.layout, theirs.axes) == (shard.layout, shard.axes)
        if not alike or theirs is None:
            remedy = "load it with torch.distributed.checkpoint into this state_dict()"
            raise ArgumentError(f"{name} lies otherwise here", where="load_state_dict", remedy=remedy)
        if theirs.tensor.data_ptr() != shard.tensor.data_ptr():
            shard.tensor.copy_(theirs.tensor)
        return
    if not isinstance(given, Tensor) or tuple(given.shape) != tuple(shard.shape):
        there = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ArgumentError(f"{name} is {there}, expected {list(shard.shape)}", where="load_state_dict")
    if given.data_ptr() != shard.tensor.data_ptr():
        shard.tensor.copy_(shard_of(given.detach(), shard.layout, shard.axes))


def has_state(optimizer: Optimizer) -> bool:
    """It is looked up where there is none, which leaves empty entries."""
    return any(optimizer.state.values())


class WeightState:
    """Parameters and buffers."""

    def __init__(self, engine: AnyEngine) -> None:
        self.engine = engine
        self.names, self.specs = engine.exported()  # in the state dict -> of the tensor; of that its type and shape

    def tensors(self) -> dict[str, Tensor]:
        """This rank's, by the names of the tensors."""
        if isinstance(self.engine, PlannedOnObjects):
            return dict(self.engine.own.tensors)
        return {name: tensor for part in self.engine.partitions for name, tensor in part.tensors.items()}

    def entries(self) -> dict[str, Tensor]:
        shards = shards_of(self.engine, WEIGHTS)
        found = {}
        for key, name in self.names.items():
            dtype, shape = self.specs[name]
            elsewhere = SplitTensor(shape, dtype, self.engine.device, None) if name not in shards else None
            found[key] = entry_of(shards[name], is_split) if elsewhere is None else elsewhere
        return found

    def gathered(self) -> dict[str, Tensor]:
        first, found = dist.get_rank() == 0, {}
        for key, name in self.names.items():
            whole = self.engine.whole(name)
            if first:
                found[key] = whole.detach().to("cpu", copy=True)
        return found

    def load(self, given: Mapping[str, Any], strict: bool) -> tuple[list[str], list[str]]:
        """Names that are missing, and that are not known."""
        missing = [key for key in self.names if key not in given]
        there = {self.names[key] for key in given if key in self.names}
        missing = [key for key in missing if self.names[key] not in there]  # of tied weights any one will do
        unknown = [key for key in given if key not in self.names]
        if strict and (missing or unknown):
            told = [
                f"{what}: {', '.join(keys[:5])}"
                for what, keys in (("missing", missing), ("not known", unknown))
                if keys
            ]
            remedy = "give the state dict of the unsplit model, or strict=False"
            raise ArgumentError("; ".join(told), where="load_state_dict", remedy=remedy)
        shards = shards_of(self.engine, WEIGHTS)
        with torch.no_grad():
            for key, value in given.items():
                if (name := self.names.get(key)) in shards:
                    fill(shards[name], value, key)
        self.engine.restored()
        return missing, unknown


class OptimizerState:
    """`state_dict` and `load_state_dict` of the optimizer: state by `parameter.key`, and the options of its groups."""

    def __init__(self, engine: AnyEngine, model: ParallelModule) -> None:
        self.engine, self.model = engine, model

    def state_dict(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint; before the first step that of an optimizer that has taken none."""
        optimizer = self.engine.optimizer
        fresh = not has_state(optimizer)
        if fresh:
            self._make()
        shards = shards_of(self.engine, STATE)
        found = {name.replace("/", "."): entry_of(shard, is_split) for name, shard in shards.items()}
        if fresh:
            optimizer.state.clear()
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(optimizer.param_groups, self.engine.groups, strict=True)
        ]
        return {"state": found, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        optimizer, given = self.engine.optimizer, state_dict["state"]
        if not has_state(optimizer):
            self._make()
        shards = {name.replace("/", "."): shard for name, shard in shards_of(self.engine, STATE).items()}
        if missing := [name for name in shards if name not in given]:
            raise ArgumentError(f"missing: {', '.join(missing[:5])}", where="optimizer.load_state_dict")
        with torch.no_grad():
            for name, shard in shards.items():
                fill(shard, given[name], name)
        for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            group |= {key: value for key, value in saved.items() if key != "params"}

    def _make(self) -> None:
        """State as before the first step: by a step without a rate or gradients, which moves nothing."""
        optimizer = self.engine.optimizer
        rates = [group.get("lr") for group in optimizer.param_groups]
        own = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.grad for p in own]
        for parameter in own:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        self.model.stepping = True
        try:
            make_optimizer_state(optimizer)
        finally:
            self.model.stepping = False
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            for parameter, gradient in zip(own, before, strict=True):
                parameter.grad = gradient
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].zero_()
