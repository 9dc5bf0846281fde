"""What the user hands over as live objects: a module, an optimizer, a batch. They stand in a `_target_`."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.pipeline.base.errors import ShardwrightError, shown
from shardwright.pipeline.config import DType

OptimizerLike: TypeAlias = Optimizer | Callable[[list[nn.Parameter]], Optimizer]
Batch = dict[str, Tensor]


class ArgumentError(ShardwrightError):
    """An argument of the Python API that cannot be."""


class GivenModule:
    """Gives the structure of the user's module with tensors on the meta device: no weight is copied."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> nn.Module:
        tensors = {id(t): t for t in (*self.module.parameters(), *self.module.buffers())}
        memo: dict[int, Any] = {key: _on_meta(tensor) for key, tensor in tensors.items()}
        try:
            return copy.deepcopy(self.module, memo)
        except Exception as error:  # of the user's own classes
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ArgumentError(f"its structure cannot be copied ({told})", where="model") from error

    def __str__(self) -> str:
        return type(self.module).__name__

    def to_json(self) -> str:
        return str(self)


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class GivenOptimizer:
    """Makes optimizers such as the user's, without its state: of its first group's options where it is one already."""

    def __init__(self, given: OptimizerLike) -> None:
        if not isinstance(given, Optimizer) and not callable(given):
            what = f"got a {type(given).__name__}, which is neither an optimizer nor makes one"
            raise ArgumentError(
                what, where="optimizer", remedy="give torch.optim.AdamW, an instance of it or a function"
            )
        self.given = given

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        return _alike(self.given, parameters) if isinstance(self.given, Optimizer) else self.given(parameters)

    def __str__(self) -> str:
        kind = type(self.given) if isinstance(self.given, Optimizer) else self.given
        return getattr(kind, "__name__", type(kind).__name__)

    def to_json(self) -> str:
        return str(self)


def _alike(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """What a scheduler has put on it (`step`), hooks and state stay with the user's own."""
    own = {k: v for k, v in vars(optimizer).items() if k != "step" and not k.startswith("_optimizer_")}
    made = object.__new__(type(optimizer))
    group = {**optimizer.param_groups[0], "params": parameters}
    made.__setstate__({**own, "state": defaultdict(dict), "param_groups": [group]})
    return made


def batch_of(names: list[str], given: Any, where: str = "batch") -> Batch:
    """Tensors by the names of `forward`'s arguments, in their order."""
    if isinstance(given, Tensor):
        given = (given,)
    if isinstance(given, tuple | list):
        if len(given) > len(names):
            what = f"it has {len(given)} tensors, and forward takes {len(names)} by position"
            raise ArgumentError(what, where=where, remedy="give a mapping from argument names to tensors")
        given = dict(zip(names, given, strict=False))
    if not isinstance(given, Mapping) or not given:
        what = f"got {_kind(given)}, expected tensors"
        raise ArgumentError(what, where=where, remedy="give a mapping from argument names to tensors")
    for name, tensor in given.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            what = f"{shown(name)} is {_kind(tensor)}, not a tensor"
            raise ArgumentError(what, where=where, remedy="leave it out: what is no tensor is for the model to know")
    order = {name: place for place, name in enumerate(names)}
    return {name: given[name] for name in sorted(given, key=lambda name: order.get(name, len(order)))}


def arguments_of(module: nn.Module) -> list[str]:
    """Those that `forward` takes by position."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def specs_of(batch: Batch) -> dict[str, Any]:
    """As a model's file writes them."""
    found = {}
    for name, tensor in batch.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DType.__members__:
            what = f"{name} is {dtype}, expected one of {', '.join(DType.__members__)}"
            raise ArgumentError(what, where="batch", remedy="convert it")
        if not tensor.dim():
            raise ArgumentError(f"{name} is a number without a batch dim", where="batch", remedy="give it dims")
        found[name] = {"shape": list(tensor.shape), "dtype": dtype}
    return found
