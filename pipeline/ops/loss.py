"""Reductions to the loss. A mean over a split dim divides by the true count of the whole step, not of the piece."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.ops.rule import OpRule, OpView, Rendered, call
from pipeline.ops.shapes import nothing_split

NONE, MEAN, SUM = 0, 1, 2
_REDUCTION = {"0": '"none"', "1": '"mean"', "2": '"sum"'}


def _cross_entropy(view: OpView) -> str:
    plain = len(view.inputs[0].shape) == 2 and len(view.inputs) == 2 and view.inputs[1].dtype.startswith("int")
    reduction = view.constant(3, "reduction", MEAN)
    if plain:
        return "n c^, n -> n" if reduction == NONE else "n+ c^, n+ ->"
    return nothing_split(view)


def _pointwise_loss(view: OpView) -> str:
    if view.inputs[0].shape != view.inputs[1].shape:
        return nothing_split(view)
    names = [f"d{i}" for i in range(len(view.inputs[0].shape))]
    if view.constant(2, "reduction", MEAN) == NONE:
        return f"{' '.join(names)}, {' '.join(names)} -> {' '.join(names)}"
    summed = " ".join(f"{n}+" for n in names)
    return f"{summed}, {summed} ->"


def _reduce_all(view: OpView) -> str:
    return f"{' '.join(f'd{i}+' for i in range(len(view.inputs[0].shape)))} ->"


def _mean_at(position: int) -> Callable[[OpView, str], str]:
    """The local form is a mean of the whole step where the op's reduction (at that position) is the mean."""
    return lambda view, letter: "mean" if view.constant(position, "reduction", MEAN) == MEAN else ""


def _render_cross_entropy(r: Rendered) -> str:
    """`aten` takes (logits, target, weight, reduction, ignore_index, label_smoothing)."""
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    given = {**dict(zip(names, r.positional[2:], strict=False)), **r.named}
    if "reduction" in given:
        given["reduction"] = _REDUCTION[given["reduction"]]
    if r.axis:
        given.pop("reduction", None)
        given.pop("weight", None)
        given["axis"] = f'"{r.axis}"'
    defaults = {"weight": "None", "ignore_index": "-100", "label_smoothing": "0.0", "reduction": '"mean"'}
    extra = "".join(f", {k}={v}" for k, v in given.items() if defaults.get(k) != v)
    function = "mean_cross_entropy" if r.axis else "F.cross_entropy"
    return f"{function}({r.tensors[0]}, {r.tensors[1]}{extra})"


def _render_mse(r: Rendered) -> str:
    reduction = r.named.get("reduction") or (r.positional[2] if len(r.positional) > 2 else "1")
    if r.axis:
        return f'mean_of_pieces(F.mse_loss({r.tensors[0]}, {r.tensors[1]}), axis="{r.axis}")'
    extra = "" if reduction == "1" else f", reduction={_REDUCTION[reduction]}"
    return f"F.mse_loss({r.tensors[0]}, {r.tensors[1]}{extra})"


def _render_mean(r: Rendered) -> str:
    text = call("torch.mean")(r)
    return f'mean_of_pieces({text}, axis="{r.axis}")' if r.axis else text


def _logits(view: OpView) -> int:
    """The log-softmax of the logits, kept for backward."""
    return view.inputs[0].nbytes


RULES = [
    OpRule(
        "aten.cross_entropy_loss.default", _cross_entropy, _render_cross_entropy,
        saves_inputs=(1,), extra_saved=_logits, split_body=_mean_at(3),
    ),
    OpRule(
        "aten.mse_loss.default", _pointwise_loss, _render_mse,
        saves_inputs=(0, 1), split_body=_mean_at(2),
    ),
    OpRule("aten.sum.default", _reduce_all, call("torch.sum"), linear=((0,),)),
    OpRule(
        "aten.mean.default", _reduce_all, _render_mean, linear=((0,),),
        split_body=lambda view, letter: "mean",
    ),
]  # fmt: skip
