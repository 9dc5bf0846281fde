"""Ops that make a tensor out of constants."""

from __future__ import annotations

from pipeline.ops.rule import OpRule, OpView, call


def _constant(view: OpView) -> str:
    return "-> " + " ".join(f"d{i}^" for i in range(len(view.output.shape)))


RULES = [
    OpRule("shardwright.tensor.default", _constant, call("torch.tensor")),
    OpRule("aten.arange.default", "-> n^", call("torch.arange")),
    OpRule("aten.arange.start", "-> n^", call("torch.arange")),
]
