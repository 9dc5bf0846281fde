"""Runs an OpGraph as it stands: the graph alone must be the model."""

from __future__ import annotations

import torch

from shardwright.pipeline.ir.graph import OpGraph, Ref, Role, Torch
from shardwright.pipeline.ops.own_names import CONSTANT
from shardwright.pipeline.ops.public import overload_of
from shardwright.pipeline.runtime import without_autocast


def run_graph(graph: OpGraph, module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss, with the module's own parameters and buffers."""
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    known = {
        v.name: batch[v.name] if v.role is Role.INPUT else named[v.origin]
        for v in graph.values.values()
        if v.role is not Role.RESULT
    }

    def real(arg):
        if isinstance(arg, Ref):
            return known[arg.value]
        if isinstance(arg, Torch):
            return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.name)
        return [real(a) for a in arg] if isinstance(arg, tuple) else arg

    for op in graph.ops:
        named_args = {k: real(v) for k, v in op.args.named}
        if op.target == CONSTANT:
            results = torch.tensor(real(op.args.positional[0]), dtype=named_args["dtype"])
        else:
            called = overload_of(op.target), *(real(a) for a in op.args.positional)
            results = without_autocast(*called, **named_args) if op.exact else called[0](*called[1:], **named_args)
        for name, result in zip(op.outputs, [results] if isinstance(results, torch.Tensor) else results, strict=True):
            kind = graph.values[name].type
            assert (tuple(result.shape), str(result.dtype)) == (kind.shape, f"torch.{kind.dtype}"), name
            assert result.requires_grad or not graph.values[name].grad, name
            known[name] = result
    return known[graph.output]
