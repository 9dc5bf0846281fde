"""Element by element, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.pipeline.ops.public import public_call
from shardwright.pipeline.ops.rule import OpRule, OpView, Rendered, apart, call, drawn, infix, method
from shardwright.pipeline.ops.shapes import broadcast, letters, nothing_split


def _curve(name: str, function: str, *, by_output: bool = False) -> OpRule:
    """A non-linear function of one tensor, which backward needs its input or its output for."""
    return OpRule(
        f"aten.{name}", broadcast, _unless_more(call(function), 2) if name in FEWER else call(function),
        saves_inputs=() if by_output else (0, 1), saves_output=by_output, keeps_order=True,
        masks_gradient=name in MASKS,
    )  # fmt: skip


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


def _functions(module: str, names: str) -> dict[str, str]:
    """Ops, each by the function of its name."""
    return {name: f"{module}.{name.partition('.')[0]}" for name in names.split()}


CURVES = {
    **_functions("F", "gelu.default silu.default mish.default softplus.default elu.default leaky_relu.default"),
    **_functions("F", "hardswish.default hardsigmoid.default relu6.default"),
    "log_sigmoid.default": "F.logsigmoid",
    **_functions("torch", "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar log.default log1p.default log2.default"),
    **_functions("torch", "abs.default sin.default cos.default square.default erf.default atan2.default"),
    **_functions("torch", "maximum.default minimum.default max.other min.other"),
    **_functions("torch", "clamp.default clamp.Tensor clamp_min.default clamp_max.default"),
}
BY_OUTPUT = {
    "relu.default": "F.relu",
    **_functions("torch", "tanh.default sigmoid.default exp.default expm1.default rsqrt.default sqrt.default"),
    "reciprocal.default": "torch.reciprocal",
}
MASKS = {"relu.default"}
FEWER = {"elu.default"}  # whose function takes the first two arguments alone
STEPS = {  # functions whose gradient is zero or absent: comparisons, roundings, logic
    **_functions("torch", "eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor"),
    **_functions("torch", "gt.Scalar gt.Tensor ge.Scalar ge.Tensor logical_and.default logical_or.default"),
    **_functions("torch", "logical_not.default bitwise_and.Tensor bitwise_or.Tensor bitwise_not.default"),
    **_functions("torch", "floor.default ceil.default round.default sign.default floor_divide.default"),
    **_functions("torch", "remainder.Scalar remainder.Tensor isnan.default isinf.default"),
}

RULES = [
    *(
        OpRule(f"aten.{name}.Tensor", broadcast, infix(symbol, f"torch.{name}"), linear=((0, 1),), addends=(0, 1),
               keeps_order=True)
        for name, symbol in (("add", "+"), ("sub", "-"))
    ),
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
        # A quotient is linear above the line, and not where it is rounded.
        "aten.div.Tensor_mode", broadcast, call("torch.div"), saves_inputs=(0, 1), keeps_order=True,
        linear=lambda view: () if view.constant(9, "rounding_mode", None) else ((0,),),
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
        "aten.masked_fill.Scalar", broadcast, method("masked_fill"), saves_inputs=(1,),
        linear=lambda view: ((0,),) if view.constant(2, "value", 1) == 0 else (),
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
    *(OpRule(f"aten.{name}", broadcast, call(function), keeps_order=True) for name, function in STEPS.items()),
]  # fmt: skip
