"""Products of an activation and a weight: the ops whose two gradients are products of their own.

So a pipeline can make the gradient of the activation at once, which another partition waits for, and that of the weight
when there is nothing else to do (pipeline/runtime/put_off.py). Other ops with weights, convolutions among them, make
all their gradients together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """How generated programs call it, and the places of its arguments."""

    module: str  # F or torch
    name: str
    x: int
    weight: int
    addend: int | None = None
    transposed: bool = False  # the weight is (out, in)


PRODUCTS = {
    "aten.linear.default": Product("F", "linear", 0, 1, 2, transposed=True),
    "aten.mm.default": Product("torch", "mm", 0, 1),
    "aten.matmul.default": Product("torch", "matmul", 0, 1),
    "aten.bmm.default": Product("torch", "bmm", 0, 1),
    "aten.addmm.default": Product("torch", "addmm", 1, 2, 0),
    "aten.baddbmm.default": Product("torch", "baddbmm", 1, 2, 0),
}


def is_split(x: Sequence[int], weight: Sequence[int]) -> bool:
    """By the shapes: one matrix for all rows, or one for each batch; no batch dims that broadcast, no vectors."""
    return len(x) > 1 and (len(weight) == 2 or (len(weight) == len(x) == 3 and x[0] == weight[0]))
