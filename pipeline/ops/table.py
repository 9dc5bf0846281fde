"""The table itself: every rule of every family file, by op."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import pipeline.ops
from pipeline.ir.graph import Op
from pipeline.ops.rule import OpRule



@cache
def table() -> dict[str, OpRule]:
    rules: dict[str, OpRule] = {}
    for module in pkgutil.iter_modules(pipeline.ops.__path__):
        family = importlib.import_module(f"pipeline.ops.{module.name}")
        for rule in getattr(family, "RULES", ()):
            if rule.target in rules:
                raise ValueError(f"{rule.target} has two rules; keep one")
            rules[rule.target] = rule
    return rules


def rule_of(op: Op) -> OpRule | None:
    return table().get(op.target)
