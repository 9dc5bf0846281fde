"""The optimizer's tensors of one parameter, as pieces of the training state."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeline.base.errors import TrainError
from pipeline.ir.layout import Layout, replicated
from pipeline.runtime.programs.mesh import axis_of
from stages.train.engines.engine import Held


def optimizer_state(
    optimizer: torch.optim.Optimizer,
    updated: nn.Parameter,
    about: tuple[str, tuple[int, ...], Layout],
    axes: tuple[str, ...],
    where: str,
) -> Iterator[Held]:
    """`updated` is what the optimizer was given; `about` has the parameter's name, whole shape, and state's layout.

    A shard that ZeRO-1 updates is empty between steps: what is split is known by the layout, not by the shard's shape.
    """
    name, shape, layout = about
    sizes = tuple(axis_of(axis).size for axis in axes)
    local = layout.local_shape(shape, sizes)
    for key, value in optimizer.state.get(updated, {}).items():
        if isinstance(value, Tensor) and value.ndim and value.shape == local:
            yield Held(f"optimizer/{name}/{key}", value, shape, layout, axes)
        elif isinstance(value, Tensor):
            if value.ndim and layout.pieces(sizes) > 1:
                raise _odd_shape(f"{key} of {name}", value, optimizer, where)
            yield Held(f"optimizer/{name}/{key}", value, tuple(value.shape), replicated(len(axes)), axes)


def _odd_shape(what: str, value: Tensor, optimizer: torch.optim.Optimizer, where: str) -> TrainError:
    """Sums over a dim, such as Adafactor keeps, are not those of the whole where the parameter is split."""
    name, shape = type(optimizer).__name__, list(value.shape)
    return TrainError(
        f"{name} keeps the {what} in the shape {shape}, and the plan splits the parameter",
        where=f"{where}: snapshots",
        remedy="set `every: 0`, or name an optimizer whose state has the shape of its parameter",
    )
