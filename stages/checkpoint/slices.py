"""The graph and its profile for a q-th of the batch: what a smaller micro-batch costs.

The graph is traced for one pass. A pipeline may cut a pass into q: values that depend on an input have a q-th of their
elements, and so have arithmetic, bytes and temporaries of the ops that write them, less what belongs to parameters
(weights are read, and their gradients written, whole). Launches stay. Only the number of elements counts for a price:
the first dim that q divides is cut, whatever it means.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from pipeline.ir.graph import Op, OpGraph, Role, TensorType, Value
from pipeline.ir.plan import Sharding
from pipeline.ir.profile import OpCost, Profile
from pipeline.lowering import home_layouts


def batch_of(graph: OpGraph) -> int:
    """What every input's first dim is a multiple of: the samples of a pass."""
    return gcd(*(value.type.shape[0] for value in graph.of_role(Role.INPUT) if value.type.shape)) or 1


def sliced(graph: OpGraph, profile: Profile, q: int) -> tuple[OpGraph, Profile]:
    """Both for a q-th of the batch."""
    if q == 1:
        return graph, profile
    cut = _depending(graph)
    values = {
        name: replace(value, type=_cut(value.type, q)) if name in cut else value for name, value in graph.values.items()
    }
    costs = {
        op.name: _scaled(profile.ops[op.name], _parameter_bytes(graph, op), q) if cut & set(op.outputs) else cost
        for op in graph.ops
        for cost in (profile.ops[op.name],)
    }
    kernels = replace(profile.kernels, slices=q) if profile.kernels else None
    return replace(graph, values=values), replace(profile, ops={**profile.ops, **costs}, kernels=kernels)


def fits(graph: OpGraph, sharding: Sharding, sizes: tuple[int, ...], q: int) -> bool:
    """Whether a q-th of the batch can still be split as the sharding splits it: on the dim that is cut."""
    if q == 1:
        return True
    home = home_layouts(graph, sharding)
    return all(
        home[name].fits(_cut(graph.values[name].type, q).shape, sizes)
        for name in _depending(graph)
        if _leads(graph.values[name], q)
    )


def _leads(value: Value, q: int) -> bool:
    """Whether it is the first dim that is cut: where it is another, that need not be the batch."""
    return bool(value.type.shape) and value.type.shape[0] % q == 0


def _depending(graph: OpGraph) -> set[str]:
    """The inputs, and what is computed from them."""
    found = {value.name for value in graph.of_role(Role.INPUT)}
    for op in graph.ops:
        if found & set(op.inputs):
            found |= set(op.outputs)
    return found


def _cut(kind: TensorType, q: int) -> TensorType:
    for dim, size in enumerate(kind.shape):
        if size % q == 0:
            return replace(kind, shape=(*kind.shape[:dim], size // q, *kind.shape[dim + 1 :]))
    return kind


def _parameter_bytes(graph: OpGraph, op: Op) -> int:
    read = (graph.values[name] for name in dict.fromkeys(op.inputs))
    return sum(value.type.nbytes for value in read if value.role is Role.PARAMETER)


def _scaled(cost: OpCost, parameters: int, q: int) -> OpCost:
    def part(nbytes: int, whole: int = parameters) -> int:
        kept = min(nbytes, whole)
        return kept + -(-(nbytes - kept) // q)

    return replace(
        cost,
        flops_forward=cost.flops_forward / q,
        flops_backward=cost.flops_backward / q,
        bytes_forward=part(cost.bytes_forward),
        bytes_backward=part(cost.bytes_backward, 2 * parameters),
        extra_saved=part(cost.extra_saved),
        temporary_forward=part(cost.temporary_forward),
        temporary_backward=part(cost.temporary_backward),
    )
