"""A dim that does not divide by the ranks of an axis: every rank has room for as much of it as the first one holds.

What lies behind a rank's own elements is padding: zeros, where it is put there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def room(whole: int, count: int) -> int:
    """Elements that each of so many ranks has room for."""
    return -(-whole // count)


def own_part(whole: int, rank: int, count: int) -> tuple[int, int]:
    """Where a rank's elements of a dim begin, and how many they are; the last ranks may have fewer or none."""
    start = min(rank * room(whole, count), whole)
    return start, min(room(whole, count), whole - start)


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """With zeros behind it up to that size of the dim; itself where it has that."""
    if x.shape[dim] == size:
        return x
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, size - x.shape[dim]))


def padded_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    for dim, size in enumerate(shape):
        x = padded(x, dim, size)
    return x


def joined(pieces: Tensor, dim: int, size: int) -> Tensor:
    """The whole of pieces on a first dim, without their padding, in one run of memory."""
    if dim == 0:
        return pieces.flatten(0, 1)[:size]
    lengths = [own_part(size, rank, len(pieces))[1] for rank in range(len(pieces))]
    return torch.cat([piece.narrow(dim, 0, n) for piece, n in zip(pieces, lengths, strict=True)], dim)
