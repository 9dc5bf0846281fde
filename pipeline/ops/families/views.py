"""Ops that only look at memory another way: no kernel, no bytes."""

from __future__ import annotations

from dataclasses import replace

from shardwright.pipeline.ops.rule import OpRule, OpView, Rendered, method, reshaped
from shardwright.pipeline.ops.shapes import along, dim_of, letters, permuted, reshape


def _transpose(view: OpView) -> str:
    order = list(range(rank := len(view.output.shape)))
    a, b = (view.constant(i, f"dim{i - 1}", 0) % rank for i in (1, 2))
    order[a], order[b] = order[b], order[a]
    return permuted(order)


def _permute(view: OpView) -> str:
    rank = len(view.output.shape)
    return permuted([d % rank for d in view.constant(1, "dims", ())])


def _movedim(view: OpView) -> str:
    rank = len(view.output.shape)
    source, target = (view.constant(i, name, 0) % rank for i, name in ((1, "source"), (2, "destination")))
    order = [d for d in range(rank) if d != source]
    return permuted([*order[:target], source, *order[target:]])


def _t(view: OpView) -> str:
    return permuted(range(len(view.output.shape))[::-1])


def _squeeze(view: OpView) -> str:
    """A dim that is not of size one stays; split into shards of size one it would go, so it is not split."""
    if view.inputs[0].shape != view.output.shape:
        return reshape(view)
    return along(1)(view)


def _expand(view: OpView) -> str:
    """Dims that grow are new in the output: split there, the input is read whole and its gradient is partial."""
    before, after = view.inputs[0].shape, view.output.shape
    offset = len(after) - len(before)
    left, right = [], [f"new{i}" for i in range(offset)]
    for i, size in enumerate(before):
        same = size == after[offset + i]
        left.append(f"d{i}" if same else f"one{i}^")
        right.append(f"d{i}" if same else f"grown{i}")
    return f"{' '.join(left)} -> {' '.join(right)}"


def _expand_as(view: OpView) -> str:
    left, right = _expand(view).split("->")
    return f"{left}, {right} -> {right}"


def _repeat(view: OpView) -> str:
    """Each dim is laid down several times over: `d -> (times d)`."""
    before, after = view.inputs[0].shape, view.output.shape
    offset = len(after) - len(before)
    right = [f"new{i}^" for i in range(offset)] + [f"(r{i}^ d{i})" for i in range(len(before))]
    return f"{letters(len(before))} -> {' '.join(right)}"


def _repeat_interleave(view: OpView) -> str:
    """(input, repeats, dim): each element several times in a row, `d -> (d times)`."""
    rank = len(view.inputs[0].shape)
    if view.constant(2, "dim", None) is None:
        return f"{letters(rank, range(rank))} -> n^"
    grown = dim_of(view, 2)
    right = [f"(d{i} r^)" if i == grown else f"d{i}" for i in range(rank)]
    return f"{letters(rank)} -> {' '.join(right)}"


def _render_repeat_interleave(r: Rendered) -> str:
    """The size of the result, where it is told, is that on this rank."""
    size = r.local_output[dim_of(r.view, 2) if r.view.constant(2, "dim", None) is not None else 0]
    named = {name: str(size) if name == "output_size" and text != "None" else text for name, text in r.named.items()}
    return method("repeat_interleave")(replace(r, named=named))


RULES = [
    # A conversion may leave a tensor in another order in memory than the unsplit one: `view` would refuse that one.
    OpRule("aten.view.default", reshape, reshaped("reshape"), linear=((0,),), is_view=True),
    OpRule("aten._unsafe_view.default", reshape, reshaped("reshape"), linear=((0,),), is_view=True),
    OpRule("aten.reshape.default", reshape, reshaped("reshape"), linear=((0,),), is_view=True, needs_order=True),
    OpRule("aten.flatten.using_ints", reshape, method("flatten"), linear=((0,),), is_view=True, needs_order=True),
    OpRule("aten.unflatten.int", reshape, reshaped("reshape"), linear=((0,),), is_view=True),
    OpRule("aten.unsqueeze.default", reshape, method("unsqueeze"), linear=((0,),), is_view=True),
    OpRule("aten.squeeze.dim", _squeeze, method("squeeze"), linear=((0,),), is_view=True),
    OpRule("aten.squeeze.default", reshape, reshaped("reshape"), linear=((0,),), is_view=True),
    OpRule("aten.squeeze.dims", reshape, reshaped("reshape"), linear=((0,),), is_view=True),
    OpRule("aten.transpose.int", _transpose, method("transpose"), linear=((0,),), is_view=True, permutes=True),
    OpRule("aten.permute.default", _permute, method("permute"), linear=((0,),), is_view=True, permutes=True),
    OpRule("aten.movedim.int", _movedim, method("movedim"), linear=((0,),), is_view=True, permutes=True),
    OpRule("aten.t.default", _t, method("t"), linear=((0,),), is_view=True, permutes=True),
    OpRule("aten.expand.default", _expand, reshaped("expand"), linear=((0,),), is_view=True),
    OpRule("aten.expand_as.default", _expand_as, reshaped("expand"), linear=((0,),), is_view=True),
    OpRule("aten.repeat.default", _repeat, method("repeat"), linear=((0,),)),
    OpRule("aten.repeat_interleave.self_int", _repeat_interleave, _render_repeat_interleave, linear=((0,),)),
]  # fmt: skip
