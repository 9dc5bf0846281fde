"""Normalisation and softmax: the normalised dims are never split."""

from __future__ import annotations

from pipeline.ops.rule import OpRule, OpView, Rendered, Sent, call
from pipeline.ops.shapes import dim_of, letters


def _layer_norm(view: OpView) -> str:
    count = len(view.constant(1, "normalized_shape", ()))
    names = " ".join(f"n{i}^" for i in range(count))
    return f"* {names}, {names}, {names} -> * {names}"


def _rows(view: OpView) -> int:
    count = len(view.constant(1, "normalized_shape", ()))
    rows = 1
    for size in view.inputs[0].shape[: len(view.inputs[0].shape) - count]:
        rows *= size
    return rows


def _statistics(view: OpView) -> int:
    """Mean and reciprocal deviation of every row, in float32."""
    return 2 * 4 * _rows(view)


def _deviations(view: OpView) -> int:
    return 4 * _rows(view)


def _softmax(view: OpView) -> str:
    rank = len(view.output.shape)
    names = letters(rank, {dim_of(view, 1, default=-1)})
    return f"{names} -> {names}"


def _batch_norm(view: OpView) -> str:
    """All dims but the channels are averaged: split, the local form takes the statistics of all ranks.

    Channels stay whole, because the running statistics are kept, and changed, on every rank.
    """
    names = f"n c^ {' '.join(f'i{i}' for i in range(len(view.inputs[0].shape) - 2))}"
    return ", ".join([names, *["c^"] * (len(view.inputs) - 1)]) + f" -> {names}"


def _whole_batch(view: OpView, letter: str) -> str:
    return "batch" if view.constant(5, "training", False) else ""


def _batch_statistics(view: OpView) -> int:
    """Mean and reciprocal deviation of every channel, in float32."""
    return 2 * 4 * view.inputs[0].shape[1]


def _talks(view: OpView) -> tuple[Sent, Sent]:
    """Each rank's statistics go to all, and the sums of which the input's gradient is made are added up."""
    nbytes = _batch_statistics(view)
    return ("all_gather", 2 * nbytes), ("all_reduce", nbytes)


def _render_batch_norm(r: Rendered) -> str:
    text = call("batch_norm", drop=(8,))(r)
    return f"{text[:-1]}, axis={r.axes('batch')})" if r.bodies else text


def _group_norm(view: OpView) -> str:
    """`group_norm` takes (input, num_groups, weight, bias, eps): groups are separate, each is normalised whole."""
    image = " ".join(f"i{i}^" for i in range(len(view.inputs[0].shape) - 2))
    groups = f"(g={view.constant(1, 'num_groups', 1)} c^)"
    return f"n {groups} {image}, {groups}, {groups} -> n {groups} {image}"


def _render_group_norm(r: Rendered) -> str:
    groups = r.view.constant(1, "num_groups", 1) * r.local_inputs[0][1] // r.view.inputs[0].shape[1]
    names = ("input", "num_groups", "weight", "bias", "eps")
    given = {k: v for k, v in r.given(names).items() if k in names and v != "None"}
    given["num_groups"] = str(groups)
    first = [given.pop("input"), given.pop("num_groups")]
    return f"F.group_norm({', '.join([*first, *(f'{k}={v}' for k, v in given.items())])})"


def _group_statistics(view: OpView) -> int:
    return 2 * 4 * view.inputs[0].shape[0] * int(view.constant(1, "num_groups", 1))


RULES = [
    OpRule(
        "aten.batch_norm.default", _batch_norm, _render_batch_norm,
        saves_inputs=(0, 1), extra_saved=_batch_statistics, mutates=(3, 4), split_body=_whole_batch, talks=_talks,
    ),
    OpRule(
        "aten.layer_norm.default", _layer_norm, call("F.layer_norm", drop=(5,)),
        saves_inputs=(0, 1), extra_saved=_statistics,
    ),
    OpRule(
        "aten.rms_norm.default", _layer_norm, call("F.rms_norm"), saves_inputs=(0, 1), extra_saved=_deviations,
    ),
    OpRule(
        "aten.group_norm.default", _group_norm, _render_group_norm,
        saves_inputs=(0, 1), extra_saved=_group_statistics,
    ),
    OpRule("aten.softmax.int", _softmax, call("torch.softmax"), saves_output=True),
    OpRule("aten.log_softmax.int", _softmax, call("torch.log_softmax"), saves_output=True),
    OpRule("aten._softmax.default", _softmax, call("torch._softmax"), saves_output=True),
    OpRule("aten._log_softmax.default", _softmax, call("torch._log_softmax"), saves_output=True),
]  # fmt: skip
