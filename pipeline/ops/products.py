"""Products of an activation and a weight: the ops whose two gradients are products of their own.

So a pipeline can make the gradient of the activation at once, which another partition waits for, and that of the weight
when there is nothing else to do (pipeline/runtime/pipelining/deferred_weight_grads.py). Other ops with weights,
convolutions among them, make all their gradients together.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from shardwright.pipeline.ir.graph import Op, OpGraph, Ref, Role


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

# Ops that show a weight otherwise or cast it -> the nodes that autograd has for them, which keep no tensors.
SEEN_OTHERWISE = {
    "t": ("T",),
    "transpose": ("Transpose",),
    "permute": ("Permute",),
    "view": ("View",),
    "reshape": ("View", "UnsafeView", "ReshapeAlias"),
    "unsqueeze": ("Unsqueeze",),
    "to": ("ToCopy",),
    "_to_copy": ("ToCopy",),
}


def is_split(x: Sequence[int], weight: Sequence[int]) -> bool:
    """By the shapes: one matrix for all rows, or one for each batch; no batch dims that broadcast, no vectors."""
    return len(x) > 1 and (len(weight) == 2 or (len(weight) == len(x) == 3 and x[0] == weight[0]))


def weights(graph: OpGraph) -> set[str]:
    """Parameters, and what is a parameter seen otherwise."""
    found = {value.name for value in graph.of_role(Role.PARAMETER)}
    for op in graph.ops:
        if op.target.split(".")[1] in SEEN_OTHERWISE and op.inputs and found.issuperset(op.inputs):
            found |= set(op.outputs)
    return found


def is_put_off(graph: OpGraph, op: Op, own: Container[str]) -> bool:
    """Whether the weight's gradient can be made later; `own` are the graph's `weights`."""
    product, given = PRODUCTS.get(op.target), op.args.positional
    if product is None or op.args.named:
        return False
    x, weight = given[product.x], given[product.weight]
    assert isinstance(x, Ref) and isinstance(weight, Ref)
    types = [graph.values[one.value].type for one in (x, weight)]
    return weight.value in own and graph.values[weight.value].grad and is_split(types[0].shape, types[1].shape)
