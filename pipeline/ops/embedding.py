"""Rows of a table by index."""

from __future__ import annotations

from pipeline.ops.rule import OpRule, OpView, Rendered


def _embedding(view: OpView) -> str:
    """The table's rows (the vocabulary) may be split: each rank looks up its own.

    Where gradients are divided by how often an index occurs, the indices stay whole: a piece has other counts.
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


RULES = [
    OpRule(
        "aten.embedding.default", _embedding, _render, linear=((0,),), saves_inputs=(1,),
        split_body=lambda view, letter: "rows" if letter == "v" else "",
    ),
]  # fmt: skip
