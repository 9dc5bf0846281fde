"""Bags of embeddings as our op has them: with one result, and without offsets where all bags have the same length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.ir.graph import Args, Op, Ref, Role, TensorType, Value
from pipeline.ops.own_names import EMBEDDING_BAG
from pipeline.tracing.lower import Ops

_THEIRS = ("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")
_FLAT = ("reshape", "view", "flatten")


def with_bags(graph: Ops, constant: Callable[[str], Tensor | None]) -> Ops:
    """`constant` gives the tensor of a value that depends on no input."""
    read = {name for op in graph.ops for name in op.inputs} | {graph.output}
    writers = {name: op for op in graph.ops for name in op.outputs}
    values, ops = dict(graph.values), []
    for op in graph.ops:
        if op.target in _THEIRS and not read.intersection(op.outputs[1:]):
            ops += _ours(op, values, writers, constant)
        else:
            ops.append(op)
    return replace(graph, values=values, ops=tuple(ops))


def _ours(
    op: Op, values: dict[str, Value], writers: dict[str, Op], constant: Callable[[str], Tensor | None]
) -> list[Op]:
    weight, indices, offsets = (op.args.get(n, x, None) for n, x in enumerate(("weight", "indices", "offsets")))
    weights = op.args.get(6, "per_sample_weights", None)
    last = bool(op.args.get(7, "include_last_offset", False))
    bags, flat = values[op.outputs[0]].type.shape[0], values[indices.value].type.shape
    length = _length(constant(offsets.value), bags, last, flat)
    made: list[Op] = []

    def in_rows(ref: Ref) -> Ref:
        """The tensor as one row for each bag: what was laid flat before, or a view."""
        writer, shape = writers.get(ref.value), (bags, length)
        if writer and writer.target.split(".")[1] in _FLAT and values[writer.inputs[0]].type.shape == shape:
            return Ref(writer.inputs[0])
        before, name = values[ref.value], f"{op.name}_rows_of_{ref.value}"
        values[name] = Value(name, TensorType(shape, before.type.dtype), Role.RESULT, name, before.grad)
        made.append(Op(name, "aten.reshape.default", Args((ref, shape)), (name,), op.module, op.source, exact=op.exact))
        return Ref(name)

    if length:
        indices, offsets, last = in_rows(indices), None, False
        weights = in_rows(weights) if isinstance(weights, Ref) else None
    padding, frequency = op.args.get(8, "padding_idx", None), op.args.get(3, "scale_grad_by_freq", False)
    mode = op.args.get(4, "mode", 0)
    args = Args((weight, indices, offsets, mode, weights, last, _counted(padding, values, weight), frequency))
    output = op.outputs[0]
    values[output] = replace(values[output], origin=output)
    for name in op.outputs[1:]:
        del values[name]
    return [*made, Op(output, EMBEDDING_BAG, args, (output,), op.module, op.source, exact=op.exact)]


def _length(offsets: Tensor | None, bags: int, last: bool, indices: tuple[int, ...]) -> int:
    """Of all bags, where it is one and known; else nothing."""
    if offsets is None or len(indices) != 1 or not bags or not indices[0] or indices[0] % bags:
        return 0
    length = indices[0] // bags
    return length if torch.equal(offsets, torch.arange(bags + last).to(offsets.dtype) * length) else 0


def _counted(padding: object, values: dict[str, Value], weight: Ref) -> int | None:
    """From the front."""
    if not isinstance(padding, int):
        return None
    return padding if padding >= 0 else values[weight.value].type.shape[0] + padding
