"""The chain of cut points, and which links are equal.

Ops that read no parameter (indices, masks, labels) form the prologue: any link may read their results, the inputs and
the parameters. After each other op, count the activations that a later op still reads, without the common values, which
are carried past the cuts: where there is just one, the graph is cut. A link of nothing but views stays with the link
before it.

An activation is common where, while it is alive, more than six products (linear layers, convolutions, attention)
follow one another. A residual stays inside its layer: a bottleneck is three products in a row, with squeeze and excite
five, attention is four, with low-rank adapters six; experts side by side do not follow one another. An encoder's
output, a position bias that every layer adds, or a skip of a U-Net outlives that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from shardwright.pipeline.ir.graph import Arg, Link, Op, OpGraph, Ref, Role, Value
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.tracing.lower import Ops, is_random

LONGEST_RESIDUAL = 6  # products in a row
Shard = tuple[list[Op], str | None, str]  # the ops of a link, what it reads and what it writes


def find_chain(graph: Ops) -> OpGraph:
    values = graph.values
    prologue: list[Op] = []
    carries: list[Op] = []  # what reads a parameter, directly or through others; random ops keep their place there
    tainted = {name for name, value in values.items() if value.role is Role.PARAMETER}
    for op in graph.ops:
        if tainted.intersection(op.inputs) or is_random(op):
            tainted.update(op.outputs)
            carries.append(op)
        else:
            prologue.append(op)
    links = _numbered(_cut(carries, values, graph.output, find_common(carries)), values)
    return OpGraph(values, (*prologue, *carries), graph.output, tuple(op.name for op in prologue), links)


def find_common(ops: Sequence[Op]) -> set[str]:
    """The results of these ops, given in order, that outlive a long run of products."""
    last_read = {name: i for i, op in enumerate(ops) for name in op.inputs}
    before = list(accumulate((_is_product(op) for op in ops), initial=0))
    return {
        name
        for i, op in enumerate(ops)
        for name in op.outputs
        if (last := last_read.get(name, i)) > i
        and before[last] - before[i + 1] > LONGEST_RESIDUAL  # fewer at all are fewer in a row
        and products_in_a_row(ops[i + 1 : last], enough=LONGEST_RESIDUAL + 1) > LONGEST_RESIDUAL
    }


def products_in_a_row(ops: Sequence[Op], enough: float = math.inf) -> int:
    """The most products on one path through these ops, or as many as are enough."""
    rows: dict[str, int] = {}
    longest = 0
    for op in ops:
        row = max((rows.get(name, 0) for name in op.inputs), default=0) + _is_product(op)
        rows |= dict.fromkeys(op.outputs, row)
        longest = max(longest, row)
        if longest >= enough:
            break
    return longest


def _is_product(op: Op) -> bool:
    rule = rule_of(op)
    return rule is not None and rule.is_product


def _cut(ops: list[Op], values: dict[str, Value], output: str, common: set[str]) -> list[Shard]:
    last_read = {name: i for i, op in enumerate(ops) for name in op.inputs}
    last_read[output] = len(ops)
    alive: set[str] = set()
    links: list[Shard] = []
    current: list[Op] = []
    entry: str | None = None
    for i, op in enumerate(ops):
        current.append(op)
        alive.update(name for name in op.outputs if name not in common)
        alive = {name for name in alive if last_read.get(name, -1) > i}
        if len(alive) == 1 and values[next(iter(alive))].grad and entry not in alive:
            (exit_,) = alive
            rules = [rule_of(each) for each in current]
            if links and all(rule is not None and rule.is_view for rule in rules):
                before, first, _ = links.pop()
                current, entry = [*before, *current], first
            links.append((current, entry, exit_))
            current, entry = [], exit_
    assert not current, "the loss ends the chain"
    return links


def _numbered(links: list[Shard], values: dict[str, Value]) -> tuple[Link, ...]:
    numbers: dict[object, int] = {}
    chain = []
    last_read = {name: i for i, (ops, _, _) in enumerate(links) for op in ops for name in op.inputs}
    carried: set[str] = set()
    for index, (ops, entry, exit_) in enumerate(links):
        written = (name for op in ops for name in op.outputs)
        common = tuple(name for name in written if last_read.get(name, index) > index and name != exit_)
        carried.update(common)
        number = numbers.setdefault(_signature(ops, entry, (exit_, *common), values, carried), len(numbers))
        chain.append(Link(tuple(op.name for op in ops), entry, exit_, number, common))
    return tuple(chain)


def _signature(
    ops: list[Op], entry: str | None, results: tuple[str, ...], values: dict[str, Value], common: set[str]
) -> object:
    """Equal for links that do the same to tensors of the same types, whatever their names."""
    numbers: dict[str, int] = {}

    def seen(name: str) -> tuple[int, object]:
        value = values[name]
        number = numbers.setdefault(name, len(numbers))
        identity = name if value.role is Role.INPUT else value.role.value
        carried = value.grad if name in common else None
        return number, (value.type, identity, name == entry, carried)

    def plain(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return seen(arg.value)
        return tuple(plain(a) for a in arg) if isinstance(arg, tuple) else repr(arg)

    calls = tuple(
        (op.target, op.exact, plain(op.args.positional), tuple((k, plain(v)) for k, v in op.args.named),
         tuple(seen(o) for o in op.outputs))
        for op in ops
    )  # fmt: skip
    return calls, tuple(seen(name) for name in results)
