"""Ops that make a tensor out of constants, or at random.

A shard of a constant tensor is the op with the shard's own shape; a shard of a random one draws its own numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.pipeline.ops.own_names import CONSTANT
from shardwright.pipeline.ops.rule import OpRule, OpView, Rendered, apart, call, drawn, method
from shardwright.pipeline.ops.shapes import broadcast, letters


def _whole(view: OpView) -> str:
    return f"-> {letters(len(view.output.shape), range(len(view.output.shape)))}"


def _any_shard(view: OpView) -> str:
    """The shape is among the constants; a tensor that is read gives only its type."""
    names = letters(len(view.output.shape))
    return f"{', '.join(' '.join(f't{i}^' for i in range(len(t.shape))) for t in view.inputs)} -> {names}"


def _sized(render: Callable[[Rendered], str], position: int = 0) -> Callable[[Rendered], str]:
    """Prints the call with the shape, at that position, of this rank's shard."""

    def here(r: Rendered) -> str:
        positional = (*r.positional[:position], str(r.local_output), *r.positional[position + 1 :])
        return render(replace(r, positional=positional))

    return here


def _random(target: str, dims: Callable[[OpView], str], render: Callable[[Rendered], str]) -> OpRule:
    return OpRule(f"aten.{target}", dims, apart(render), split_body=drawn, random=True)


RULES = [
    OpRule(CONSTANT, _whole, call("torch.tensor")),
    *(OpRule(f"aten.arange.{name}", "-> n^", call("torch.arange")) for name in ("default", "start", "start_step")),
    OpRule("aten.linspace.default", "-> n^", call("torch.linspace")),
    OpRule("aten.scalar_tensor.default", "->", call("torch.scalar_tensor")),
    *(OpRule(f"aten.{name}.default", _any_shard, _sized(call(f"torch.{name}"))) for name in ("zeros", "ones", "full")),
    OpRule("aten.empty.memory_format", _any_shard, _sized(call("torch.empty"))),
    *(_random(f"{name}.default", _any_shard, _sized(call(f"torch.{name}"))) for name in ("rand", "randn")),
    *(
        OpRule(f"aten.{name}.default", _any_shard, _sized(method(name), 1))
        for name in ("new_zeros", "new_ones", "new_full")
    ),
    *(
        OpRule(f"aten.{name}.default", broadcast, call(f"torch.{name}"))
        for name in ("zeros_like", "ones_like", "full_like", "empty_like")
    ),
    *(
        _random(name, broadcast, call(f"torch.{name.partition('.')[0]}"))
        for name in ("rand_like.default", "randn_like.default", "bernoulli.default", "bernoulli.p")
    ),
]
