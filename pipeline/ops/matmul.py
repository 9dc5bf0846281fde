"""Products that contract a dim."""

from __future__ import annotations

from pipeline.ops.rule import OpRule, OpView, call
from pipeline.ops.shapes import nothing_split


def _linear_flops(view: OpView) -> float:
    return 2.0 * view.inputs[0].numel * view.inputs[1].shape[0]


def _product_flops(view: OpView) -> float:
    return 2.0 * view.output.numel * view.inputs[0].shape[-1]


def _matmul(view: OpView) -> str:
    """`matmul` of two tensors of equal rank, batch dims equal; other forms are not split."""
    a, b = view.inputs
    if len(a.shape) == len(b.shape) >= 2 and a.shape[:-2] == b.shape[:-2]:
        return "* m k+, * k+ n -> * m n"
    if len(a.shape) >= 2 and len(b.shape) == 2:
        return "* k+, k+ n -> * n"
    return nothing_split(view)


RULES = [
    OpRule(
        "aten.linear.default", "* k+, n k+, n -> * n", call("F.linear"),
        linear=((0,), (1,)), addends=(2,), saves_inputs=(0, 1), crosswise=True, flops=_linear_flops,
    ),
    OpRule(
        "aten.mm.default", "m k+, k+ n -> m n", call("torch.mm"),
        linear=((0,), (1,)), saves_inputs=(0, 1), crosswise=True, flops=_product_flops,
    ),
    OpRule(
        "aten.bmm.default", "b m k+, b k+ n -> b m n", call("torch.bmm"),
        linear=((0,), (1,)), saves_inputs=(0, 1), crosswise=True, flops=_product_flops,
    ),
    OpRule(
        "aten.matmul.default", _matmul, call("torch.matmul"),
        linear=((0,), (1,)), saves_inputs=(0, 1), crosswise=True, flops=_product_flops,
    ),
]  # fmt: skip
