"""Attention as the model means it: without constant masks, and with grouped heads.

A model that is exported builds its attention mask out of position indices, batch by batch, and hands the whole of it to
attention. Where the mask depends on nothing but constants, it is computed; if it is the lower triangle, the op is
causal attention without a mask, and if it hides nothing, attention without a mask. What only served it falls away. Key
and value heads that were repeated for the mask's sake are not: attention takes them as they are (`enable_gqa`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pipeline.ir.graph import Arg, Args, Op, Ref, Torch
from stages.trace.lower import Ops, is_random, without_dead_ops

ATTENTION = "aten.scaled_dot_product_attention.default"
MASK, CAUSAL = 3, 5  # positions of attn_mask and is_causal
LARGEST_MASK = 1 << 30  # elements
HIDDEN = -1e4  # an additive mask at most this large hides a position


def simplify(graph: Ops) -> Ops:
    constants = _Constants(graph)
    repeated = _Repeated(graph)
    ops = tuple(repeated.grouped(_without_mask(op, constants)) if op.target == ATTENTION else op for op in graph.ops)
    return without_dead_ops(replace(graph, ops=ops))


def _without_mask(op: Op, constants: _Constants) -> Op:
    mask = op.args.get(MASK, "attn_mask", None)
    if not isinstance(mask, Ref) or op.args.get(CAUSAL, "is_causal", False):
        return op
    found = constants.value(mask.value)
    if found is None:
        return op
    shown = found if found.dtype == torch.bool else found == 0
    if found.dtype != torch.bool and not bool((shown | (found <= HIDDEN)).all()):
        return op  # a bias, not a mask
    if bool(shown.all()):
        return _with(op, causal=False)
    if shown.shape[-1] == shown.shape[-2] and bool((shown == torch.ones_like(shown[..., :, :]).tril()).all()):
        return _with(op, causal=True)
    return op


def _with(op: Op, causal: bool) -> Op:
    positional = list(op.args.positional[:MASK])
    dropout = op.args.get(MASK + 1, "dropout_p", 0.0)
    named = tuple((k, v) for k, v in op.args.named if k not in ("attn_mask", "dropout_p", "is_causal"))
    return replace(op, args=Args((*positional, None, dropout, causal), named))


class _Repeated:
    """Keys and values whose heads are repeated before attention, which can do that itself where it has no mask."""

    def __init__(self, graph: Ops) -> None:
        self.writers = {name: op for op in graph.ops for name in op.outputs}
        self.values = graph.values

    def grouped(self, op: Op) -> Op:
        if op.args.get(MASK, "attn_mask", None) is not None or op.args.get(7, "enable_gqa", False):
            return op
        query, key, value = (self.values[name].type.shape for name in op.inputs[:3])
        sources = [self._source(name) for name in op.inputs[1:3]]
        if len(query) != 4 or key[1] != query[1] or value[1] != query[1] or None in sources:
            return op
        positional = (op.args.positional[0], *(Ref(str(name)) for name in sources), *op.args.positional[3:])
        return replace(op, args=Args(positional, (*op.args.named, ("enable_gqa", True))))

    def _source(self, name: str) -> str | None:
        """`k` of `k[:, :, None].expand(b, h, r, s, d).reshape(b, h * r, s, d)`"""
        for kind in ("reshape", "expand", "unsqueeze"):
            op = self.writers.get(name)
            if op is None or op.target.split(".")[1] not in (kind, "view" if kind == "reshape" else kind):
                return None
            if kind == "unsqueeze" and op.args.positional[1] not in (2, -3):
                return None
            name = op.inputs[0]
        return name


class _Constants:
    """Values that depend on no input, parameter or buffer, and on no random number; computed when asked for."""

    def __init__(self, graph: Ops) -> None:
        self.writers = {name: op for op in graph.ops for name in op.outputs}
        self.values = graph.values
        self.known: dict[str, Tensor | None] = {}

    def value(self, name: str) -> Tensor | None:
        if name not in self.known:
            op = self.writers.get(name)
            self.known[name] = None
            if op is not None and self._is_computable(op):
                results = self._run(op)
                self.known |= dict(zip(op.outputs, results, strict=True))
        return self.known[name]

    def _is_computable(self, op: Op) -> bool:
        if is_random(op) or op.mutates or not op.target.startswith("aten."):
            return False
        if any(self.values[name].type.numel > LARGEST_MASK for name in op.outputs):
            return False
        return all(self.value(read) is not None for read in op.inputs)

    def _run(self, op: Op) -> list[Tensor]:
        _, name, overload = op.target.split(".")
        function = getattr(getattr(torch.ops.aten, name), overload)
        result = function(*(self._real(a) for a in op.args.positional), **{k: self._real(v) for k, v in op.args.named})
        return [result] if isinstance(result, Tensor) else list(result)

    def _real(self, arg: Arg) -> object:
        if isinstance(arg, Ref):
            return self.known[arg.value]
        if isinstance(arg, Torch):
            return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.name)
        return [self._real(a) for a in arg] if isinstance(arg, tuple) else arg
