"""Element by element, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipeline.ops.public import public_call
from pipeline.ops.rule import Linear, OpRule, OpView, Rendered, apart, call, drawn, infix, method
from pipeline.ops.shapes import broadcast, letters, nothing_split


def _curve(name: str, function: str, *, by_output: bool = False) -> OpRule:
    """A non-linear function of one tensor, which backward needs its input or its output for."""
    saves = () if by_output else (0,)
    render = _unless_more(call(function), 2) if name in FEWER else call(function)
    return OpRule(
        f"aten.{name}", broadcast, render, saves_inputs=saves, saves_output=by_output, keeps_order=True,
        masks_gradient=name in MASKS,
    )  # fmt: skip


def _step(name: str, function: str) -> OpRule:
    """A function whose gradient is zero or absent: comparisons, roundings, logic."""
    return OpRule(f"aten.{name}", broadcast, call(function), keeps_order=True)


def _if_zero(position: int, name: str) -> Callable[[OpView], Linear]:
    """Linear where what is filled in is nothing."""
    return lambda view: ((0,),) if view.constant(position, name, 1) == 0 else ()


def _added(name: str, symbol: str, function: str) -> OpRule:
    return OpRule(
        f"aten.{name}", broadcast, infix(symbol, function), linear=((0, 1),), addends=(0, 1), keeps_order=True
    )


def _first_only(view: OpView) -> Linear:
    """A quotient is linear above the line, and not where it is rounded."""
    return () if view.constant(9, "rounding_mode", None) else ((0,),)


def _as_the_other(view: OpView) -> str:
    """Only the type of the second tensor is read."""
    names = letters(len(view.inputs[0].shape))
    return f"{names}, {' '.join(f'o{i}^' for i in range(len(view.inputs[1].shape)))} -> {names}"


def _render_to(r: Rendered) -> str:
    """`x.to(dtype=..., device=...)`: a tensor's method knows of no other layout than the usual."""
    return method("to")(replace(r, named={name: text for name, text in r.named.items() if name != "layout"}))


def _unless_more(render: Callable[[Rendered], str], most: int) -> Callable[[Rendered], str]:
    """Prints the call that a reader knows, which takes so many arguments; with more, whatever takes them all."""
    return lambda r: render(r) if len(r.positional) <= most else public_call(r)


CURVES = {
    "gelu.default": "F.gelu", "silu.default": "F.silu", "mish.default": "F.mish", "softplus.default": "F.softplus",
    "elu.default": "F.elu", "leaky_relu.default": "F.leaky_relu", "hardswish.default": "F.hardswish",
    "hardsigmoid.default": "F.hardsigmoid", "relu6.default": "F.relu6", "log_sigmoid.default": "F.logsigmoid",
    "pow.Tensor_Scalar": "torch.pow", "pow.Tensor_Tensor": "torch.pow", "pow.Scalar": "torch.pow",
    "log.default": "torch.log", "log1p.default": "torch.log1p", "log2.default": "torch.log2",
    "abs.default": "torch.abs", "sin.default": "torch.sin", "cos.default": "torch.cos",
    "square.default": "torch.square", "erf.default": "torch.erf",
    "atan2.default": "torch.atan2", "maximum.default": "torch.maximum", "minimum.default": "torch.minimum",
    "max.other": "torch.max", "min.other": "torch.min", "clamp.default": "torch.clamp", "clamp.Tensor": "torch.clamp",
    "clamp_min.default": "torch.clamp_min", "clamp_max.default": "torch.clamp_max",
}  # fmt: skip
BY_OUTPUT = {
    "relu.default": "F.relu", "tanh.default": "torch.tanh", "sigmoid.default": "torch.sigmoid",
    "exp.default": "torch.exp", "expm1.default": "torch.expm1", "rsqrt.default": "torch.rsqrt",
    "sqrt.default": "torch.sqrt", "reciprocal.default": "torch.reciprocal",
}  # fmt: skip
MASKS = {"relu.default"}
FEWER = {"elu.default"}  # whose function takes the first two arguments alone
STEPS = {
    "eq.Scalar": "torch.eq", "eq.Tensor": "torch.eq", "ne.Scalar": "torch.ne", "ne.Tensor": "torch.ne",
    "lt.Scalar": "torch.lt", "lt.Tensor": "torch.lt", "le.Scalar": "torch.le", "le.Tensor": "torch.le",
    "gt.Scalar": "torch.gt", "gt.Tensor": "torch.gt", "ge.Scalar": "torch.ge", "ge.Tensor": "torch.ge",
    "logical_and.default": "torch.logical_and", "logical_or.default": "torch.logical_or",
    "logical_not.default": "torch.logical_not", "bitwise_and.Tensor": "torch.bitwise_and",
    "bitwise_or.Tensor": "torch.bitwise_or", "bitwise_not.default": "torch.bitwise_not", "floor.default": "torch.floor",
    "ceil.default": "torch.ceil", "round.default": "torch.round", "sign.default": "torch.sign",
    "floor_divide.default": "torch.floor_divide", "remainder.Scalar": "torch.remainder",
    "remainder.Tensor": "torch.remainder", "isnan.default": "torch.isnan", "isinf.default": "torch.isinf",
}  # fmt: skip

RULES = [
    _added("add.Tensor", "+", "torch.add"),
    _added("sub.Tensor", "-", "torch.sub"),
    OpRule("aten.rsub.Scalar", broadcast, call("torch.rsub"), keeps_order=True),
    OpRule("aten.add.Scalar", broadcast, _unless_more(infix("+", "torch.add"), 2), keeps_order=True),
    OpRule("aten.mul.Scalar", broadcast, infix("*", "torch.mul"), linear=((0,),), keeps_order=True),
    OpRule(
        "aten.mul.Tensor", broadcast, infix("*", "torch.mul"),
        linear=((0,), (1,)), saves_inputs=(0, 1), crosswise=True, keeps_order=True,
    ),
    OpRule(
        "aten.div.Tensor", broadcast, infix("/", "torch.div"),
        linear=((0,),), saves_inputs=(0, 1), crosswise=True, keeps_order=True,
    ),
    OpRule(
        "aten.div.Tensor_mode", broadcast, call("torch.div"), linear=_first_only, saves_inputs=(0, 1), keeps_order=True,
    ),
    OpRule("aten.neg.default", broadcast, call("torch.neg"), linear=((0,),), keeps_order=True),
    OpRule("aten.to.dtype", broadcast, method("to"), linear=((0,),)),
    OpRule("aten.to.device", broadcast, method("to"), linear=((0,),)),
    OpRule("aten.to.dtype_layout", broadcast, _render_to, linear=((0,),)),
    OpRule("aten.to.other", _as_the_other, method("to"), linear=((0,),)),
    OpRule("aten._to_copy.default", broadcast, _render_to, linear=((0,),)),
    OpRule("aten.type_as.default", _as_the_other, method("type_as"), linear=((0,),)),
    OpRule("aten.contiguous.default", broadcast, method("contiguous"), linear=((0,),), is_view=True, needs_order=True),
    OpRule("aten.clone.default", broadcast, method("clone"), linear=((0,),)),
    OpRule("aten.detach.default", broadcast, method("detach"), linear=((0,),), is_view=True),
    OpRule("aten.where.self", broadcast, call("torch.where"), linear=((1, 2),), addends=(1, 2), saves_inputs=(0,)),
    OpRule("aten.where.ScalarOther", broadcast, call("torch.where"), saves_inputs=(0,)),
    OpRule("aten.where.ScalarSelf", broadcast, call("torch.where"), saves_inputs=(0,)),
    OpRule("aten.where.Scalar", broadcast, call("torch.where")),
    OpRule(
        "aten.masked_fill.Scalar", broadcast, method("masked_fill"),
        linear=_if_zero(2, "value"), saves_inputs=(1,),
    ),
    OpRule("aten.masked_fill.Tensor", broadcast, method("masked_fill"), saves_inputs=(1,)),
    OpRule("aten.fill.Scalar", broadcast, call("torch.fill")),
    OpRule("aten.fill.Tensor", broadcast, call("torch.fill"), linear=((1,),)),
    OpRule("aten.lerp.Scalar", broadcast, call("torch.lerp"), linear=((0, 1),), addends=(0, 1)),
    OpRule("aten.addcmul.default", broadcast, call("torch.addcmul"), saves_inputs=(1, 2)),
    OpRule(
        "aten.dropout.default", broadcast, apart(call("F.dropout")), linear=((0,),),
        extra_saved=lambda view: view.output.numel, split_body=drawn, random=True, keeps_order=True,
    ),
    # It changes a buffer, which lies whole on every rank.
    OpRule("aten.add_.Tensor", nothing_split, method("add_")),
    *(_curve(name, function) for name, function in CURVES.items()),
    *(_curve(name, function, by_output=True) for name, function in BY_OUTPUT.items()),
    *(_step(name, function) for name, function in STEPS.items()),
]  # fmt: skip
