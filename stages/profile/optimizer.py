"""An optimizer's step on meta tensors: what it keeps, the kernels it runs and the memory they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeline.ir.graph import TensorType
from pipeline.ir.profile import Kernel
from stages.profile.symbolic import Storage, Watch, rounded

Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerRun:
    """`storages` are the step's own: the state is counted in `state`, parameters and gradients are there before."""

    state: dict[str, int]  # bytes kept for each parameter between steps
    kernels: tuple[Kernel, ...]
    storages: tuple[Storage, ...]


def run_optimizer(build: Build, parameters: Mapping[str, TensorType], foreach: bool) -> OptimizerRun:
    """The step for all parameters, put together from one step for each type of them.

    On a GPU an optimizer treats all parameters together (`foreach`) unless it was told otherwise: one kernel moves them
    all. Elsewhere it goes from one to the next.
    """
    counts = Counter(parameters.values())
    alone = {kind: _run_one(build, kind, foreach) for kind in counts}
    state = {name: alone[kind].nbytes for name, kind in parameters.items()}
    runs = {tuple(kernel.name for kernel in one.kernels) for one in alone.values()}
    if len(runs) == 1 and any(name.startswith("_foreach") for name in next(iter(runs))):
        kernels, storages = _together([(alone[kind], count) for kind, count in counts.items()])
    else:
        kernels, storages = _one_after_another([alone[kind] for kind in parameters.values()])
    return OptimizerRun(state, kernels, storages)


@dataclass(frozen=True)
class _One:
    nbytes: int  # of its state
    kernels: tuple[Kernel, ...]
    storages: tuple[Storage, ...]


def _run_one(build: Build, kind: TensorType, foreach: bool) -> _One:
    """One step that makes the state, then the one that is watched."""
    parameter = torch.nn.Parameter(torch.empty(kind.shape, dtype=getattr(torch, kind.dtype), device="meta"))
    optimizer = build([parameter])
    for group in optimizer.param_groups if foreach else ():
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True  # on tensors without memory it has to be told
    parameter.grad = torch.empty_like(parameter)
    _step(optimizer)
    kept = _tensors(optimizer.state[parameter].values())
    with Watch([parameter, parameter.grad, *kept]) as watch:
        _step(optimizer)
        watch.sweep()
    return _One(sum(map(_device_bytes, kept)), tuple(watch.kernels), tuple(watch.storages))


def _step(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:  # one that steps on real tensors looks at values here, which raises what it likes
        raise RuntimeError(f"the optimizer cannot step on meta tensors: {error}") from error


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


def _device_bytes(tensor: torch.Tensor) -> int:
    """A count of steps lies on the host."""
    return rounded(tensor.untyped_storage().nbytes()) if tensor.device.type == "meta" else 0
