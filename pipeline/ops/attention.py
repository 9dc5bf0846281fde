"""Scaled dot-product attention as one op.

Shape letters: b batch, h heads (of keys and values), r queries' heads for each of them, q queries, k keys, e head dim
of queries and keys, v head dim of values.
"""

from __future__ import annotations

from pipeline.ops.rule import OpRule, OpView, call
from pipeline.ops.shapes import nothing_split


def _attention(view: OpView) -> str:
    """Batch and heads may be split; a mask or dropout needs care that this rule does not take yet."""
    if view.constant(7, "enable_gqa", False) and len(view.inputs) == 3 and view.constant(4, "dropout_p", 0.0) == 0.0:
        return "b (h r) q^ e^, b h k^ e^, b h k^ v^ -> b (h r) q^ v^"
    plain = len(view.inputs) == 3 and len(view.output.shape) == 4 and view.constant(4, "dropout_p", 0.0) == 0.0
    if plain and view.inputs[0].shape[:2] == view.inputs[1].shape[:2] == view.inputs[2].shape[:2]:
        return "b h q^ e^, b h k^ e^, b h k^ v^ -> b h q^ v^"
    return nothing_split(view)


def _flops(view: OpView) -> float:
    queries, keys, values = view.inputs[:3]
    scores = float(queries.numel // queries.shape[-1] * keys.shape[-2])
    causal = 0.5 if view.constant(5, "is_causal", False) else 1.0
    return 2.0 * scores * (queries.shape[-1] + values.shape[-1]) * causal


def _row_sums(view: OpView) -> int:
    """The log of the softmax denominator of every query, in float32."""
    return 4 * (view.output.numel // view.output.shape[-1])


RULES = [
    OpRule(
        "aten.scaled_dot_product_attention.default", _attention, call("F.scaled_dot_product_attention"),
        saves_inputs=(0, 1, 2), saves_output=True, extra_saved=_row_sums, flops=_flops, backward_factor=2.5,
        keeps_order=True,
    ),
]  # fmt: skip
