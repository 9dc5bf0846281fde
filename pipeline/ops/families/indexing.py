"""Reading and writing elements by index: the indexed dims stay whole, the others follow the tensors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from shardwright.pipeline.ir.graph import Ref
from shardwright.pipeline.ops.rule import Linear, OpRule, OpView, Rendered, call
from shardwright.pipeline.ops.shapes import aligned, dim_of, letters, nothing_split


def _index(view: OpView) -> str:
    """(input, indices): index tensors broadcast to one run of dims, put where the first of them stood if together."""
    places = _indexed(view)
    if places is None:
        return nothing_split(view)
    shapes = [t.shape for t in view.inputs[1 : 1 + len(places)]]
    sizes = [max(own) for own in zip_longest(*(reversed(s) for s in shapes), fillvalue=0)][::-1]
    run = [f"i{i}" if size > 1 else f"j{i}^" for i, size in enumerate(sizes)]
    tensors = [" ".join(aligned(shape, sizes, run)) for shape in shapes]
    rank, at = len(view.inputs[0].shape), _run_at(places)
    rest = [f"d{i}" for i in range(rank) if i not in places]
    return f"{letters(rank, places)}, {', '.join(tensors)} -> {' '.join([*rest[:at], *run, *rest[at:]])}"


def _index_put(view: OpView) -> str:
    """(input, indices, values): where the values land decides, so only dims that no index names are split."""
    places = _indexed(view)
    if places is None:
        return nothing_split(view)
    whole, at = view.inputs[0].shape, _run_at(places)
    indices, values = view.inputs[1 : 1 + len(places)], view.inputs[1 + len(places)].shape
    rest = [(f"d{i}", size) for i, size in enumerate(whole) if i not in places]
    run = [(f"v{i}^", -1) for i in range(max(len(t.shape) for t in indices))]
    written = [*rest[:at], *run, *rest[at:]]
    own = written[len(written) - len(values) :]
    named = [
        x if size in (n, -1) and n > 1 else f"one{i}^" for i, ((x, size), n) in enumerate(zip(own, values, strict=True))
    ]
    fixed = [" ".join(f"f{n}d{i}^" for i in range(len(t.shape))) for n, t in enumerate(indices)]
    inside = letters(len(whole), places)
    return f"{inside}, {', '.join(fixed)}, {' '.join(named)} -> {inside}"


def _indexed(view: OpView) -> list[int] | None:
    """The dims that index tensors stand for; None where one is a mask, whose count is known to the values alone."""
    places = [i for i, item in enumerate(view.constant(1, "indices", ())) if isinstance(item, Ref)]
    kinds = view.inputs[1 : 1 + len(places)]
    return places if places and all(t.dtype.startswith("int") for t in kinds) else None


def _run_at(places: list[int]) -> int:
    """Where the dims of the index tensors stand among the others: in front unless they index dims side by side."""
    return places[0] if places == list(range(places[0], places[0] + len(places))) else 0


def _gather(view: OpView) -> str:
    """(input, dim, index): other dims pair up, where the index is as long as the input."""
    source, index = view.inputs[0].shape, view.inputs[1].shape
    dim = dim_of(view, 1)
    pairs = [i != dim and a == b for i, (a, b) in enumerate(zip(source, index, strict=True))]
    left = " ".join(f"d{i}" if same else f"s{i}^" for i, same in enumerate(pairs))
    # Along the gathered dim each index stands for itself: split there, the input is read whole.
    right = " ".join(f"d{i}" if same else (f"i{i}" if i == dim else f"i{i}^") for i, same in enumerate(pairs))
    return f"{left}, {right} -> {right}"


def _scatter(view: OpView) -> str:
    """(input, dim, index, source or value): dims pair up where all are as long as each other."""
    dim = dim_of(view, 1)
    shapes = [t.shape for t in view.inputs]
    rank = len(shapes[0])
    pairs = [i != dim and len({s[i] for s in shapes}) == 1 for i in range(rank)]
    tensors = [" ".join(f"d{i}" if pairs[i] else f"t{t}d{i}^" for i in range(rank)) for t in range(len(shapes))]
    return f"{', '.join(tensors)} -> {tensors[0]}"


def _index_select(view: OpView) -> str:
    dim, rank = dim_of(view, 1), len(view.inputs[0].shape)
    out = " ".join("i" if k == dim else f"d{k}" for k in range(rank))
    return f"{letters(rank, {dim})}, i -> {out}"


def _index_write(row: str) -> Callable[[OpView], str]:
    """(input, dim, index, source): `i+` where rows of the source may be split and each rank adds its own, else `i^`."""

    def dims(view: OpView) -> str:
        dim, rank = dim_of(view, 1), len(view.inputs[0].shape)
        source = " ".join(row if k == dim else f"d{k}" for k in range(rank))
        return f"{letters(rank, {dim})}, {row}, {source} -> {letters(rank, {dim})}"

    return dims


def _render_index(r: Rendered) -> str:
    """`x[a, :, b]`"""
    names = iter(r.tensors[1:])
    parts = [next(names) if isinstance(item, Ref) else ":" for item in r.view.constant(1, "indices", ())]
    return f"{r.tensors[0]}[{', '.join(parts)}]"


def _written(view: OpView) -> Linear:
    """Writing is linear in what is there and what is written, together."""
    return ((0, len(view.inputs) - 1),)


RULES = [
    OpRule("aten.index.Tensor", _index, _render_index, linear=((0,),)),
    OpRule("aten.index_put.default", _index_put, call("torch.index_put"), linear=_written),
    OpRule("aten.index_select.default", _index_select, call("torch.index_select"), linear=((0,),), saves_inputs=(1,)),
    OpRule("aten.index_add.default", _index_write("i+"), call("torch.index_add"), linear=((0, 2),), addends=(0,)),
    OpRule("aten.index_copy.default", _index_write("i^"), call("torch.index_copy"), linear=((0, 2),)),
    OpRule("aten.gather.default", _gather, call("torch.gather"), linear=((0,),), saves_inputs=(1,)),
    OpRule("aten.scatter.src", _scatter, call("torch.scatter"), linear=((0, 2),), saves_inputs=(1,)),
    OpRule("aten.scatter.value", _scatter, call("torch.scatter"), saves_inputs=(1,)),
    OpRule("aten.scatter_add.default", _scatter, call("torch.scatter_add"), linear=((0, 2),), saves_inputs=(1,)),
]
