"""A product of groups of rows, each with its own matrix, where the matrices (experts) are split."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.runtime.programs.axes import own_range, position


def expert_split(product: Callable[..., Tensor], rows: Tensor, experts: Tensor, ends: Tensor, axis: str) -> Tensor:
    """This rank's summand: the rows of its own experts, zeros for the others.

    Rows are sorted by expert, `ends` says where each expert's rows end.
    """
    first, own = own_range(experts.shape[0] * position(axis)[1], axis)
    start = int(ends[first - 1]) if first else 0
    end = int(ends[first + own - 1])
    found = product(rows[start:end], experts, ends[first : first + own] - start)
    before, after = found.new_zeros(start, found.shape[1]), found.new_zeros(len(rows) - end, found.shape[1])
    return torch.cat((before, found, after))
