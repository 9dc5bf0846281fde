"""Normalisation and softmax: the normalised dims are never split."""

from __future__ import annotations

from pipeline.ops.rule import OpRule, OpView, call


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


RULES = [
    OpRule(
        "aten.layer_norm.default", _layer_norm, call("F.layer_norm", drop=(5,)),
        saves_inputs=(0, 1), extra_saved=_statistics,
    ),
    OpRule("aten.softmax.int", _softmax, call("torch.softmax"), saves_output=True),
    OpRule("aten.log_softmax.int", _softmax, call("torch.log_softmax"), saves_output=True),
]  # fmt: skip
