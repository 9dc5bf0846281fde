"""Reductions over dims, running sums, and what orders or counts the elements of a dim."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.ir.graph import Arg
from pipeline.ops.rule import OpRule, OpView, Rendered, call
from pipeline.ops.shapes import dim_of, kept, letters, nothing_split


def _dims(view: OpView, position: int) -> set[int]:
    """The dims that are reduced; none named is all."""
    rank = len(view.inputs[0].shape)
    given: Arg = view.constant(position, "dim", ())
    named = given if isinstance(given, tuple) else () if given is None else (given,)
    return {d % max(rank, 1) for d in named} or set(range(rank))


def _reduce(position: int | None, mark: str) -> Callable[[OpView], str]:
    """The reduced dims carry the mark: `+` where parts add up, `^` where they do not."""

    def line(view: OpView) -> str:
        rank = len(view.inputs[0].shape)
        gone = set(range(rank)) if position is None else _dims(view, position)
        left = letters(rank, gone, mark)
        keepdim = len(view.output.shape) == rank and rank > 0
        right = " ".join(f"one{i}^" if i in gone else f"d{i}" for i in range(rank) if keepdim or i not in gone)
        return f"{left} -> {', '.join([right] * len(view.outputs))}"

    return line


def _mean_of_pieces(function: str) -> Callable[[Rendered], str]:
    def render(r: Rendered) -> str:
        text = call(function)(r)
        return f"mean_of_pieces({text}, axis={r.axes('mean')})" if r.bodies else text

    return render


def _mean_body(position: int | None) -> Callable[[OpView, str], str]:
    def body(view: OpView, letter: str) -> str:
        gone = set(range(len(view.inputs[0].shape))) if position is None else _dims(view, position)
        return "mean" if int(letter[1:]) in gone else ""

    return body


def _along(position: int, default: int = -1) -> Callable[[OpView], str]:
    """Every output has the input's dims, the one that is worked along whole."""

    def line(view: OpView) -> str:
        return kept(view, {dim_of(view, position, default=default)})

    return line


def _sum(target: str, position: int | None) -> OpRule:
    return OpRule(target, _reduce(position, "+"), call("torch.sum"), linear=((0,),))


def _mean(target: str, position: int | None) -> OpRule:
    return OpRule(
        target, _reduce(position, "+"), _mean_of_pieces("torch.mean"), linear=((0,),), split_body=_mean_body(position),
    )  # fmt: skip


def _other(target: str, position: int | None, function: str) -> OpRule:
    """A reduction whose parts do not add up: other dims may be split."""
    return OpRule(target, _reduce(position, "^"), call(function), saves_inputs=(0,), saves_output=True)


def _ordered(target: str, position: int, function: str, default: int = -1) -> OpRule:
    return OpRule(target, _along(position, default), call(function), saves_output=True)


def _histc(view: OpView) -> str:
    """Counts between fixed bounds add up; without bounds they depend on all values."""
    low, high = view.constant(2, "min", 0), view.constant(3, "max", 0)
    if low == high:
        return nothing_split(view)
    return f"{letters(len(view.inputs[0].shape), range(len(view.inputs[0].shape)), '+')} -> n^"


RULES = [
    _sum("aten.sum.default", None),
    _sum("aten.sum.dim_IntList", 1),
    _mean("aten.mean.default", None),
    _mean("aten.mean.dim", 1),
    _other("aten.amax.default", 1, "torch.amax"),
    _other("aten.amin.default", 1, "torch.amin"),
    _other("aten.max.dim", 1, "torch.max"),
    _other("aten.min.dim", 1, "torch.min"),
    _other("aten.argmax.default", 1, "torch.argmax"),
    _other("aten.argmin.default", 1, "torch.argmin"),
    _other("aten.prod.dim_int", 1, "torch.prod"),
    _other("aten.logsumexp.default", 1, "torch.logsumexp"),
    _other("aten.var.correction", 1, "torch.var"),
    _other("aten.std.correction", 1, "torch.std"),
    _other("aten.var.dim", 1, "torch.var"),
    _other("aten.std.dim", 1, "torch.std"),
    _other("aten.linalg_vector_norm.default", 2, "torch.linalg.vector_norm"),
    _other("aten.any.dim", 1, "torch.any"),
    _other("aten.all.dim", 1, "torch.all"),
    OpRule("aten.cumsum.default", _along(1), call("torch.cumsum"), linear=((0,),)),
    _ordered("aten.cumprod.default", 1, "torch.cumprod"),
    _ordered("aten.sort.default", 1, "torch.sort"),
    _ordered("aten.argsort.default", 1, "torch.argsort"),
    _ordered("aten.topk.default", 2, "torch.topk"),
    OpRule("aten.histc.default", _histc, call("torch.histc")),
]
