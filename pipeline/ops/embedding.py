"""Rows of a table by index."""

from __future__ import annotations

from pipeline.ops.rule import OpRule, Rendered


def _render(r: Rendered) -> str:
    padding = r.named.get("padding_idx") or (r.positional[2] if len(r.positional) > 2 else "-1")
    extra = "" if padding == "-1" else f", padding_idx={padding}"
    return f"F.embedding({r.tensors[1]}, {r.tensors[0]}{extra})"


RULES = [
    OpRule("aten.embedding.default", "v^ h, * -> * h", _render, linear=((0,),), saves_inputs=(1,)),
]
