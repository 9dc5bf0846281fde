"""Normalisation and softmax: the normalised dims are never split."""

from __future__ import annotations

from pipeline.ops.rule import OpRule, OpView, call
from pipeline.ops.shapes import nothing_split


def _layer_norm(view: OpView) -> str:
    count = len(view.constant(1, "normalized_shape", ()))
    names = " ".join(f"n{i}^" for i in range(count))
    return f"* {names}, {names}, {names} -> * {names}"


def _statistics(view: OpView) -> int:
    """Mean and reciprocal deviation of every row, in float32."""
    count = len(view.constant(1, "normalized_shape", ()))
    rows = 1
    for size in view.inputs[0].shape[: len(view.inputs[0].shape) - count]:
        rows *= size
    return 2 * 4 * rows


def _softmax(view: OpView) -> str:
    rank = len(view.output.shape)
    dim = view.constant(1, "dim", -1) % rank
    names = " ".join(f"d{i}" + ("^" if i == dim else "") for i in range(rank))
    return f"{names} -> {names}"


def _batch_statistics(view: OpView) -> int:
    """Mean and reciprocal deviation of every channel, in float32."""
    return 2 * 4 * view.inputs[0].shape[1]


RULES = [
    OpRule(
        "aten.batch_norm.default", nothing_split, call("batch_norm", drop=(8,)),
        saves_inputs=(0, 1), extra_saved=_batch_statistics, mutates=(3, 4),
    ),
    OpRule(
        "aten.layer_norm.default", _layer_norm, call("F.layer_norm", drop=(5,)),
        saves_inputs=(0, 1), extra_saved=_statistics,
    ),
    OpRule("aten.softmax.int", _softmax, call("torch.softmax"), saves_output=True),
    OpRule("aten.log_softmax.int", _softmax, call("torch.log_softmax"), saves_output=True),
]  # fmt: skip
