"""Ops that make a tensor out of constants, or at random.

A piece of a constant tensor is the op with the piece's own shape; a piece of a random one draws its own numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipeline.ops.own_names import CONSTANT
from pipeline.ops.rule import OpRule, OpView, Rendered, apart, call, drawn, method
from pipeline.ops.shapes import broadcast, letters


def _whole(view: OpView) -> str:
    return f"-> {letters(len(view.output.shape), range(len(view.output.shape)))}"


def _any_piece(view: OpView) -> str:
    """The shape is among the constants; a tensor that is read gives only its type."""
    names = letters(len(view.output.shape))
    return f"{', '.join(' '.join(f't{i}^' for i in range(len(t.shape))) for t in view.inputs)} -> {names}"


def _sized(function: str, position: int) -> Callable[[Rendered], str]:
    """Prints the call with the shape, at that position, of this rank's piece."""

    def render(r: Rendered) -> str:
        return call(function)(_here(r, position))

    return render


def _new(name: str) -> Callable[[Rendered], str]:
    """Prints `x.new_zeros(shape)`."""
    return lambda r: method(name)(_here(r, 1))


def _here(r: Rendered, position: int) -> Rendered:
    """The arguments with this rank's own shape at that position."""
    positional = list(r.positional)
    positional[position] = str(r.local_output)
    return replace(r, positional=tuple(positional))


def _constant(name: str, position: int = 0) -> OpRule:
    return OpRule(f"aten.{name}.default", _any_piece, _sized(f"torch.{name}", position))


def _random(name: str) -> OpRule:
    return OpRule(
        f"aten.{name}.default", _any_piece, apart(_sized(f"torch.{name}", 0)), split_body=drawn, random=True,
    )  # fmt: skip


def _like(name: str) -> OpRule:
    return OpRule(f"aten.{name}.default", broadcast, call(f"torch.{name}"))


def _random_like(name: str, overload: str = "default") -> OpRule:
    return OpRule(
        f"aten.{name}.{overload}", broadcast, apart(call(f"torch.{name}")), split_body=drawn, random=True,
    )  # fmt: skip


RULES = [
    OpRule(CONSTANT, _whole, call("torch.tensor")),
    OpRule("aten.arange.default", "-> n^", call("torch.arange")),
    OpRule("aten.arange.start", "-> n^", call("torch.arange")),
    OpRule("aten.arange.start_step", "-> n^", call("torch.arange")),
    OpRule("aten.linspace.default", "-> n^", call("torch.linspace")),
    OpRule("aten.scalar_tensor.default", "->", call("torch.scalar_tensor")),
    *(_constant(name) for name in ("zeros", "ones", "full")),
    OpRule("aten.empty.memory_format", _any_piece, _sized("torch.empty", 0)),
    *(_random(name) for name in ("rand", "randn")),
    *(OpRule(f"aten.{name}.default", _any_piece, _new(name)) for name in ("new_zeros", "new_ones", "new_full")),
    *(_like(name) for name in ("zeros_like", "ones_like", "full_like", "empty_like")),
    *(_random_like(name) for name in ("rand_like", "randn_like", "bernoulli")),
    _random_like("bernoulli", "p"),
]
