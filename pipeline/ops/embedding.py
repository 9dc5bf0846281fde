"""Rows of a table by index."""

from __future__ import annotations

from pipeline.ops.rule import OpRule, OpView, Rendered


def _embedding(view: OpView) -> str:
    """Where gradients are divided by how often an index occurs, the indices stay whole: a piece has other counts."""
    if view.constant(3, "scale_grad_by_freq", False):
        indices = " ".join(f"i{n}^" for n in range(len(view.inputs[1].shape)))
        return f"v^ h, {indices} -> {indices} h"
    return "v^ h, * -> * h"


def _render(r: Rendered) -> str:
    padding = r.named.get("padding_idx") or (r.positional[2] if len(r.positional) > 2 else "-1")
    by_count = r.named.get("scale_grad_by_freq") or (r.positional[3] if len(r.positional) > 3 else "False")
    extra = "" if padding == "-1" else f", padding_idx={padding}"
    extra += "" if by_count == "False" else ", scale_grad_by_freq=True"
    return f"F.embedding({r.tensors[1]}, {r.tensors[0]}{extra})"


RULES = [
    OpRule("aten.embedding.default", _embedding, _render, linear=((0,),), saves_inputs=(1,)),
]
