"""The state table as assertions."""

from __future__ import annotations

from torch import Tensor

from shardwright.pipeline.ir.layout import State
from shardwright.pipeline.ops.discovery.shards import (
    FORWARD,
    GRADIENT,
    gradients,
    values,
    wrong_gradients,
    wrong_values,
)

__all__ = ["FORWARD", "GRADIENT", "check_gradients", "check_values", "gradients", "values"]


def check_values(state: State, found: list[Tensor], whole: Tensor, what: str, near: float = 1e-9) -> None:
    wrong = wrong_values(state, found, whole, near)
    assert not wrong, f"{what} in {state}: {wrong}"


def check_gradients(state: State, found: list[Tensor], whole: Tensor, what: str, near: float = 1e-9) -> None:
    wrong = wrong_gradients(state, found, whole, near)
    assert not wrong, f"gradient of {what} in {state}: {wrong}"
