"""A table whose rows are split: each rank looks up the indices it holds and gives zeros for the others."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pipeline.runtime.axes import own_range, position


def row_split_embedding(indices: Tensor, table: Tensor, axis: str, padding_idx: int | None = None) -> Tensor:
    """This rank's summand of the rows; the row `padding_idx` is read but takes no gradient."""
    first, own = own_range(table.shape[0] * position(axis)[1], axis)
    place = indices - first
    mine = (place >= 0) & (place < own)
    rows = F.embedding(place.where(mine, 0), table)
    if padding_idx is not None:
        rows = rows.detach().where((indices == padding_idx).unsqueeze(-1), rows)
    return rows.where(mine.unsqueeze(-1), 0.0)
