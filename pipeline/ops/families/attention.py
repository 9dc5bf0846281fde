"""Scaled dot-product attention as one op.

Shape letters: b batch, h heads (of keys and values), r queries' heads for each of them, q queries, k keys, e head dim
of queries and keys, v head dim of values.
"""

from __future__ import annotations

from pipeline.ops.rule import OpRule, OpView, apart, call


def _attention(view: OpView) -> str:
    """Batch, heads and queries may be split; under `is_causal` a query counts the keys before it, so queries stay.

    With fewer heads of keys than of queries, `(h r)`: an axis on h splits both; an axis on r splits the queries' heads
    inside each group, all ranks reading all keys. So more ranks than heads of keys are served exactly.
    """
    queries, keys, values = (t.shape for t in view.inputs[:3])
    shape = view.output.shape
    grouped = bool(view.constant(7, "enable_gqa", False)) and queries[-3] != keys[-3]
    batch = [f"b{i}" for i in range(len(shape) - 2)]
    query = "q^" if view.constant(5, "is_causal", False) else "q"
    if grouped:
        batch[-1] = "h"

    def leading(own: tuple[int, ...], heads: str = "") -> str:
        offset = len(shape) - len(own)
        names = [
            batch[offset + i] if size == shape[offset + i] and size > 1 else f"one{offset + i}^"
            for i, size in enumerate(own[:-2])
        ]
        return " ".join([*names[:-1], heads] if heads else names)

    whole = "(h r)" if grouped else ""
    tensors = [
        f"{leading(queries, whole)} {query} e^",
        f"{leading(keys, 'h' if grouped else '')} k^ e^",
        f"{leading(values, 'h' if grouped else '')} k^ v^",
    ]
    for mask in view.inputs[3:]:
        own = mask.shape
        padded = (1,) * (2 - len(own)) + own
        heads = whole if grouped and len(padded) > 2 and padded[-3] == shape[-3] else ""
        rows = query if padded[-2] == shape[-2] and padded[-2] > 1 else "onq^"
        columns = "k^" if padded[-1] == keys[-2] else "onk^"
        tensors.append(" ".join([leading(padded, heads), rows, columns][-len(own) if len(own) < 2 else 0 :]))
    return f"{', '.join(tensors)} -> {leading(shape, whole)} {query} v^"


def _body(view: OpView, letter: str) -> str:
    return "apart" if view.constant(4, "dropout_p", 0.0) else ""


def _form(view: OpView) -> str:
    return "causal" if view.constant(5, "is_causal", False) else ""


def _flops(view: OpView) -> float:
    queries, keys, values = view.inputs[:3]
    scores = float(queries.numel // queries.shape[-1] * keys.shape[-2])
    causal = 0.5 if _form(view) else 1.0
    return 2.0 * scores * (queries.shape[-1] + values.shape[-1]) * causal


def _row_sums(view: OpView) -> int:
    """The log of the softmax denominator of every query, in float32."""
    return 4 * (view.output.numel // view.output.shape[-1])


RULES = [
    OpRule(
        "aten.scaled_dot_product_attention.default", _attention, apart(call("F.scaled_dot_product_attention")),
        linear=((2,),), saves_inputs=(0, 1, 2), saves_output=True, extra_saved=_row_sums, flops=_flops,
        backward_factor=2.5, keeps_order=True, split_body=_body, random=True, form=_form,
    ),
]  # fmt: skip
