"""How a tensor looks at memory, so that the same can be seen of other memory: where a saved tensor is made again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StridedView:
    """Also of another type than the memory's: real numbers are looked at as complex ones, and conjugated as read."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @staticmethod
    def of(tensor: Tensor) -> StridedView:
        lies = tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        return StridedView(tensor.dtype, *lies, tensor.is_conj(), tensor.is_neg())

    def on(self, memory: Tensor) -> Tensor:
        lies = self.size, self.stride, self.offset
        if memory.dtype == self.dtype:
            found = memory.as_strided(*lies)
        else:
            found = torch.empty(0, dtype=self.dtype, device=memory.device)
            found.set_(memory.untyped_storage(), self.offset, self.size, self.stride)
        if found.is_conj() != self.conjugated:
            found = found.conj()
        return torch._neg_view(found) if found.is_neg() != self.negated else found
