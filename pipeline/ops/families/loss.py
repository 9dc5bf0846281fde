"""Losses. A mean over a split dim divides by the true count of the whole step, not of the shard."""

from __future__ import annotations

from shardwright.pipeline.ops.rule import OpRule, OpView, Rendered
from shardwright.pipeline.ops.shapes import nothing_split

NONE, MEAN, SUM = 0, 1, 2
_REDUCTION = {"0": '"none"', "1": '"mean"', "2": '"sum"'}
CROSS_ENTROPY = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")


def _cross_entropy(view: OpView) -> str:
    """(logits, target, weight, reduction, ...): rows sum; classes may be split where targets are indices."""
    logits, target = view.inputs[0].shape, view.inputs[1]
    if len(logits) < 2:
        return nothing_split(view)
    by_index = target.dtype.startswith("int")
    reduced = view.constant(3, "reduction", MEAN) != NONE
    mark = "+" if reduced else ""
    image = " ".join(f"i{i}{mark}" for i in range(len(logits) - 2))
    classes = "c!" if by_index else "c^"
    output = "" if reduced else f"n {image}"
    targets = f"n{mark} {image}" if by_index else f"n{mark} {classes} {image}"
    weight = ", w^" if len(view.inputs) > 2 else ""
    return f"n{mark} {classes} {image}, {targets}{weight} -> {output}"


def _cross_entropy_body(view: OpView, letter: str) -> str:
    if letter == "c":
        return "classes"
    return "mean" if view.constant(3, "reduction", MEAN) == MEAN else ""


def _render_cross_entropy(r: Rendered) -> str:
    given = r.given(CROSS_ENTROPY)
    reduction = _REDUCTION[given.pop("reduction", "1")]
    defaults = {"weight": "None", "ignore_index": "-100", "label_smoothing": "0.0", "reduction": '"mean"', "rows": ""}
    tensors = f"{given.pop('input')}, {given.pop('target')}"
    if classes := r.axes("classes"):
        function, options = "class_split_cross_entropy", {"axis": classes, "rows": r.axes("mean"), **given}
        whole, own = r.view.inputs[0].shape[1], r.local_inputs[0][1]
        options |= {"classes": str(whole)} if whole % own else {}
        options["reduction"] = reduction
    elif rows := r.axes("mean"):
        function, options = "mean_cross_entropy", {"axis": rows, **given}
    else:
        function, options = "F.cross_entropy", {**given, "reduction": reduction}
    extra = "".join(f", {k}={v}" for k, v in options.items() if defaults.get(k) != v)
    return f"{function}({tensors}{extra})"


def _count_targets(r: Rendered) -> str:
    """What a mean over a split batch divides by; if it were counted with the loss, ranks would wait."""
    given, rows = r.given(CROSS_ENTROPY), r.axes("mean")
    if not rows or given.get("weight", "None") != "None":
        return ""
    ignored = given.get("ignore_index", "-100")
    return f"count_targets({given['target']}, axis={rows}{'' if ignored == '-100' else f', ignore_index={ignored}'})"


def _pointwise(view: OpView) -> str:
    """Two tensors, and further ones of the same shape, compared element by element."""
    shape = view.inputs[0].shape
    if any(t.shape != shape for t in view.inputs):
        return nothing_split(view)
    mark = "" if view.output.shape == shape and shape else "+"
    names = " ".join(f"d{i}{mark}" for i in range(len(shape)))
    return f"{', '.join([names] * len(view.inputs))} -> {'' if mark else names}"


def _pointwise_rule(name: str, position: int, *further: str) -> OpRule:
    """`aten.name(input, target, ..., reduction, ...)` with the reduction at that position, as `F.name`."""
    names = ("input", "target", *further)

    def render(r: Rendered) -> str:
        given = r.given(names)
        reduction = _REDUCTION[given.pop("reduction", "1")]
        tensors = f"{given.pop('input')}, {given.pop('target')}"
        extra = "".join(f", {k}={v}" for k, v in given.items() if v != "None")
        extra += "" if reduction == '"mean"' else f", reduction={reduction}"
        text = f"F.{name}({tensors}{extra})"
        return f"mean_of_shards({text}, axis={r.axes('mean')})" if r.bodies else text

    def body(view: OpView, letter: str) -> str:
        return "mean" if view.constant(position, "reduction", MEAN) == MEAN else ""

    return OpRule(f"aten.{name}.default", _pointwise, render, saves_inputs=(0, 1), split_body=body)


def _nll(view: OpView) -> str:
    """(log-probabilities, target, weight, reduction, ignore_index); its mean is left whole."""
    if len(view.inputs[0].shape) < 2 or view.constant(3, "reduction", MEAN) == MEAN:
        return nothing_split(view)
    mark = "" if view.constant(3, "reduction", MEAN) == NONE else "+"
    image = " ".join(f"i{i}{mark}" for i in range(len(view.inputs[0].shape) - 2))
    weight = ", c^" if len(view.inputs) > 2 else ""
    return f"n{mark} c^ {image}, n{mark} {image}{weight} -> {'' if mark else f'n {image}'}"


def _render_nll(r: Rendered) -> str:
    given = r.given(CROSS_ENTROPY)
    given["reduction"] = _REDUCTION[given.get("reduction", "1")]
    tensors = f"{given.pop('input')}, {given.pop('target')}"
    return f"F.nll_loss({tensors}{''.join(f', {k}={v}' for k, v in given.items())})"


RULES = [
    OpRule(
        "aten.cross_entropy_loss.default", _cross_entropy, _render_cross_entropy,
        saves_inputs=(1,), split_body=_cross_entropy_body, early=_count_targets, early_inputs=(1,),
        extra_saved=lambda view: view.inputs[0].nbytes,  # the log-softmax of the logits
    ),
    OpRule("aten.nll_loss_nd.default", _nll, _render_nll, linear=((0,),), saves_inputs=(1,)),
    _pointwise_rule("mse_loss", 2, "reduction"),
    _pointwise_rule("l1_loss", 2, "reduction"),
    _pointwise_rule("smooth_l1_loss", 2, "reduction", "beta"),
    _pointwise_rule("huber_loss", 2, "reduction", "delta"),
    _pointwise_rule("binary_cross_entropy", 3, "weight", "reduction"),
    _pointwise_rule("binary_cross_entropy_with_logits", 4, "weight", "pos_weight", "reduction"),
]  # fmt: skip
