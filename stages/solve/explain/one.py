"""One parameter, input or op: what its name means, what was chosen for it and what else there was, or was not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase

from pipeline.ir.graph import Op, OpGraph, Role, TensorType
from pipeline.ir.layout import Layout
from pipeline.ops.mesh import view_op
from pipeline.ops.table import rule_of
from stages.solve.explain.options import Options, PricedOption
from stages.solve.explain.priced_run import ExplainError, Item, ItemKind, PlannedRun, PricedPartition
from stages.solve.problem.build import Choices

OP = "op:"  # before the name of an op that is a module's name as well
NEAR = 3  # names that a message offers


class What(StrEnum):
    parameter = "parameter"
    buffer = "buffer"
    input = "input"
    op = "op"
    module = "module"


@dataclass(frozen=True)
class Subject:
    what: What
    name: str  # of the value, of the op, or the pattern


def find_subject(graph: OpGraph, name: str) -> Subject:
    by_origin = {value.origin: value for value in graph.values.values() if value.role is not Role.RESULT}
    value = by_origin.get(name) or graph.values.get(name)
    if value is not None and value.role is not Role.RESULT:
        return Subject(What(value.role.value), value.name)
    ops = {op.name for op in graph.ops}
    if any(inside(name, known) for known in (*_modules(graph), *by_origin)):
        return Subject(What.module, name)
    plain = name.removeprefix(OP)
    if plain in ops:
        return Subject(What.op, plain)
    if value is not None:
        return Subject(What.op, value.origin)
    known = dict.fromkeys([*by_origin, *_modules(graph), *ops, *graph.values])
    near = get_close_matches(name, list(known), n=NEAR)
    remedy = f"did you mean {', '.join(near)}?" if near else "names are those of named_modules(), named_parameters()"
    raise ExplainError(f"nothing is called {name!r}", where="explain", remedy=remedy)


def inside(pattern: str, name: str) -> bool:
    """Whether a module or a parameter is what is named, or lies in it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def starred(name: str) -> str:
    """The name with a star for each number between dots: equal layers have equal ones."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _modules(graph: OpGraph) -> dict[str, None]:
    names = (op.module.split(".") for op in graph.ops)
    return dict.fromkeys(".".join(parts[:count]) for parts in names for count in range(1, len(parts) + 1) if parts[0])


# ---- what was chosen for it


@dataclass(frozen=True)
class HeldBytes:
    what: str
    nbytes: int  # on one device


@dataclass(frozen=True)
class Never:
    """A split that no option has."""

    tensor: str
    dim: int
    size: int
    axis: str
    why: str


@dataclass(frozen=True)
class One:
    what: What
    name: str
    about: str
    partition: int | None  # of a pipeline
    chosen: str
    step_seconds: float  # of the plan
    compute_seconds: float
    communication_seconds: float
    optimizer_seconds: float
    held: tuple[HeldBytes, ...]
    conversions: tuple[Item, ...]
    options: tuple[PricedOption, ...]
    more: int  # options that were not priced in full: they are slower
    never: tuple[Never, ...]


def home_of(plan: PlannedRun, subject: Subject) -> PricedPartition:
    """The partition that has it: of several the first."""
    for part in plan.parts:
        if subject.name in part.sharding.strategies if subject.what is What.op else subject.name in part.graph.values:
            return part
    raise ExplainError(f"the plan has no {subject.what} {subject.name!r}", remedy="run `dvc repro checkpoint`")


def explain_one(plan: PlannedRun, options: Options, subject: Subject, most: int, again: float | None) -> One:
    part, name = options.part, subject.name
    fixed = subject.what is What.buffer
    found, more = ((), 0) if fixed else options.of(name, most, again)
    items = [item for item in part.items() if _is_of(item, part.graph, subject)]
    moved = sum(item.seconds for item in items if item.kind not in (ItemKind.op, ItemKind.optimizer))
    return One(
        what=subject.what,
        name=name if subject.what is What.op else part.graph.values[name].origin,
        about=_about(part.graph, subject),
        partition=part.number if plan.plan.pipelined else None,
        chosen=found[0].choice if found else "R: a buffer is whole on every device",
        step_seconds=plan.plan.prediction.step_seconds,
        compute_seconds=sum(item.seconds for item in items if item.kind is ItemKind.op),
        communication_seconds=moved,
        optimizer_seconds=sum(item.seconds for item in items if item.kind is ItemKind.optimizer),
        held=tuple(_held(part, subject)),
        conversions=tuple(item for item in items if item.kind is ItemKind.conversion),
        options=found,
        more=more,
        never=() if fixed else tuple(never_split(part, options.choices, subject)),
    )


def _is_of(item: Item, graph: OpGraph, subject: Subject) -> bool:
    if subject.what is not What.op:
        value = graph.values[subject.name]
        own = item.kind in (ItemKind.gradient, ItemKind.optimizer) and item.name == value.origin
        return own or item.value == subject.name
    return item.op == subject.name or item.value in graph.op(subject.name).outputs


def _about(graph: OpGraph, subject: Subject) -> str:
    if subject.what is What.op:
        op = graph.op(subject.name)
        read = ", ".join(f"{name} {_shape(graph.values[name].type)}" for name in op.inputs)
        made = ", ".join(f"{name} {_shape(graph.values[name].type)}" for name in op.outputs)
        return f"{op.target} of {op.module or 'the model itself'} ({op.source}): {read} -> {made}"
    value = graph.values[subject.name]
    readers = [f"{op.name} ({op.module or 'the model itself'})" for op in graph.consumers()[value.name]]
    shown = ", ".join(readers[:3]) + (f" and {len(readers) - 3} more" if len(readers) > 3 else "")
    return f"{_shape(value.type)} {value.type.dtype}, read by {shown or 'nothing'}"


def _shape(kind: TensorType) -> str:
    return "x".join(map(str, kind.shape)) or "scalar"


def _held(part: PricedPartition, subject: Subject) -> Iterator[HeldBytes]:
    graph, local = part.graph, part.priced.sharded.local_bytes
    if subject.what is What.op:
        op, strategy = graph.op(subject.name), part.sharding.strategies[subject.name]
        layouts = dict(zip((*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs), strict=True))
        yield HeldBytes("writes", sum(local(name, layouts[name]) for name in op.outputs))
        saved = [name for name in part.priced.profile.ops[op.name].saves if name in layouts]
        yield HeldBytes("keeps for backward", sum(local(name, layouts[name]) for name in saved))
    elif subject.what is What.parameter:
        stored = part.sharding.storage[graph.values[subject.name].origin]
        yield HeldBytes("value", local(subject.name, stored))
        yield HeldBytes("value, gradient and optimizer state", round(part.priced.parameters[subject.name].resident))
    else:
        layout = part.sharding.inputs.get(subject.name)
        whole = graph.values[subject.name].type.nbytes
        yield HeldBytes("value", local(subject.name, layout) if layout else whole)


def never_split(part: PricedPartition, choices: Choices, subject: Subject) -> Iterator[Never]:
    """Dims that no option splits over an axis, and why."""
    graph, name = part.graph, subject.name
    if subject.what is What.op:
        op = graph.op(name)
        tensors = (*op.inputs, *op.outputs)
        offered = [zip(tensors, (*s.inputs, *s.outputs), strict=True) for s in choices.ops[name]]
        known = [pair for pairs in offered for pair in pairs]
        for tensor in dict.fromkeys(tensors):
            yield from _never(part, tensor, [layout for n, layout in known if n == tensor], _rule(graph, op))
    elif name in choices.storage:
        layouts = [layout for way in choices.storage[name] for layout in (way.layout, way.state)]
        yield from _never(part, name, layouts, "no op reads it split so, and ZeRO splits another dim")
    else:
        yield from _never(part, name, choices.inputs[name], "no op that reads it is offered that split")


def _rule(graph: OpGraph, op: Op) -> str:
    rule = rule_of(op)
    if rule is None:
        return "the op has no rule, and none was found by trying"
    return f"not offered by its rule `{rule.line(view_op(graph, op))}`"


def _never(part: PricedPartition, tensor: str, layouts: Sequence[Layout], otherwise: str) -> Iterator[Never]:
    value = part.graph.values[tensor]
    for number, axis in enumerate(part.cluster.axes):
        split = {layout.states[number].dim for layout in layouts if layout.states[number].kind == "S"}
        for dim, size in enumerate(value.type.shape):
            if dim not in split and axis.size > 1:
                why = f"{size} does not divide by {axis.size}" if size % axis.size else otherwise
                name = tensor if value.role in (Role.RESULT, Role.ENTERS) else value.origin
                yield Never(name, dim, size, axis.name, why)
