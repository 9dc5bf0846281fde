"""What each rank holds of a tensor in a given state, and what the ranks hold together: the state table as code.

The forward value and the gradient of a state are forms: `whole` on every rank, a `piece` of a dim, or a `summand`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.ir.layout import State

FORWARD = {"R": "whole", "B": "whole", "S": "piece", "P": "summand"}
GRADIENT = {"R": "whole", "B": "summand", "S": "piece", "P": "whole"}


def values(state: State, whole: Tensor, ranks: int) -> list[Tensor]:
    """A forward value of that state, on each rank."""
    return _distribute(FORWARD[state.kind], state.dim, whole, ranks)


def gradients(state: State, whole: Tensor, ranks: int) -> list[Tensor]:
    """A gradient of a tensor of that state, on each rank."""
    return _distribute(GRADIENT[state.kind], state.dim, whole, ranks)


def check_values(state: State, found: list[Tensor], whole: Tensor, what: str, near: float = 1e-9) -> None:
    _check(FORWARD[state.kind], state.dim, found, whole, f"{what} in {state}", near)


def check_gradients(state: State, found: list[Tensor], whole: Tensor, what: str, near: float = 1e-9) -> None:
    _check(GRADIENT[state.kind], state.dim, found, whole, f"gradient of {what} in {state}", near)


def _distribute(form: str, dim: int, whole: Tensor, ranks: int) -> list[Tensor]:
    if form == "whole":
        return [whole.clone() for _ in range(ranks)]
    if form == "piece":
        assert whole.shape[dim] % ranks == 0, f"dim {dim} of {tuple(whole.shape)} does not divide by {ranks}"
        return [piece.clone() for piece in whole.chunk(ranks, dim)]
    assert whole.is_floating_point(), f"summands of {whole.dtype}"
    first = [torch.randn_like(whole) for _ in range(ranks - 1)]
    return [*first, whole - sum(first)]


def _check(form: str, dim: int, found: list[Tensor], whole: Tensor, what: str, near: float) -> None:
    if form == "piece":
        found = [torch.cat(found, dim)]
    elif form == "summand":
        found = [torch.stack(found).sum(0)]
    for rank, tensor in enumerate(found):
        assert tensor.shape == whole.shape, f"{what}: shape {tuple(tensor.shape)}, expected {tuple(whole.shape)}"
        assert tensor.dtype == whole.dtype, f"{what}: {tensor.dtype}, expected {whole.dtype}"
        right = torch.allclose(tensor, whole, rtol=near, atol=near)
        assert right, f"{what} is wrong (tensor {rank} of {len(found)}, form {form})"
