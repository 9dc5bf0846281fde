"""Clipping by the global norm where gradients lie in pieces: each element of the unsplit gradients counts once.

After a step's backward passes a gradient that the optimizer is given is a piece as the optimizer's state lies: split on
some axes, equal on all ranks of the others. So of the ranks that hold the same piece the first alone counts it; the
squares are summed over all ranks in one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.ir.layout import Layout
from pipeline.runtime.programs.collectives import as_real
from pipeline.runtime.programs.mesh import axis_of
from pipeline.runtime.step.gradients import Row

SPARE = 1e-6  # added to the norm before it divides, as torch.nn.utils.clip_grad_norm_ does


class Clipping:
    def __init__(self, updated: Sequence[nn.Parameter], rows: Iterable[Row], axes: Sequence[str], limit: float) -> None:
        """`updated` is what the optimizer is given (`Gradients.updated`), with the rows of its parameters."""
        self.updated, self.limit = updated, limit
        self.counted = [p for p, row in zip(updated, rows, strict=True) if _is_first_holder(row, axes)]

    def clip(self) -> Tensor:
        """After backward and before the optimizer: scales the gradients down to the limit, and returns their norm."""
        total = self._norm()
        factor = torch.clamp(self.limit / (total + SPARE), max=1.0)
        for dtype, gradients in _by_type(self.updated).items():
            torch._foreach_mul_(gradients, factor.to(_exact(dtype)))
        return total

    def _norm(self) -> Tensor:
        device = self.updated[0].device
        found = [
            norm
            for dtype, gradients in _by_type(self.counted).items()
            for norm in torch._foreach_norm(gradients, 2, _exact(dtype))
        ]
        total = torch.stack(found).double().square().sum() if found else torch.zeros((), device=device).double()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.sqrt()


def _is_first_holder(row: Row, axes: Sequence[str]) -> bool:
    """Whether no rank before this one holds the same piece; a parameter without a layout is whole on all."""
    states = Layout.parse(row[2]).states
    kinds = [state.kind for state in states] if states else ["R"] * len(axes)
    return all(kind == "S" or axis_of(name).rank == 0 for name, kind in zip(axes, kinds, strict=True))


def _by_type(parameters: Iterable[nn.Parameter]) -> dict[torch.dtype, list[Tensor]]:
    """Complex ones as the real numbers that they are made of."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = as_real(parameter.grad)
            found.setdefault(gradient.dtype, []).append(gradient)
    return found


def _exact(dtype: torch.dtype) -> torch.dtype:
    """A norm has more digits than bfloat16."""
    return dtype if dtype == torch.float64 else torch.float32
