"""Element by element, with broadcasting."""

from __future__ import annotations

from pipeline.ops.rule import OpRule, call, infix, method
from pipeline.ops.shapes import broadcast


def _curve(name: str, function: str, *, by_output: bool = False) -> OpRule:
    """A non-linear function of one tensor, which backward needs its input or its output for."""
    saves = () if by_output else (0,)
    return OpRule(
        f"aten.{name}.default", broadcast, call(function),
        saves_inputs=saves, saves_output=by_output, keeps_order=True,
    )  # fmt: skip


RULES = [
    OpRule(
        "aten.add.Tensor", broadcast, infix("+", "torch.add"), linear=((0, 1),), addends=(0, 1), keeps_order=True,
    ),
    OpRule(
        "aten.sub.Tensor", broadcast, infix("-", "torch.sub"), linear=((0, 1),), addends=(0, 1), keeps_order=True,
    ),
    OpRule(
        "aten.mul.Tensor", broadcast, infix("*", "torch.mul"),
        linear=((0,), (1,)), saves_inputs=(0, 1), crosswise=True, keeps_order=True,
    ),
    OpRule(
        "aten.div.Tensor", broadcast, infix("/", "torch.div"),
        linear=((0,),), saves_inputs=(0, 1), crosswise=True, keeps_order=True,
    ),
    OpRule("aten.neg.default", broadcast, call("torch.neg"), linear=((0,),), keeps_order=True),
    OpRule("aten.to.dtype", broadcast, method("to"), linear=((0,),)),
    OpRule("aten.contiguous.default", broadcast, method("contiguous"), linear=((0,),), is_view=True, needs_order=True),
    OpRule("aten.clone.default", broadcast, method("clone"), linear=((0,),)),
    _curve("gelu", "F.gelu"),
    _curve("silu", "F.silu"),
    _curve("relu", "F.relu", by_output=True),
    _curve("tanh", "torch.tanh", by_output=True),
    _curve("sigmoid", "torch.sigmoid", by_output=True),
    _curve("exp", "torch.exp", by_output=True),
]  # fmt: skip
