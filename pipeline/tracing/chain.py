"""The chain of cut points, and which links are equal.

Ops that read no parameter (indices, masks, labels) form the prologue: any link may read their results, the inputs and
the parameters. After each other op, count the activations that a later op still reads, without the common values
(common.py), which are carried past the cuts: where there is just one, the graph is cut. A link of nothing but views
stays with the link before it.
"""

from __future__ import annotations

from pipeline.ir.graph import Arg, Link, Op, OpGraph, Ref, Role, Value
from pipeline.ops.table import rule_of
from pipeline.tracing.common import find_common
from pipeline.tracing.lower import Ops, is_random

Piece = tuple[list[Op], str | None, str]  # the ops of a link, what it reads and what it writes


def find_chain(graph: Ops) -> OpGraph:
    values = graph.values
    prologue, carries = _separate(graph)
    links = _cut(carries, values, graph.output, find_common(carries))
    ops = (*prologue, *carries)
    return OpGraph(values, ops, graph.output, tuple(op.name for op in prologue), _numbered(links, values))


def _separate(graph: Ops) -> tuple[list[Op], list[Op]]:
    """Ops that read no parameter, directly or through others, and the rest; random ops keep their place there."""
    prologue: list[Op] = []
    carries: list[Op] = []
    tainted = {name for name, value in graph.values.items() if value.role is Role.PARAMETER}
    for op in graph.ops:
        if tainted.intersection(op.inputs) or is_random(op):
            tainted.update(op.outputs)
            carries.append(op)
        else:
            prologue.append(op)
    return prologue, carries


def _cut(ops: list[Op], values: dict[str, Value], output: str, common: set[str]) -> list[Piece]:
    last_read = {name: i for i, op in enumerate(ops) for name in op.inputs}
    last_read[output] = len(ops)
    alive: set[str] = set()
    links: list[Piece] = []
    current: list[Op] = []
    entry: str | None = None
    for i, op in enumerate(ops):
        current.append(op)
        alive.update(name for name in op.outputs if name not in common)
        alive = {name for name in alive if last_read.get(name, -1) > i}
        if len(alive) == 1 and values[next(iter(alive))].grad and entry not in alive:
            (exit_,) = alive
            if links and all(_is_view(o) for o in current):
                before, first, _ = links.pop()
                current, entry = [*before, *current], first
            links.append((current, entry, exit_))
            current, entry = [], exit_
    assert not current, "the loss ends the chain"
    return links


def _is_view(op: Op) -> bool:
    rule = rule_of(op)
    return rule is not None and rule.is_view


def _numbered(links: list[Piece], values: dict[str, Value]) -> tuple[Link, ...]:
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
