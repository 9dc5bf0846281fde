"""An optimizer's step without memory: what it keeps, the kernels it runs and the memory they need.

It is taken on meta tensors. One that asks where its parameters lie (`fused`, `capturable`) takes it on fake tensors of
the device. One that looks at values takes a real step on a small parameter, and what is seen is scaled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.pipeline.ir.graph import TensorType
from shardwright.pipeline.ir.profile import Kernel
from shardwright.pipeline.rates.kernels import OPTIMIZERS
from shardwright.pipeline.user.optimizer import try_optimizer
from shardwright.stages.profile.symbolic import Storage, Watch, rounded

Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


SIZES = (67, 71, 5, 3, 2, 7, 11)  # of a small parameter: they differ, so a dim of the state is known by its size
SMALL_VECTOR = (4789,)  # as many elements: libraries treat few of them otherwise


@dataclass(frozen=True)
class OptimizerRun:
    """`storages` are the step's own: the state is counted in `state`, parameters and gradients are there before."""

    state: dict[str, int]  # bytes kept for each parameter between steps
    kernels: tuple[Kernel, ...]
    storages: tuple[Storage, ...]
    scaled: str = ""  # why this is from a small step, where it is


def optimizer_copies(settings: Mapping[str, Any], where: str, device: str = "cpu") -> float:
    """State tensors of the parameter's own size, counted in copies of it: by a step of the real one on a small one."""
    optimizer, parameter = try_optimizer(settings, where, device)
    state = _tensors(optimizer.state.get(parameter, {}).values())
    return float(sum(tensor.numel() for tensor in state if tensor.numel() > 1) / parameter.numel())


def run_optimizer(build: Build, parameters: Mapping[str, TensorType], device: str) -> OptimizerRun:
    """The step for all parameters, put together from one step for each type of them.

    On a GPU an optimizer treats all parameters together (`foreach`) unless it was told otherwise: one kernel moves them
    all. Elsewhere it goes from one to the next.
    """
    counts = Counter(parameters.values())
    alone = {kind: _run_one(build, kind, device) for kind in counts}
    state = {name: alone[kind].nbytes for name, kind in parameters.items()}
    runs = {tuple(kernel.name for kernel in one.kernels) for one in alone.values()}
    if len(runs) == 1 and any(name.startswith(tuple(OPTIMIZERS)) for name in next(iter(runs))):
        kernels, storages = _together([(alone[kind], count) for kind, count in counts.items()])
    else:
        kernels, storages = _one_after_another([alone[kind] for kind in parameters.values()])
    return OptimizerRun(state, kernels, storages, next((one.scaled for one in alone.values() if one.scaled), ""))


@dataclass(frozen=True)
class _One:
    nbytes: int  # of its state
    kernels: tuple[Kernel, ...]
    storages: tuple[Storage, ...]
    scaled: str = ""


def _run_one(build: Build, kind: TensorType, device: str) -> _One:
    why = ""
    modes: dict[str, AbstractContextManager[Any]] = {"meta": nullcontext(), device: FakeTensorMode()}
    modes |= {"cpu": FakeTensorMode()}  # where torch has no GPU, some ask for one
    for place, mode in modes.items():
        try:
            with mode:
                return _watched(build, kind, place, foreach=device == "cuda")[0]
        except Exception as error:  # the user's optimizer, which raises what it likes
            why = why or f"{type(error).__name__}: {error}".splitlines()[0]
    return _scaled(build, kind, device, why)


def _watched(build: Build, kind: TensorType, place: str, foreach: bool) -> tuple[_One, list[torch.Tensor]]:
    """One step that makes the state, then the one that is watched; and the state."""
    parameter = torch.nn.Parameter(torch.ones(kind.shape, dtype=getattr(torch, kind.dtype), device=place))
    optimizer = build([parameter])
    for group in optimizer.param_groups if foreach else ():
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True  # on tensors that are not on a GPU it has to be told
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = _tensors(optimizer.state[parameter].values())
    with Watch([parameter, parameter.grad, *kept]) as watch:
        optimizer.step()
        watch.sweep()
    on_device = [t for t in kept if t.device.type != "cpu" or t.dim()]  # a count of steps lies on the host
    state = sum(rounded(t.untyped_storage().nbytes()) for t in on_device)
    return _One(state, tuple(watch.kernels), tuple(watch.storages)), kept


def _scaled(build: Build, kind: TensorType, device: str, why: str) -> _One:
    """From a real step on a small parameter of as many dims: bytes grow with the elements, state dim by dim."""
    shape = SMALL_VECTOR if len(kind.shape) == 1 else SIZES[: len(kind.shape)]
    place = "cuda" if device == "cuda" and torch.cuda.is_available() else "cpu"
    try:
        small, kept = _watched(build, replace(kind, shape=shape), place, foreach=False)
    except Exception as error:  # the user's
        raise RuntimeError(
            f"the optimizer cannot step on a small parameter: {type(error).__name__}: {error}"
        ) from error
    more = kind.numel / max(1, prod(shape))
    kernels = [
        replace(k, flops=k.flops * more**1.5, read=round(k.read * more), written=round(k.written * more))
        for k in small.kernels
    ]
    storages = tuple(replace(s, size=rounded(round(s.size * more))) for s in small.storages)
    # The dims of a state tensor are those of the parameter, or all of them as one.
    sizes = dict(zip(shape, kind.shape, strict=False)) | {prod(shape): prod(kind.shape)}
    grown = (prod(sizes.get(size, size) for size in t.shape) * t.element_size() for t in kept if t.numel() > 1)
    state = sum(map(rounded, grown))
    if not kernels:  # of a library that torch does not see
        kernels = [Kernel("step", 0.0, 2 * kind.nbytes + state, kind.nbytes + state, kind.dtype, (kind.shape,))]
    return _One(state, tuple(kernels), storages, why)


def _together(types: list[tuple[_One, int]]) -> tuple[tuple[Kernel, ...], tuple[Storage, ...]]:
    """Kernels that each treat all parameters: every type counts as often as it is there."""
    kernels = []
    for same in zip(*(one.kernels for one, _ in types), strict=True):
        largest = max(same, key=lambda kernel: kernel.read)
        counted = list(zip(same, (count for _, count in types), strict=True))
        read, written = (sum(getattr(k, field) * count for k, count in counted) for field in ("read", "written"))
        kernels.append(replace(largest, read=read, written=written))
    storages = [replace(s, size=s.size * count) for one, count in types for s in one.storages]
    return tuple(kernels), tuple(storages)


def _one_after_another(parameters: list[_One]) -> tuple[tuple[Kernel, ...], tuple[Storage, ...]]:
    """What is left at the end of one parameter's turn goes when the next one has made its own."""
    kernels: list[Kernel] = []
    storages: list[Storage] = []
    for one in parameters:
        start, count = len(kernels), len(one.kernels)
        kernels += one.kernels
        for s in one.storages:
            died = count + s.born + 1 if s.died is None or s.died >= count else s.died
            storages.append(replace(s, born=start + s.born, died=start + died))
    ends = (min(s.died or 0, len(kernels)) for s in storages)
    return tuple(kernels), tuple(replace(s, died=end) for s, end in zip(storages, ends, strict=True))


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]
