"""Scaled dot-product attention as one op.

Shape letters: b batch, h heads (of keys and values), r queries' heads for each of them, q queries, k keys, e head dim
of queries and keys, v head dim of values.
"""

from __future__ import annotations

from shardwright.pipeline.ops.rule import OpRule, OpView, apart, call
from shardwright.pipeline.ops.shapes import aligned


def _attention(view: OpView) -> str:
    """Batch, heads and queries may be split; under `is_causal` a query counts the keys before it, so queries stay.

    With fewer heads of keys than of queries, `(h r)`: an axis on h splits both; an axis on r splits the queries' heads
    inside each group, all ranks reading all keys. So more ranks than heads of keys are served exactly.
    """
    queries, keys, values = (t.shape for t in view.inputs[:3])
    shape = view.output.shape
    grouped = bool(view.constant(7, "enable_gqa", False)) and queries[-3] != keys[-3]
    whole, shared = ("(h r)", "h") if grouped else ("", "")
    query = "q^" if _form(view) else "q"

    def leading(own: tuple[int, ...], heads: str = "") -> str:
        names = aligned(own[:-2], shape[:-2], [f"b{i}" for i in range(len(shape) - 2)])
        return " ".join([*names[:-1], heads] if heads else names)

    tensors = [
        f"{leading(queries, whole)} {query} e^",
        f"{leading(keys, shared)} k^ e^",
        f"{leading(values, shared)} k^ v^",
    ]
    for mask in view.inputs[3:]:
        own = mask.shape
        padded = (1,) * (2 - len(own)) + own
        heads = whole if len(padded) > 2 and padded[-3] == shape[-3] else ""
        rows = query if padded[-2] == shape[-2] and padded[-2] > 1 else "onq^"
        columns = "k^" if padded[-1] == keys[-2] else "onk^"
        tensors.append(" ".join([leading(padded, heads), rows, columns][-len(own) if len(own) < 2 else 0 :]))
    return f"{', '.join(tensors)} -> {leading(shape, whole)} {query} v^"


def _form(view: OpView) -> str:
    return "causal" if view.constant(5, "is_causal", False) else ""


def _flops(view: OpView) -> float:
    queries, keys, values = view.inputs[:3]
    scores = float(queries.numel // queries.shape[-1] * keys.shape[-2])
    causal = 0.5 if _form(view) else 1.0
    return 2.0 * scores * (queries.shape[-1] + values.shape[-1]) * causal


RULES = [
    OpRule(
        "aten.scaled_dot_product_attention.default", _attention, apart(call("F.scaled_dot_product_attention")),
        linear=((2,),), saves_inputs=(0, 1, 2), saves_output=True, flops=_flops, backward_factor=2.5, keeps_order=True,
        # The log of the softmax denominator of every query, in float32.
        extra_saved=lambda view: 4 * (view.output.numel // view.output.shape[-1]),
        split_body=lambda view, letter: "apart" if view.constant(4, "dropout_p", 0.0) else "", random=True, form=_form,
    ),
]  # fmt: skip
