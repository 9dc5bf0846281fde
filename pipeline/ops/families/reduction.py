"""Reductions over dims, running sums, and what orders or counts the elements of a dim."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.pipeline.ir.graph import Arg
from shardwright.pipeline.ops.rule import OpRule, OpView, Rendered, call
from shardwright.pipeline.ops.shapes import along, letters, nothing_split


def _dims(view: OpView, position: int | None) -> set[int]:
    """The dims that are reduced; none named is all."""
    rank = len(view.inputs[0].shape)
    given: Arg = None if position is None else view.constant(position, "dim", ())
    named = given if isinstance(given, tuple) else () if given is None else (given,)
    return {d % max(rank, 1) for d in named} or set(range(rank))


def _reduce(position: int | None, mark: str) -> Callable[[OpView], str]:
    """The reduced dims carry the mark: `+` where parts add up, `^` where they do not."""

    def line(view: OpView) -> str:
        rank, gone = len(view.inputs[0].shape), _dims(view, position)
        keepdim = len(view.output.shape) == rank and rank > 0
        right = " ".join(f"one{i}^" if i in gone else f"d{i}" for i in range(rank) if keepdim or i not in gone)
        return f"{letters(rank, gone, mark)} -> {', '.join([right] * len(view.outputs))}"

    return line


def _sum(target: str, position: int | None) -> OpRule:
    return OpRule(target, _reduce(position, "+"), call("torch.sum"), linear=((0,),))


def _mean(target: str, position: int | None) -> OpRule:
    def render(r: Rendered) -> str:
        text = call("torch.mean")(r)
        return f"mean_of_shards({text}, axis={r.axes('mean')})" if r.bodies else text

    def body(view: OpView, letter: str) -> str:
        return "mean" if int(letter[1:]) in _dims(view, position) else ""

    return OpRule(target, _reduce(position, "+"), render, linear=((0,),), split_body=body)


def _histc(view: OpView) -> str:
    """Counts between fixed bounds add up; without bounds they depend on all values."""
    if view.constant(2, "min", 0) == view.constant(3, "max", 0):
        return nothing_split(view)
    rank = len(view.inputs[0].shape)
    return f"{letters(rank, range(rank), '+')} -> n^"


# Reductions along dim 1 of the arguments whose parts do not add up: other dims may be split.
OTHERS = (
    "amax.default", "amin.default", "max.dim", "min.dim", "argmax.default", "argmin.default", "prod.dim_int",
    "logsumexp.default", "var.correction", "std.correction", "var.dim", "std.dim", "any.dim", "all.dim",
)  # fmt: skip
ORDERED = {"cumprod": 1, "sort": 1, "argsort": 1, "topk": 2}  # with the place of the dim

RULES = [
    _sum("aten.sum.default", None),
    _sum("aten.sum.dim_IntList", 1),
    _mean("aten.mean.default", None),
    _mean("aten.mean.dim", 1),
    *(
        OpRule(f"aten.{name}", _reduce(place, "^"), call(function), saves_inputs=(0,), saves_output=True)
        for name, place, function in (
            *((name, 1, f"torch.{name.partition('.')[0]}") for name in OTHERS),
            ("linalg_vector_norm.default", 2, "torch.linalg.vector_norm"),
        )
    ),
    OpRule("aten.cumsum.default", along(1, -1), call("torch.cumsum"), linear=((0,),)),
    *(
        OpRule(f"aten.{name}.default", along(place, -1), call(f"torch.{name}"), saves_output=True)
        for name, place in ORDERED.items()
    ),
    OpRule("aten.histc.default", _histc, call("torch.histc")),
]
