"""Recurrent layers as a device runs them: step after step, with one block of memory for all that backward needs.

Run as torch's parts they would be a dozen tensors for each step of each layer, of which thousands would be followed.
What a layer keeps of a row (a sample at a step) is as measured: of cuDNN's reserve on an H200, of oneDNN's workspace on
a CPU, of the parts where neither is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

KINDS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}  # with the gates that each hidden feature has


@dataclass(frozen=True)
class RecurrentLayer:
    """One layer in all its directions."""

    kind: str
    given: int  # features of a row that enter
    hidden: int
    made: int  # features that leave: fewer than hidden ones where they are projected
    directions: int

    @property
    def projects(self) -> bool:
        return self.made != self.hidden


@dataclass(frozen=True)
class Keeps:
    """What a layer keeps beside what enters it: numbers of each row and direction, weights once more, its output."""

    numbers: int
    weights: bool
    output: bool


def keeps_on_cuda(layer: RecurrentLayer, dtype: torch.dtype) -> Keeps:
    """cuDNN wants the weights in one shard: those of a program lie apart, so they are copied."""
    each = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}[layer.kind] * layer.hidden
    return Keeps(each + (layer.hidden + layer.made if layer.projects else 0), weights=True, output=True)


def keeps_on_cpu(layer: RecurrentLayer, dtype: torch.dtype) -> Keeps:
    """oneDNN, where torch has it and it was not switched off (torch itself does so where bfloat16 fails), runs LSTMs in
    float32 without projections; the results of two directions are copied into one."""
    onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if onednn and layer.kind == "lstm" and not layer.projects and dtype == torch.float32:
        own = layer.made if layer.directions > 1 else 0
        workspace = 9 * layer.hidden + 6 * max(layer.given, layer.hidden)
        return Keeps(workspace + own, weights=False, output=layer.directions == 1)
    each = {"lstm": 7, "gru": 7, "rnn_tanh": 1, "rnn_relu": 1}[layer.kind] * layer.hidden
    return Keeps(each + (layer.made if layer.projects else 0), weights=False, output=False)


Keeping = Callable[[RecurrentLayer, torch.dtype], Keeps]


class _Steps(torch.autograd.Function):
    """A layer from `x` (steps, batch, features), its first states and its weights: its output and its last states."""

    @staticmethod
    def forward(ctx: Any, layer: RecurrentLayer, keeps: Keeps, x: Tensor, states: int, *tensors: Tensor) -> Any:
        first, weights = tensors[:states], tensors[states:]
        steps, batch, _ = x.shape
        hidden = first[0][0]
        output = x.new_empty(steps, batch, layer.made * layer.directions)
        memory = [x.new_empty(steps, batch * keeps.numbers) for _ in range(layer.directions)]
        copied = [x.new_empty(w.numel()).copy_(w.reshape(-1)) for w in weights] if keeps.weights else []
        for own, kept in zip(_by_direction(layer, weights), memory, strict=True):
            torch.mm(x.reshape(steps * batch, -1), own[0].t())
            for step in range(steps):
                torch.mm(hidden, own[1].t())
                if layer.projects:
                    torch.mm(x.new_empty(batch, layer.hidden), own[-1].t())
                kept[step].fill_(0)
        output.fill_(0)
        ctx.layer, ctx.states, ctx.count = layer, states, len(tensors)
        ctx.save_for_backward(x, *tensors, *memory, *copied, *([output] if keeps.output else []))
        return output, *(torch.empty_like(state).fill_(0) for state in first)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        layer, (x, *saved) = ctx.layer, ctx.saved_tensors
        first, weights = saved[: ctx.states], saved[ctx.states : ctx.count]
        steps, batch, _ = x.shape
        rows = x.reshape(steps * batch, -1)
        of_x = torch.zeros_like(rows)
        of_weights = []
        for own in _by_direction(layer, weights):
            gates = x.new_empty(steps * batch, own[0].shape[0])
            for step in range(steps):
                gates[step * batch : (step + 1) * batch].fill_(0)
                torch.mm(gates[:batch], own[1])
                if layer.projects:
                    torch.mm(x.new_empty(batch, layer.made), own[-1])
            of_x.add_(torch.mm(gates, own[0]))
            of_weights += [torch.mm(gates.t(), rows), torch.mm(gates.t(), x.new_empty(steps * batch, layer.made))]
            of_weights += [torch.empty_like(w).fill_(0) for w in own[2:] if w.dim() == 1]
            if layer.projects:
                projected = x.new_empty(layer.made, steps * batch)
                of_weights.append(torch.mm(projected, x.new_empty(steps * batch, layer.hidden)))
        needed = ctx.needs_input_grad[4 : 4 + len(first)]
        of_states = [torch.zeros_like(s) if need else None for s, need in zip(first, needed, strict=True)]
        return None, None, of_x.view(x.shape), None, *of_states, *of_weights


def _by_direction(layer: RecurrentLayer, weights: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    count = len(weights) // layer.directions
    return [weights[i * count : (i + 1) * count] for i in range(layer.directions)]


def recurrent(kind: str, keeping: Keeping) -> Callable[..., tuple[Tensor, ...]]:
    """What `aten.lstm.input` and its like run."""

    def run(x: Tensor, states: Any, weights: Sequence[Tensor], *settings: Any) -> tuple[Tensor, ...]:
        _, layers, dropout, train, bidirectional, batch_first = settings
        first = list(states) if isinstance(states, tuple | list) else [states]
        x = x.transpose(0, 1) if batch_first else x
        directions, count = 1 + bidirectional, len(weights) // layers
        last: list[list[Tensor]] = []
        for number in range(layers):
            own = weights[number * count : (number + 1) * count]
            layer = RecurrentLayer(kind, x.shape[-1], own[0].shape[0] // KINDS[kind], first[0].shape[-1], directions)
            own_states = [state[number * directions : (number + 1) * directions] for state in first]
            given = (layer, keeping(layer, x.dtype), x, len(first), *own_states, *own)
            x, *after = _Steps.apply(*given)  # type: ignore[no-untyped-call]
            last.append(after)
            if dropout and train and number < layers - 1:
                x = torch.native_dropout(x, dropout, True)[0]
        ends = (torch.cat(each) if layers > 1 else each[0] for each in zip(*last, strict=True))
        return (x.transpose(0, 1) if batch_first else x, *ends)

    return run


def _low(kind: str) -> Callable[..., tuple[Tensor, ...]]:
    """Under autocast cuDNN runs in float16, also where the low precision is bfloat16."""
    run = recurrent(kind, keeps_on_cuda)

    def half(x: Any) -> Any:
        return x.to(torch.float16) if isinstance(x, Tensor) and x.is_floating_point() else x

    return lambda *args: run(*tree_map(half, args))


def lowered(keeping: Keeping) -> dict[str, Callable[..., Any]]:
    return {f"aten.{kind}.input": recurrent(kind, keeping) for kind in KINDS}


AUTOCAST = {f"aten.{kind}.input": _low(kind) for kind in KINDS}
