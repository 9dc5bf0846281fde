"""What each rank holds of a tensor in a given state, and what the ranks hold together: the state table as code.

The forward value and the gradient of a state are forms: `whole` on every rank, a `shard` of a dim, or a `summand`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.pipeline.ir.layout import State

FORWARD = {"R": "whole", "B": "whole", "S": "shard", "P": "summand"}
GRADIENT = {"R": "whole", "B": "summand", "S": "shard", "P": "whole"}


def values(state: State, whole: Tensor, ranks: int) -> list[Tensor]:
    """A forward value of that state, on each rank."""
    return _distribute(FORWARD[state.kind], state, whole, ranks)


def gradients(state: State, whole: Tensor, ranks: int) -> list[Tensor]:
    """A gradient of a tensor of that state, on each rank."""
    return _distribute(GRADIENT[state.kind], state, whole, ranks)


def wrong_values(state: State, found: list[Tensor], whole: Tensor, near: float = 1e-9) -> str:
    """What is wrong with a forward value of that state, or nothing."""
    return _wrong(FORWARD[state.kind], state, found, whole, near)


def wrong_gradients(state: State, found: list[Tensor], whole: Tensor, near: float = 1e-9) -> str:
    return _wrong(GRADIENT[state.kind], state, found, whole, near)


def splits(state: State, shape: tuple[int, ...], ranks: int) -> bool:
    """Whether a tensor of that shape can be split so."""
    return state.dim < len(shape) and shape[state.dim] > 0 and shape[state.dim] % (state.outer * ranks) == 0


def _distribute(form: str, state: State, whole: Tensor, ranks: int) -> list[Tensor]:
    if form == "whole":
        return [whole.clone() for _ in range(ranks)]
    if form == "shard":
        if not splits(state, tuple(whole.shape), ranks):
            raise ValueError(f"{tuple(whole.shape)} does not divide as {state} on {ranks} ranks")
        parts = whole.unflatten(state.dim, (state.outer, -1)).chunk(ranks, state.dim + 1)
        return [part.flatten(state.dim, state.dim + 1).clone() for part in parts]
    if not (whole.is_floating_point() or whole.is_complex()):
        raise ValueError(f"summands of {whole.dtype}")
    first = [torch.randn_like(whole) for _ in range(ranks - 1)]
    return [*first, whole - sum(first)]


def _join(state: State, shards: list[Tensor]) -> Tensor:
    parts = [shard.unflatten(state.dim, (state.outer, -1)) for shard in shards]
    return torch.cat(parts, state.dim + 1).flatten(state.dim, state.dim + 1)


def _wrong(form: str, state: State, found: list[Tensor], whole: Tensor, near: float) -> str:
    if form == "shard":
        others = {tuple(n for d, n in enumerate(x.shape) if d != state.dim) for x in found}
        if len(others) > 1 or any(x.dim() != whole.dim() or x.shape[state.dim] % state.outer for x in found):
            return f"shapes {[tuple(x.shape) for x in found]} are no shards of {tuple(whole.shape)}"
        found = [_join(state, found)]
    elif form == "summand":
        found = [torch.stack(found).sum(0)]
    for rank, tensor in enumerate(found):
        if tensor.shape != whole.shape:
            return f"shape {tuple(tensor.shape)}, expected {tuple(whole.shape)}"
        if tensor.dtype != whole.dtype and form != "summand":  # a sum of small integers is a larger integer
            return f"{tensor.dtype}, expected {whole.dtype}"
        if not torch.allclose(tensor.to(whole.dtype), whole, rtol=near, atol=near, equal_nan=True):
            return f"is wrong (tensor {rank} of {len(found)}, form {form})"
    return ""
