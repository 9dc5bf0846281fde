"""Ops of ours.

`shardwright.tensor` is `torch.tensor(numbers)`. `shardwright.embedding_bag` adds up a table's rows in bags: torch's op
returns further tensors for its backward pass, and knows bags by their offsets alone. Ours has one result, and takes
bags of equal length as rows of two-dim indices, of which samples can be split.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.pipeline.ops.own_names import MODES

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")
_LIBRARY.define(
    "embedding_bag(Tensor weight, Tensor indices, Tensor? offsets, int mode, Tensor? per_sample_weights=None,"
    " bool include_last_offset=False, int? padding_idx=None, bool scale_grad_by_freq=False) -> Tensor"
)


_SETTINGS = ("per_sample_weights", "include_last_offset", "padding_idx", "scale_grad_by_freq")


def _embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor | None, mode: int, *given: Any, **named: Any
) -> Tensor:
    settings = dict(zip(_SETTINGS, given, strict=False)) | named
    return F.embedding_bag(indices, weight, offsets, mode=MODES[mode], **settings)


_LIBRARY.impl("embedding_bag", _embedding_bag, "CompositeImplicitAutograd")
