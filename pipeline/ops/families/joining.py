"""Ops that put tensors together or take shards of them, along dims that then stay whole."""

from __future__ import annotations

from shardwright.pipeline.ops.rule import Linear, OpRule, OpView, Rendered, call, method
from shardwright.pipeline.ops.shapes import along, along_last, dim_of, kept, letters, nothing_split, without


def _together(view: OpView) -> Linear:
    return (tuple(range(len(view.inputs))),)


def _cat(view: OpView) -> str:
    """An empty one-dim tensor among the others is allowed by torch, and not split."""
    if any(len(t.shape) != len(view.output.shape) for t in view.inputs):
        return nothing_split(view)
    return kept(view, {dim_of(view, 1)})


def _stack(view: OpView) -> str:
    rank = len(view.output.shape)
    new = dim_of(view, 1, rank=rank)
    inside = letters(rank - 1).split()
    outside = " ".join([*inside[:new], "new^", *inside[new:]])
    return f"{', '.join([' '.join(inside)] * len(view.inputs))} -> {outside}"


def _split(view: OpView) -> str:
    """Equal parts of a dim, `(t n) -> n, n, n`: splitting n splits every part (the heads of a fused projection)."""
    dim = dim_of(view, 2)
    if len({t.shape[dim] for t in view.outputs}) > 1:
        return kept(view, {dim})
    names = letters(len(view.inputs[0].shape)).split()
    inside = " ".join(f"(t^ {x})" if i == dim else x for i, x in enumerate(names))
    return f"{inside} -> {', '.join([' '.join(names)] * len(view.outputs))}"


def _render_split(r: Rendered) -> str:
    """The sizes of the parts are those on this rank."""
    dim = dim_of(r.view, 2)
    sizes = [shape[dim] for shape in r.local_outputs]
    whole = r.local_inputs[0][dim] % sizes[0] == 0 and len(set(sizes)) == 1
    return f"{r.tensors[0]}.split({sizes[0] if whole else tuple(sizes)}, {dim})"


def _select(view: OpView) -> str:
    """One index of a dim, or each of them: that dim is gone."""
    rank, dim = len(view.inputs[0].shape), dim_of(view, 1)
    return f"{letters(rank, {dim})} -> {', '.join([without(rank, dim)] * len(view.outputs))}"


def _strided(view: OpView) -> str:
    """(input, dim, start, end, step): one of every `step` rows, `(d s) -> d`, may be split; a range may not."""
    rank, dim = len(view.output.shape), dim_of(view, 1)
    size = view.inputs[0].shape[dim]
    start, end, step = view.constant(2, "start", 0) or 0, view.constant(3, "end", None), view.constant(4, "step", 1)
    if step == 1 or not 0 <= start < step or size % step or (end is not None and end < size):
        return kept(view, {dim})
    inside = " ".join(f"(d{i} s={step}^)" if i == dim else f"d{i}" for i in range(rank))
    return f"{inside} -> {letters(rank)}"


def _render_slice(r: Rendered) -> str:
    """`x[:, 1:]`, `x[..., :8]`, `x[::2]`: of this rank's shard, which is whole where the range is not."""
    rank, dim = len(r.local_output), dim_of(r.view, 1)
    size = r.view.inputs[0].shape[dim]
    start, end = r.view.constant(2, "start", None), r.view.constant(3, "end", None)
    step = r.view.constant(4, "step", 1)
    first, last = start or "", end if end is not None and end < size else ""
    bounds = f"{first}:{last}{f':{step}' if step != 1 else ''}"
    before = ["..."] if rank > 2 and dim == rank - 1 else [":"] * dim
    return f"{r.tensors[0]}[{', '.join([*before, bounds])}]"


def _select_scatter(view: OpView) -> str:
    rank, dim = len(view.inputs[0].shape), dim_of(view, 2)
    return f"{letters(rank, {dim})}, {without(rank, dim)} -> {letters(rank, {dim})}"


def _roll(view: OpView) -> str:
    """Without dims the tensor is rolled as one row of numbers."""
    return along(2, None, "dims")(view) if view.constant(2, "dims", ()) else nothing_split(view)


def _pad(view: OpView) -> str:
    """`pad` lists (before, after) from the last dim on; only dims that it changes stay whole."""
    rank = len(view.output.shape)
    return kept(view, {rank - 1 - i // 2 for i, width in enumerate(view.constant(1, "pad", ())) if width})


def _pads_zeros(view: OpView) -> Linear:
    if view.op.target == "aten.pad.default":
        constant = view.constant(2, "mode", "constant") == "constant"
        return () if constant and view.constant(3, "value", None) else ((0,),)
    return () if view.constant(2, "value", 0) else ((0,),)


RULES = [
    OpRule("aten.cat.default", _cat, call("torch.cat"), linear=_together),
    OpRule("aten.stack.default", _stack, call("torch.stack"), linear=_together),
    OpRule("aten.split.Tensor", _split, _render_split, linear=((0,),), is_view=True),
    OpRule("aten.split_with_sizes.default", _split, _render_split, linear=((0,),), is_view=True),
    OpRule("aten.chunk.default", _split, method("chunk"), linear=((0,),), is_view=True),
    OpRule("aten.unbind.int", _select, method("unbind"), linear=((0,),), is_view=True),
    OpRule("aten.slice.Tensor", _strided, _render_slice, linear=((0,),), is_view=True),
    OpRule("aten.narrow.default", along(1), method("narrow"), linear=((0,),), is_view=True),
    OpRule("aten.select.int", _select, method("select"), linear=((0,),), is_view=True),
    OpRule("aten.slice_scatter.default", along(2), call("torch.slice_scatter"), linear=((0, 1),)),
    OpRule("aten.select_scatter.default", _select_scatter, call("torch.select_scatter"), linear=((0, 1),)),
    OpRule("aten.roll.default", _roll, call("torch.roll"), linear=((0,),)),
    OpRule("aten.flip.default", along(1, (), "dims"), call("torch.flip"), linear=((0,),)),
    OpRule("aten.pad.default", _pad, call("F.pad"), linear=_pads_zeros),
    OpRule("aten.constant_pad_nd.default", _pad, call("torch.constant_pad_nd"), linear=_pads_zeros),
    OpRule("aten.tril.default", along_last(2), call("torch.tril"), linear=((0,),)),
    OpRule("aten.triu.default", along_last(2), call("torch.triu"), linear=((0,),)),
]
