"""How far what the ranks hold is from the unsplit tensor; all ranks call these functions at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.ir.layout import Layout, P, R
from pipeline.runtime.programs.mesh import combine, joined
from pipeline.runtime.programs.parameters import own_elements, piece_of

TOLERANCE, IN_FLOAT32 = 1e-9, 1e-5
SHARE = (
    1e-3  # of the largest gradient: one below is held against that, as a key's bias has a gradient of rounding alone
)


@dataclass(frozen=True)
class Gap:
    """The largest difference of an element on any rank, and the largest element that was expected."""

    difference: float
    size: float

    def relative(self, floor: float = 0.0) -> float:
        if self.difference == 0:
            return 0.0
        below = max(self.size, floor)
        return self.difference / below if below else float("inf")


def gap(found: Tensor | None, expected: Tensor | None, layout: Layout, axes: Sequence[str]) -> Gap:
    """Of a tensor in pieces by the layout from the whole, on all ranks; one that is not there is zeros.

    Whatever lies in the padding of uneven pieces.
    """
    return everywhere([own_gap(found, expected, layout, axes, padding=False)])[0]


def own_gap(
    found: Tensor | None, expected: Tensor | None, layout: Layout, axes: Sequence[str], *, padding: bool = True
) -> Gap:
    """The same on this rank alone; where the layout is partial the ranks meet. Padding is zeros where it counts."""
    if found is None and expected is None:
        return Gap(0.0, 0.0)
    partial = [axis for axis, state in zip(axes, layout.states, strict=True) if state == P]
    whole = Layout(tuple(R if state == P else state for state in layout.states))
    wanted = None if expected is None else piece_of(expected.detach(), whole, axes)
    found = torch.zeros_like(wanted) if found is None else found.detach()
    if partial and (found.is_floating_point() or found.is_complex()):
        found = combine(found, joined(tuple(partial)))
    if expected is not None and wanted is not None and not padding and found.shape == wanted.shape:
        found, wanted = (own_elements(x, tuple(expected.shape), whole, axes) for x in (found, wanted))
    wanted = torch.zeros_like(found) if wanted is None else wanted
    size = 0.0 if expected is None or not expected.numel() else float(_finite(expected).max())
    return Gap(_furthest(found, wanted), size)


def whole_gap(found: Tensor, expected: Tensor) -> Gap:
    """Of two whole tensors."""
    return Gap(_furthest(found, expected), float(_finite(expected).max()) if expected.numel() else 0.0)


def everywhere(gaps: Sequence[Gap]) -> list[Gap]:
    """Each with the largest difference of all ranks; sizes are of whole tensors."""
    if not dist.is_initialized() or not gaps:
        return list(gaps)
    furthest = torch.tensor([each.difference for each in gaps], dtype=torch.float64)
    dist.all_reduce(furthest, op=dist.ReduceOp.MAX)
    return [Gap(difference, each.size) for difference, each in zip(furthest.tolist(), gaps, strict=True)]


def _furthest(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    apart = (widest(found) - widest(wanted)).abs().masked_fill(same, 0.0)
    return float("inf") if bool(apart.isnan().any()) else float(apart.max())


def _finite(tensor: Tensor) -> Tensor:
    """A mask's infinities are no size."""
    return widest(tensor).abs().nan_to_num(0.0, 0.0, 0.0)


def widest(tensor: Tensor) -> Tensor:
    """In float64, or complex numbers of two such."""
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def largest(tensors: Iterable[Tensor]) -> float:
    """Of all their elements."""
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)
