"""A table whose rows are split: each rank looks up the indices it holds and gives zeros for the others."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipeline.runtime.programs.axes import combine, position
from pipeline.runtime.programs.uneven import own_part


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


def row_split_embedding_bag(
    indices: Tensor,
    table: Tensor,
    axis: str,
    mode: str,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    rows: int | None = None,
) -> Tensor:
    """This rank's summand of the sums or means of bags; of the largest (`max`) the whole.

    Bags are the rows of `indices`, or begin at `offsets`. What equals `padding_idx` is in no bag.
    """
    first, own = own_part(table.shape[0] * position(axis)[1] if rows is None else rows, *position(axis))
    place = indices - first
    counts = torch.ones_like(indices, dtype=torch.bool) if padding_idx is None else indices != padding_idx
    mine = (place >= 0) & (place < own) & counts
    place = place.where(mine, 0)
    bag = _bag_of(indices, offsets)
    bags = indices.shape[0] if offsets is None else offsets.shape[0] - include_last_offset
    if mode == "max":
        return _largest(F.embedding(place.flatten(), table), mine.flatten(), bag, bags, axis)
    weights = mine.to(table.dtype) if per_sample_weights is None else per_sample_weights.where(mine, 0.0)
    if mode == "mean":
        sizes = table.new_zeros(bags).index_add(0, bag, counts.flatten().to(table.dtype))
        weights = weights / sizes.clamp(min=1)[bag].view(weights.shape)
    options = {"mode": "sum", "per_sample_weights": weights, "include_last_offset": include_last_offset}
    return F.embedding_bag(place, table, offsets, **options)  # type: ignore[arg-type]


def _bag_of(indices: Tensor, offsets: Tensor | None) -> Tensor:
    """Of each index, in order."""
    if offsets is None:
        return torch.arange(indices.shape[0], device=indices.device).repeat_interleave(indices.shape[1])
    number = torch.arange(indices.shape[0], device=indices.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, number, right=True) - 1


def _largest(found: Tensor, mine: Tensor, bag: Tensor, bags: int, axis: str) -> Tensor:
    """Of every bag and column; of equal ones the first has the gradient, on the rank that holds it."""
    none, last = float("-inf"), found.shape[0]
    values = found.detach().masked_fill(~mine.unsqueeze(1), none)
    at = bag.unsqueeze(1).expand_as(values)
    most = values.new_full((bags, values.shape[1]), none).scatter_reduce(0, at, values, "amax")
    whole = combine(most, axis, dist.ReduceOp.MAX)
    number = torch.arange(last, device=bag.device).unsqueeze(1)
    is_it = (values == whole[bag]) & mine.unsqueeze(1)
    place = torch.full_like(whole, last, dtype=torch.int64).scatter_reduce(0, at, number.where(is_it, last), "amin")
    held = place == combine(place, axis, dist.ReduceOp.MIN)
    own = found.gather(0, place.clamp(max=last - 1))
    return own.where(held & (place < last), whole.where(whole != none, 0.0))
