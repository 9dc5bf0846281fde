"""The table itself: every rule of every family file, by op."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, TypedDict, Unpack

from shardwright.pipeline.ir.graph import Op
from shardwright.pipeline.ops.dims import check_line
from shardwright.pipeline.ops.public import public_call
from shardwright.pipeline.ops.rule import Dims, Flops, Linear, OpRule, Rendered

FAMILIES = (
    "attention", "complex_numbers", "convolution", "elementwise", "embedding", "factory", "indexing", "joining", "loss",
    "matmul", "norm", "pooling", "recurrent", "reduction", "views",
)  # fmt: skip


@cache
def table() -> dict[str, OpRule]:
    rules: dict[str, OpRule] = {}
    for family in FAMILIES:
        for rule in importlib.import_module(f"shardwright.pipeline.ops.families.{family}").RULES:
            if rule.target in rules:
                raise ValueError(f"{rule.target} has two rules; keep one")
            rules[rule.target] = rule
    return rules


def rule_of(op: Op) -> OpRule | None:
    """The table's rule, or the user's; None leaves the op to discovery."""
    return table().get(op.target) or _own.get(op.target)


class RuleSettings(TypedDict, total=False):
    """What `register` takes beside the dims, as `OpRule` has them."""

    linear: Linear
    addends: tuple[int, ...]
    flops: Flops
    backward_factor: float
    saves_inputs: tuple[int, ...]
    saves_output: bool
    render: Callable[[Rendered], str]


def register(target: str, dims: Dims, **settings: Unpack[RuleSettings]) -> None:
    """Adds a rule for an op of the user's own, such as `register("mylib.scale.default", "b n, n -> b n")`.

    Without more it is priced as moving its tensors and as keeping all of them for backward: docs/how-to-add-an-op.md.
    """
    if len(target.split(".")) != 3 or not all(part.isidentifier() for part in target.split(".")):
        raise ValueError(f"{target!r} is not the name of an op: use `library.op.overload`, such as mylib.scale.default")
    if target in table():
        raise ValueError(f"{target} has a rule already, in pipeline/ops")
    if isinstance(dims, str):
        check_line(dims)
    asked: dict[str, Any] = {"render": public_call, "saves_inputs": _ALL, "saves_output": True, **settings}
    _own[target] = OpRule(target, dims, **asked)


def own_rules() -> dict[str, OpRule]:
    """The rules that were registered."""
    return dict(_own)


def forget(target: str) -> None:
    _own.pop(target, None)


_own: dict[str, OpRule] = {}
_ALL = tuple(range(64))  # inputs beyond those an op has are not looked at
