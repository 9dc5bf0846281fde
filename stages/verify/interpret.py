"""The traced graph, op by op, on unsplit tensors: what each value and its gradient should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.ir.graph import Arg, Op, OpGraph, Ref, Role, Torch
from pipeline.ops.own_names import CONSTANT
from pipeline.ops.public import overload_of
from stages.verify.float64 import ANY, Within, in_float64
from stages.verify.truth import Batch, State, seeded


@dataclass(frozen=True)
class Values:
    """Of one pass, by the names of the graph's values."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    loss: Tensor
    asked: dict[str, set[torch.dtype]]  # op -> the lower types to which it casts


def interpret(
    graph: OpGraph, state: State, batch: Batch, number: int, parts: float, *, draw: bool, within: Within = in_float64
) -> Values:
    """Pass `number` of a step that has the samples of so many; the state is left as it was."""
    tensors = {name: t.detach().clone().requires_grad_() for name, t in state.parameters.items()}
    tensors |= {name: t.detach().clone() for name, t in state.constants.items()}
    known = {
        value.name: batch[value.name] if value.role is Role.INPUT else tensors[value.origin]
        for value in graph.values.values()
        if value.role is not Role.RESULT
    }
    gradients: dict[str, Tensor] = {}
    values = {name: t.detach().clone() for name, t in known.items()}
    asked: dict[str, set[torch.dtype]] = {}
    with within(widen=True, draws=draw, path=ANY) as mode, seeded(number):
        for op in graph.ops:
            mode.asked.clear()
            for name, result in zip(op.outputs, _results(op, known), strict=True):
                known[name] = result
                values[name] = result.detach().clone()
                if result.requires_grad:
                    result.register_hook(lambda g, name=name: gradients.__setitem__(name, g.detach()))
            asked[op.name] = {dtype for dtype, _ in mode.asked}
        loss = known[graph.output]
        (loss / parts).backward()
    of_parameters = {v.name: tensors[v.origin].grad for v in graph.of_role(Role.PARAMETER)}
    gradients |= {name: g for name, g in of_parameters.items() if g is not None}
    return Values(values, gradients, loss.detach(), asked)


def _results(op: Op, known: dict[str, Tensor]) -> list[Tensor]:
    positional = [_real(arg, known) for arg in op.args.positional]
    named = {key: _real(arg, known) for key, arg in op.args.named if key != "pin_memory"}
    if op.target == CONSTANT:
        found: Any = torch.tensor(*positional, **named)
    else:
        overload = overload_of(op.target)
        assert overload is not None, f"torch has no {op.target}, and the graph was read"
        found = overload(*positional, **named)
    return [found] if isinstance(found, Tensor) else list(found)


def _real(arg: Arg, known: dict[str, Tensor]) -> Any:
    if isinstance(arg, Ref):
        return known[arg.value]
    if isinstance(arg, Torch):
        return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.name)
    return [_real(item, known) for item in arg] if isinstance(arg, tuple) else arg
