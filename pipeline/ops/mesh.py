"""The strategies of an op on a mesh: those of one axis after another, each on the shapes that the axes before it left.

What runs on a rank is the op itself on its shards, so it can be split again as any op can: the rule is asked once more,
with the local shapes. The states that it answers with are said of the local shards; `Layout.nested` says them of the
whole tensor, or that the combination is no layout (it would cut across the parts that a rank holds).

Two strategies with the same layouts run the same local op and need the same conversions: the later one is dominated
and dropped. Two different local forms of one op do not nest: such a combination is dropped too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from shardwright.pipeline.ir.graph import Arg, Op, OpGraph, Ref, Role, TensorType
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.plan import Strategy
from shardwright.pipeline.ops.dims import local_factors, still_uneven, strategies
from shardwright.pipeline.ops.factors import factors_of
from shardwright.pipeline.ops.rule import OpRule, OpView, plain_view
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.ops.uneven import uneven_in


@dataclass(frozen=True)
class Signature:
    """All that the strategies of an op depend on: ops of equal layers have equal ones."""

    target: str
    arguments: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    input_grads: tuple[bool, ...]
    per_rank: bool
    factors: tuple[tuple[str, tuple[int, ...]], ...]
    uneven: tuple[str, ...]
    view: OpView = field(compare=False)  # an op that has it


def view_op(graph: OpGraph, op: Op) -> OpView:
    """The op with what its neighbours say of its dims."""
    factors, uneven = factors_of(graph).get(op.name, ()), uneven_in(graph).letters.get(op.name, ())
    return replace(plain_view(graph, op), factors=factors, uneven=uneven)


def signature(view: OpView) -> Signature:
    """Arguments are compared as text: `1`, `1.0` and `True` are different constants."""
    text = repr((_nameless(view.op.args.positional), _nameless(view.op.args.named)))
    return Signature(
        view.op.target, text, view.inputs, view.outputs, view.input_grads, view.op.per_rank, view.factors, view.uneven,
        view,
    )  # fmt: skip


def _nameless(arg: Arg) -> Arg:
    if isinstance(arg, Ref):
        return Ref("")
    return tuple(_nameless(a) for a in arg) if isinstance(arg, tuple) else arg


def op_strategies(view: OpView, sizes: tuple[int, ...]) -> tuple[Strategy, ...]:
    """Every way the op may run on a mesh of these sizes."""
    return _strategies(signature(view), rule_of(view.op), sizes)


@lru_cache(maxsize=4096)
def _strategies(key: Signature, rule: OpRule | None, sizes: tuple[int, ...]) -> tuple[Strategy, ...]:
    found = strategies(rule, key.view, sizes[0])
    for count in range(1, len(sizes)):
        found = _with_axis(rule, key.view, found, sizes[: count + 1])
    return found


def _with_axis(
    rule: OpRule | None, view: OpView, outer: tuple[Strategy, ...], sizes: tuple[int, ...]
) -> tuple[Strategy, ...]:
    """The strategies on all axes but the last, each with those on the last."""
    found: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Strategy] = {}
    local: dict[OpView, tuple[Strategy, ...]] = {}
    for first in outer:
        shard = _local(view, first, sizes[:-1])
        if shard not in local:
            local[shard] = strategies(rule, shard, sizes[-1])
        for second in local[shard]:
            both = _nested(first, second, sizes)
            # No further axis splits the padded shards that one has left of a dim.
            if both is not None and (not view.uneven or _holds(view, both, sizes)):
                found.setdefault((both.inputs, both.outputs), both)
    return tuple(found.values())


def _holds(view: OpView, strategy: Strategy, sizes: tuple[int, ...]) -> bool:
    layouts = zip((*view.inputs, *view.outputs), (*strategy.inputs, *strategy.outputs), strict=True)
    return all(layout.holds(kind.shape, sizes) for kind, layout in layouts)


def _local(view: OpView, strategy: Strategy, sizes: tuple[int, ...]) -> OpView:
    """The op as one rank runs it."""
    inputs, outputs = (
        tuple(TensorType(x.local_shape(t.shape, sizes), t.dtype) for t, x in zip(types, layouts, strict=True))
        for types, layouts in ((view.inputs, strategy.inputs), (view.outputs, strategy.outputs))
    )
    factors, uneven = local_factors(view, strategy, sizes), still_uneven(view, strategy)
    cut: dict[str, int] = {}
    for letter, size in zip(strategy.name.split(","), sizes, strict=True):
        cut[letter] = cut.get(letter, 1) * size
    own = tuple(sorted(cut.items()))
    return replace(view, inputs=inputs, outputs=outputs, factors=factors, uneven=uneven, shards=own)


def _nested(first: Strategy, second: Strategy, sizes: tuple[int, ...]) -> Strategy | None:
    bodies = {body for body in (*first.body.split(","), second.body) if body}
    pairs = zip((*first.inputs, *first.outputs), (*second.inputs, *second.outputs), strict=True)
    found = [both for x, y in pairs if (both := x.nested(y.states[0], sizes)) is not None]
    count = len(first.inputs)
    if (len(bodies) > 1 and bodies != {"mean", "classes"}) or len(found) < count + len(first.outputs):
        return None
    body = f"{first.body or ',' * (len(sizes) - 2)},{second.body}" if bodies else ""  # one for each axis
    return Strategy(f"{first.name},{second.name}", tuple(found[:count]), tuple(found[count:]), body)


def followers(graph: OpGraph, options: dict[str, tuple[Strategy, ...]]) -> dict[str, str]:
    """Op -> the op whose choice of layout is its own choice as well.

    An op follows the op that writes its first input where the layout of that input tells its strategies apart:
    element-wise ops and views. Given the one choice, at most one strategy takes the input as it comes.
    """
    writer = {name: op.name for op in graph.ops for name in op.outputs}
    found = {}
    for op in graph.ops:
        if op.inputs and graph.values[op.inputs[0]].role is Role.RESULT:
            layouts = [strategy.inputs[0] for strategy in options[op.name]]
            if len(set(layouts)) == len(layouts):
                found[op.name] = writer[op.inputs[0]]
    return found
