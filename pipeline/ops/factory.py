"""Ops that make a tensor out of constants."""

from __future__ import annotations

from pipeline.ops.rule import OpRule, call

RULES = [
    OpRule("aten.arange.default", "-> n^", call("torch.arange")),
    OpRule("aten.arange.start", "-> n^", call("torch.arange")),
]
