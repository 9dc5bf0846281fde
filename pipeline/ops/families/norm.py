"""Normalisation and softmax: the normalised dims are never split."""

from __future__ import annotations

from math import prod

from shardwright.pipeline.ir.graph import Op
from shardwright.pipeline.ops.rule import GATHER_FEW, SUM_FEW, OpRule, OpView, Rendered, Sent, call
from shardwright.pipeline.ops.shapes import along


def _layer_norm(view: OpView) -> str:
    count = len(view.constant(1, "normalized_shape", ()))
    names = " ".join(f"n{i}^" for i in range(count))
    return f"* {names}, {names}, {names} -> * {names}"


def _rows(view: OpView) -> int:
    return prod(view.inputs[0].shape[: -len(view.constant(1, "normalized_shape", ()))])


BATCH_NORM = "aten.batch_norm.default"


def is_batch_norm_in_training(op: Op) -> bool:
    return op.target == BATCH_NORM and bool(op.args.get(5, "training", False))


def _batch_norm(view: OpView) -> str:
    """All dims but the channels are averaged: split, the local form takes the statistics of all ranks.

    Where each rank takes those of its own samples, these are whole on one rank. Channels stay whole, because the
    running statistics are kept, and changed, on every rank.
    """
    mark = "^" if view.op.per_rank else ""
    names = f"n c^ {' '.join(f'i{i}{mark}' for i in range(len(view.inputs[0].shape) - 2))}"
    return ", ".join([names, *["c^"] * (len(view.inputs) - 1)]) + f" -> {names}"


def _batch_statistics(view: OpView) -> int:
    return 2 * 4 * view.inputs[0].shape[1]


def _talks(view: OpView) -> tuple[Sent, Sent]:
    """Each rank's statistics go to all, and the sums of which the input's gradient is made are added up."""
    nbytes = _batch_statistics(view)
    return (GATHER_FEW, nbytes), (SUM_FEW, nbytes)


def _render_batch_norm(r: Rendered) -> str:
    text = call("batch_norm", drop=(8,))(r)
    return f"{text[:-1]}, axis={r.axes('batch')})" if r.bodies else text


def _group_norm(view: OpView) -> str:
    """`group_norm` takes (input, num_groups, weight, bias, eps): groups are separate, each is normalised whole."""
    image = " ".join(f"i{i}^" for i in range(len(view.inputs[0].shape) - 2))
    count = int(view.constant(1, "num_groups", 1)) // dict(view.shards).get("g", 1)
    groups = f"(g={count} c^)"
    return f"n {groups} {image}, {groups}, {groups} -> n {groups} {image}"


def _render_group_norm(r: Rendered) -> str:
    groups = r.view.constant(1, "num_groups", 1) * r.local_inputs[0][1] // r.view.inputs[0].shape[1]
    names = ("input", "num_groups", "weight", "bias", "eps")
    given = {k: v for k, v in r.given(names).items() if k in names and v != "None"}
    given["num_groups"] = str(groups)
    first = [given.pop("input"), given.pop("num_groups")]
    return f"F.group_norm({', '.join([*first, *(f'{k}={v}' for k, v in given.items())])})"


# What is kept of the statistics: mean and reciprocal deviation, in float32; of `rms_norm` the latter alone.
RULES = [
    OpRule(
        BATCH_NORM, _batch_norm, _render_batch_norm,
        saves_inputs=(0, 1), extra_saved=_batch_statistics, mutates=(3, 4), talks=_talks,
        split_body=lambda view, letter: "batch" if is_batch_norm_in_training(view.op) and not view.op.per_rank else "",
    ),
    OpRule(
        "aten.layer_norm.default", _layer_norm, call("F.layer_norm", drop=(5,)),
        saves_inputs=(0, 1), extra_saved=lambda view: 2 * 4 * _rows(view),
    ),
    OpRule(
        "aten.rms_norm.default", _layer_norm, call("F.rms_norm"),
        saves_inputs=(0, 1), extra_saved=lambda view: 4 * _rows(view),
    ),
    OpRule(
        "aten.group_norm.default", _group_norm, _render_group_norm, saves_inputs=(0, 1),
        extra_saved=lambda view: 2 * 4 * view.inputs[0].shape[0] * int(view.constant(1, "num_groups", 1)),
    ),
    *(
        OpRule(f"aten.{name}", along(1, -1), call(f"torch.{name.partition('.')[0]}"), saves_output=True)
        for name in ("softmax.int", "log_softmax.int", "_softmax.default", "_log_softmax.default")
    ),
]  # fmt: skip
