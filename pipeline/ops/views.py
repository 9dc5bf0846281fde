"""Ops that only look at memory another way: no kernel, no bytes."""

from __future__ import annotations

from pipeline.ops.rule import OpRule, OpView, method, reshaped
from pipeline.ops.shapes import permuted, reshape


def _transpose(view: OpView) -> str:
    rank = len(view.output.shape)
    order = list(range(rank))
    a, b = (view.constant(i, f"dim{i - 1}", 0) % rank for i in (1, 2))
    order[a], order[b] = order[b], order[a]
    return permuted(order)


def _permute(view: OpView) -> str:
    rank = len(view.output.shape)
    return permuted([d % rank for d in view.constant(1, "dims", ())])


def _t(view: OpView) -> str:
    return permuted(list(range(len(view.output.shape)))[::-1])


def _squeeze(view: OpView) -> str:
    """A dim that is not of size one stays; split into pieces of size one it would go, so it is not split."""
    if view.inputs[0].shape != view.output.shape:
        return reshape(view)
    rank = len(view.output.shape)
    stays = view.constant(1, "dim", 0) % max(rank, 1)
    names = " ".join(f"d{i}" + ("^" if i == stays else "") for i in range(rank))
    return f"{names} -> {names}"


def _expand(view: OpView) -> str:
    """Dims that grow are new in the output; their gradient is a sum, so they are not split here."""
    before, after = view.inputs[0].shape, view.output.shape
    offset = len(after) - len(before)
    left, right = [], [f"new{i}^" for i in range(offset)]
    for i, size in enumerate(before):
        same = size == after[offset + i]
        left.append(f"d{i}" if same else f"one{i}^")
        right.append(f"d{i}" if same else f"grown{i}^")
    return f"{' '.join(left)} -> {' '.join(right)}"


RULES = [
    # A conversion may leave a tensor in another order in memory than the unsplit one: `view` would refuse that one.
    OpRule("aten.view.default", reshape, reshaped("reshape"), linear=((0,),), is_view=True),
    OpRule("aten.reshape.default", reshape, reshaped("reshape"), linear=((0,),), is_view=True, needs_order=True),
    OpRule("aten.flatten.using_ints", reshape, method("flatten"), linear=((0,),), is_view=True, needs_order=True),
    OpRule("aten.unsqueeze.default", reshape, method("unsqueeze"), linear=((0,),), is_view=True),
    OpRule("aten.squeeze.dim", _squeeze, method("squeeze"), linear=((0,),), is_view=True),
    OpRule("aten.transpose.int", _transpose, method("transpose"), linear=((0,),), is_view=True, permutes=True),
    OpRule("aten.permute.default", _permute, method("permute"), linear=((0,),), is_view=True, permutes=True),
    OpRule("aten.t.default", _t, method("t"), linear=((0,),), is_view=True, permutes=True),
    OpRule("aten.expand.default", _expand, reshaped("expand"), linear=((0,),), is_view=True),
]
