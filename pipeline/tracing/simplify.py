"""Attention as the model means it, without constant masks and with grouped heads; and bags of embeddings.

A model that is exported builds its attention mask out of position indices, batch by batch, and hands the whole of it to
attention. Where the mask depends on nothing but constants, it is computed; if it is the lower triangle, the op is
causal attention without a mask, and if it hides nothing, attention without a mask. A bias under such a mask (T5) is not
repeated for every sample of the batch, and is taken as it is where the mask hides nothing. What only served them falls
away. Key and value heads that were repeated for the mask's sake are not: attention takes them as they are
(`enable_gqa`). Bags of embeddings become our op, with one result, and without offsets where all bags have one length.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from shardwright.pipeline.ir.graph import Arg, Args, Op, Ref, Role, TensorType, Torch, Value
from shardwright.pipeline.ops.own_names import EMBEDDING_BAG
from shardwright.pipeline.tracing.lower import Ops, is_random, without_dead_ops

ATTENTION = "aten.scaled_dot_product_attention.default"
WHERE, EXPAND, CONTIGUOUS = "aten.where.ScalarOther", "aten.expand.default", "aten.contiguous.default"
MASK, CAUSAL = 3, 5  # positions of attn_mask and is_causal
LARGEST_MASK = 1 << 30  # elements
LARGEST_LOOK = 1 << 22  # elements among which equal ones are looked for
POINTWISE = {
    *("__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not"),
    *("eq", "ne", "le", "lt", "ge", "gt", "add", "sub", "mul", "where", "to", "_to_copy", "clone", "contiguous"),
}
BAGS = ("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")
FLAT = ("reshape", "view", "flatten")
HIDDEN = -1e4  # an additive mask at most this large hides a position


def simplify(graph: Ops) -> Ops:
    constants = _Constants(graph)
    graph = _small_biases(_with_bags(graph, constants), constants)
    writers = {name: op for op in graph.ops for name in op.outputs}
    ops = (_without_mask(op, constants) if op.target == ATTENTION else op for op in graph.ops)
    grouped = tuple(_grouped(op, graph.values, writers) if op.target == ATTENTION else op for op in ops)
    return without_dead_ops(replace(graph, ops=grouped))


def _small_biases(graph: Ops, constants: _Constants) -> Ops:
    """`where(mask, bias, hidden)` as a mask of attention: without the batch dim that only repeats it."""
    readers: dict[str, list[Op]] = {}
    for op in graph.ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op)

    def only_masks(name: str) -> bool:
        """Of attention, as it is or laid out anew, which changes nothing of what it says."""
        for op in readers.get(name, []):
            masks = op.target == ATTENTION and op.args.get(MASK, "attn_mask", None) == Ref(name)
            same = op.target == CONTIGUOUS and only_masks(op.outputs[0])
            if not same and not (masks and op.inputs.count(name) == 1):
                return False
        return True

    values = dict(graph.values)
    ops = []
    for op in graph.ops:
        if op.target == WHERE and only_masks(op.outputs[0]):
            source = constants.without_batch(op.inputs[0])
            bias = values[op.inputs[1]].type
            if source is not None and len(bias.shape) == 4 and bias.shape[0] == 1:
                op = replace(op, args=replace(op.args, positional=(Ref(source), *op.args.positional[1:])))
                before = values[op.outputs[0]]
                shape = (1, *before.type.shape[1:])
                values[before.name] = replace(before, type=replace(before.type, shape=shape))
        elif op.target == CONTIGUOUS and only_masks(op.outputs[0]):
            bare = constants.bare_bias(op.inputs[0])
            op = op if bare is None else replace(op, args=replace(op.args, positional=(Ref(bare),)))
            before = values[op.outputs[0]]
            values[before.name] = replace(before, type=values[op.inputs[0]].type)
        ops.append(op)
    return replace(graph, ops=tuple(ops), values=values)


def _without_mask(op: Op, constants: _Constants) -> Op:
    mask = op.args.get(MASK, "attn_mask", None)
    if not isinstance(mask, Ref) or op.args.get(CAUSAL, "is_causal", False):
        return op
    if constants.value(mask.value) is None:
        bias = constants.bare_bias(mask.value)
        return op if bias is None else _with(op, causal=False, mask=Ref(bias))
    shown = constants.shown(mask.value)
    return op if shown is None else _with(op, causal=shown is Shown.PAST)


class Shown(Enum):
    """What a mask leaves of a sequence."""

    ALL = "all"
    PAST = "past"  # the lower triangle


def _shown(mask: Tensor) -> Shown | None:
    mask = thin(mask, mask.dim() - 2)
    shown = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((shown | (mask <= HIDDEN)).all()):
        return None  # a bias, not a mask
    if bool(shown.all()):
        return Shown.ALL
    rows, columns = shown.shape[-2:]
    past = rows == columns and bool((shown == torch.ones(rows, columns, dtype=torch.bool).tril()).all())
    return Shown.PAST if past else None


def _with(op: Op, causal: bool, mask: Ref | None = None) -> Op:
    positional = list(op.args.positional[:MASK])
    dropout = op.args.get(MASK + 1, "dropout_p", 0.0)
    named = tuple((k, v) for k, v in op.args.named if k not in ("attn_mask", "dropout_p", "is_causal"))
    return replace(op, args=Args((*positional, mask, dropout, causal), named))


def _grouped(op: Op, values: dict[str, Value], writers: dict[str, Op]) -> Op:
    """Keys and values whose heads are repeated before attention, which can do that itself where it has no mask."""
    if op.args.get(MASK, "attn_mask", None) is not None or op.args.get(7, "enable_gqa", False):
        return op
    query, key, value = (values[name].type.shape for name in op.inputs[:3])
    sources = [_unrepeated(name, writers) for name in op.inputs[1:3]]
    if len(query) != 4 or key[1] != query[1] or value[1] != query[1] or None in sources:
        return op
    positional = (op.args.positional[0], *(Ref(str(name)) for name in sources), *op.args.positional[3:])
    return replace(op, args=Args(positional, (*op.args.named, ("enable_gqa", True))))


def _unrepeated(name: str, writers: dict[str, Op]) -> str | None:
    """`k` of `k[:, :, None].expand(b, h, r, s, d).reshape(b, h * r, s, d)`"""
    for kinds in (("reshape", "view"), ("expand",), ("unsqueeze",)):
        op = writers.get(name)
        if op is None or op.target.split(".")[1] not in kinds:
            return None
        if "unsqueeze" in kinds and op.args.positional[1] not in (2, -3):
            return None
        name = op.inputs[0]
    return name


def thin(tensor: Tensor, dims: int | None = None) -> Tensor:
    """One slice of each of the first so many dims along which all slices are the same, as those of a batch are."""
    for dim in range(tensor.dim() if dims is None else dims):
        first = tensor.narrow(dim, 0, 1) if tensor.shape[dim] > 1 else tensor
        if tensor.stride(dim) == 0 or (tensor.numel() <= LARGEST_LOOK and bool((tensor == first).all())):
            tensor = first
    return tensor


class _Constants:
    """Values that depend on no input, parameter or buffer, and on no random number; computed when asked for.

    Masks repeat themselves for every sample: what is worked out of such tensors element by element is worked out once,
    and expanded.
    """

    def __init__(self, graph: Ops) -> None:
        self.spread: set[str] = set()  # what is expanded
        self.writers = {name: op for op in graph.ops for name in op.outputs}
        self.values = graph.values
        self.known: dict[str, Tensor | None] = {}
        self.masks: dict[str, Shown | None] = {}

    def shown(self, name: str) -> Shown | None:
        """Of a mask; found once, as all layers may have the same."""
        if name not in self.masks:
            mask = self.value(name)
            self.masks[name] = None if mask is None else _shown(mask)
        return self.masks[name]

    def value(self, name: str) -> Tensor | None:
        if name not in self.known:
            op = self.writers.get(name)
            self.known[name] = None
            if op is not None and self._is_computable(op):
                self.known |= dict(zip(op.outputs, self._results(op), strict=True))
        return self.known[name]

    def _results(self, op: Op) -> list[Tensor]:
        _, kind, overload = op.target.split(".")
        positional = [self._real(arg, kind) for arg in op.args.positional]
        named = {key: self._real(arg, kind) for key, arg in op.args.named}
        result = getattr(getattr(torch.ops.aten, kind), overload)(*positional, **named)
        if kind in POINTWISE:
            self.spread.add(op.outputs[0])
            return [result.expand(self.values[op.outputs[0]].type.shape)]
        return [result] if isinstance(result, Tensor) else list(result)

    def without_batch(self, name: str) -> str | None:
        """What a constant is, but for a first dim that only repeats it."""
        op = self.writers.get(name)
        if op is None or op.target != EXPAND or self.value(op.inputs[0]) is None:
            return None
        before, after = self.values[op.inputs[0]].type.shape, self.values[name].type.shape
        return op.inputs[0] if len(before) == len(after) and before[0] == 1 else None

    def bare_bias(self, name: str) -> str | None:
        """`bias` of `where(mask, bias, hidden)` where the mask hides nothing."""
        op = self.writers.get(name)
        mask = self.value(op.inputs[0]) if op is not None and op.target == WHERE else None
        return op.inputs[1] if op is not None and mask is not None and bool(thin(mask).all()) else None

    def _is_computable(self, op: Op) -> bool:
        if is_random(op) or op.mutates or not op.target.startswith("aten."):
            return False
        if not all(self.value(read) is not None for read in op.inputs):
            return False
        if op.target.split(".")[1] in POINTWISE:
            shapes = (thin(known).shape for name in op.inputs if (known := self.known[name]) is not None)
            return bool(torch.broadcast_shapes(*shapes).numel() <= LARGEST_MASK)
        whole = (*op.outputs, *self.spread.intersection(op.inputs))
        return all(self.values[name].type.numel <= LARGEST_MASK for name in whole)

    def _real(self, arg: Arg, kind: str) -> object:
        if isinstance(arg, Ref):
            known = self.known[arg.value]
            assert known is not None
            if kind in POINTWISE:
                return thin(known)
            return known.contiguous() if arg.value in self.spread else known
        if isinstance(arg, Torch):
            return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.name)
        return [self._real(a, kind) for a in arg] if isinstance(arg, tuple) else arg


def _with_bags(graph: Ops, constants: _Constants) -> Ops:
    read = {name for op in graph.ops for name in op.inputs} | {graph.output}
    writers = {name: op for op in graph.ops for name in op.outputs}
    values, ops = dict(graph.values), []
    for op in graph.ops:
        if op.target in BAGS and not read.intersection(op.outputs[1:]):
            ops += _our_bag(op, values, writers, constants)
        else:
            ops.append(op)
    return replace(graph, values=values, ops=tuple(ops))


def _our_bag(op: Op, values: dict[str, Value], writers: dict[str, Op], constants: _Constants) -> list[Op]:
    weight, indices, offsets = (op.args.get(n, x, None) for n, x in enumerate(("weight", "indices", "offsets")))
    weights = op.args.get(6, "per_sample_weights", None)
    last = bool(op.args.get(7, "include_last_offset", False))
    bags, flat = values[op.outputs[0]].type.shape[0], values[indices.value].type.shape
    length = _length_of_bags(constants.value(offsets.value), bags, last, flat)
    made: list[Op] = []

    def in_rows(ref: Ref) -> Ref:
        """The tensor as one row for each bag: what was laid flat before, or a view."""
        writer, shape = writers.get(ref.value), (bags, length)
        if writer and writer.target.split(".")[1] in FLAT and values[writer.inputs[0]].type.shape == shape:
            return Ref(writer.inputs[0])
        before, name = values[ref.value], f"{op.name}_rows_of_{ref.value}"
        values[name] = Value(name, TensorType(shape, before.type.dtype), Role.RESULT, name, before.grad)
        made.append(Op(name, "aten.reshape.default", Args((ref, shape)), (name,), op.module, op.source, exact=op.exact))
        return Ref(name)

    if length:
        indices, offsets, last = in_rows(indices), None, False
        weights = in_rows(weights) if isinstance(weights, Ref) else None
    padding, frequency = op.args.get(8, "padding_idx", None), op.args.get(3, "scale_grad_by_freq", False)
    if isinstance(padding, int) and padding < 0:  # counted from the end
        padding += values[weight.value].type.shape[0]
    args = Args((weight, indices, offsets, op.args.get(4, "mode", 0), weights, last, padding, frequency))
    output = op.outputs[0]
    values[output] = replace(values[output], origin=output)
    for name in op.outputs[1:]:
        del values[name]
    return [*made, Op(output, EMBEDDING_BAG, args, (output,), op.module, op.source, exact=op.exact)]


def _length_of_bags(offsets: Tensor | None, bags: int, last: bool, indices: tuple[int, ...]) -> int:
    """Of all bags, where it is one and known; else nothing."""
    if offsets is None or len(indices) != 1 or not bags or not indices[0] or indices[0] % bags:
        return 0
    length = indices[0] // bags
    return length if torch.equal(offsets, torch.arange(bags + last).to(offsets.dtype) * length) else 0
