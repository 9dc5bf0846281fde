"""An optimizer's step on meta tensors: what it keeps, the kernels it runs and the memory they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.ir.profile import Kernel
from stages.profile.symbolic import Storage, Watch, rounded

Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerRun:
    """`storages` are the step's own: the state is counted in `state`, parameters and gradients are there before."""

    state: dict[str, int]  # bytes kept for each parameter between steps
    kernels: tuple[Kernel, ...]
    storages: tuple[Storage, ...]


def run_optimizer(build: Build, parameters: dict[str, torch.Tensor], foreach: bool) -> OptimizerRun:
    """One step that makes the state, then the one that is watched.

    On a GPU an optimizer treats all parameters together (`foreach`) unless it was told otherwise; on tensors without
    memory it has to be told.
    """
    own = {name: torch.nn.Parameter(torch.empty_like(p, device="meta")) for name, p in parameters.items()}
    optimizer = build(list(own.values()))
    for group in optimizer.param_groups if foreach else ():
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    for parameter in own.values():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    kept = {name: _tensors(optimizer.state[p].values()) for name, p in own.items()}
    present = [
        *own.values(),
        *(p.grad for p in own.values() if p.grad is not None),
        *(t for ts in kept.values() for t in ts),
    ]
    with Watch(present) as watch:
        optimizer.step()
        watch.sweep()
    state = {name: sum(map(_device_bytes, tensors)) for name, tensors in kept.items()}
    return OptimizerRun(state, tuple(watch.kernels), tuple(watch.storages))


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _device_bytes(tensor: torch.Tensor) -> int:
    """A count of steps lies on the host."""
    return rounded(tensor.untyped_storage().nbytes()) if tensor.device.type == "meta" else 0
