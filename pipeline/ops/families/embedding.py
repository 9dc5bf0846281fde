"""Rows of a table by index, one by one or added up in bags."""

from __future__ import annotations

from shardwright.pipeline.ops.own_names import EMBEDDING_BAG, MODES
from shardwright.pipeline.ops.rule import Linear, OpRule, OpView, Rendered, Sent


def _embedding(view: OpView) -> str:
    """The table's rows (the vocabulary) may be split: each rank looks up its own.

    Where gradients are divided by how often an index occurs, the indices stay whole: a shard has other counts.
    """
    if view.constant(3, "scale_grad_by_freq", False):
        indices = " ".join(f"i{n}^" for n in range(len(view.inputs[1].shape)))
        return f"v^ h, {indices} -> {indices} h"
    return "v+ h, * -> * h"


def _render(r: Rendered) -> str:
    given = r.given(("weight", "indices", "padding_idx", "scale_grad_by_freq"))
    extra = "" if given.get("padding_idx", "-1") == "-1" else f", padding_idx={given['padding_idx']}"
    extra += "" if given.get("scale_grad_by_freq", "False") == "False" else ", scale_grad_by_freq=True"
    if r.bodies:
        whole, own = r.view.inputs[0].shape[0], r.local_inputs[0][0]
        extra += f", rows={whole}" if whole % own else ""
        return f"row_split_embedding({r.tensors[1]}, {r.tensors[0]}, axis={r.axes('rows')}{extra})"
    return f"F.embedding({r.tensors[1]}, {r.tensors[0]}{extra})"


def _mode(view: OpView) -> str:
    return MODES[int(view.constant(3, "mode", 0))]


def _bag(view: OpView) -> str:
    """(table, indices, offsets, mode, weights of the samples, ...): a row of two-dim indices is a bag.

    Rows of the table may be split: sums add up, and of the largest the ranks tell each other. Where offsets say which
    bag an index belongs to, the indices stay whole; so they do where gradients are divided by how often one occurs.
    """
    flat = view.constant(2, "offsets", None) is not None
    counted = view.constant(7, "scale_grad_by_freq", False)
    table = "v^ h" if counted else "v! h" if _mode(view) == "max" else "v+ h"
    bags = "b^" if flat or counted else "b"
    place = "s+" if _mode(view) == "sum" and not counted else "s^"
    indices = "n^" if flat else f"{bags} {place}"
    given = [table, indices, *(["o^"] if flat else []), *([indices] if _is_weighted(view) else [])]
    return f"{', '.join(given)} -> {bags} h"


def _is_weighted(view: OpView) -> bool:
    return view.constant(4, "per_sample_weights", None) is not None


def _bag_linear(view: OpView) -> Linear:
    """In the table, and in the weights of the samples; a largest is neither."""
    groups = ((0,), *(((len(view.inputs) - 1,),) if _is_weighted(view) else ()))
    return () if _mode(view) == "max" else groups


def _bag_numbers(view: OpView) -> int:
    """The bag of each index, the size of each bag, and of the largest which row they are of; all 8 bytes."""
    largest = view.output.numel if _mode(view) == "max" else view.output.shape[0]
    return 8 * (view.inputs[1].numel + view.output.shape[0] + largest)


def _bag_talks(view: OpView) -> tuple[Sent, Sent]:
    """Of each largest its value and its place, where the rows of the table are split."""
    sent = view.output.nbytes + 8 * view.output.numel if _mode(view) == "max" else 0
    return ("all_reduce", sent), ("all_reduce", 0)


def _render_bag(r: Rendered) -> str:
    names = ("weight", "indices", "offsets", "mode", "per_sample_weights", "include_last_offset", "padding_idx")
    given = r.given((*names, "scale_grad_by_freq"))
    tensors = f"{given.pop('indices')}, {given.pop('weight')}"
    mode = f'"{_mode(r.view)}"'
    axis = {"axis": r.axes("rows")} if r.bodies else {}
    options = {**axis, **given, "mode": mode}
    if r.bodies and (whole := r.view.inputs[0].shape[0]) % r.local_inputs[0][0]:
        options["rows"] = str(whole)
    told = "".join(f", {name}={text}" for name, text in options.items() if text not in ("None", "False"))
    return f"{'row_split_embedding_bag' if r.bodies else 'F.embedding_bag'}({tensors}{told})"


RULES = [
    OpRule(
        EMBEDDING_BAG, _bag, _render_bag, linear=_bag_linear, saves_inputs=(0, 1, 2, 3), extra_saved=_bag_numbers,
        split_body=lambda view, letter: "rows" if letter == "v" else "", talks=_bag_talks,
    ),
    OpRule(
        "aten.embedding.default", _embedding, _render, linear=((0,),), saves_inputs=(1,),
        split_body=lambda view, letter: "rows" if letter == "v" else "",
    ),
]  # fmt: skip
