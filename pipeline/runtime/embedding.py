"""A table whose rows are split: each rank looks up the indices it holds and gives zeros for the others."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pipeline.runtime.axes import position
from pipeline.runtime.uneven import own_part


def row_split_embedding(
    indices: Tensor, table: Tensor, axis: str, padding_idx: int | None = None, rows: int | None = None
) -> Tensor:
    """This rank's summand of the rows; the row `padding_idx` is read but takes no gradient.

    `rows` says how many there are where they do not divide: what lies behind the last rank's own is padding.
    """
    first, own = own_part(table.shape[0] * position(axis)[1] if rows is None else rows, *position(axis))
    place = indices - first
    mine = (place >= 0) & (place < own)
    found = F.embedding(place.where(mine, 0), table)
    if padding_idx is not None:
        found = found.detach().where((indices == padding_idx).unsqueeze(-1), found)
    return found.where(mine.unsqueeze(-1), 0.0)
