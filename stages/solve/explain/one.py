"""One parameter, input or op: what its name means, what was chosen for it and what else there was, or was not."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import accumulate

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ops.mesh import view_op
from shardwright.pipeline.ops.table import rule_of
from shardwright.stages.solve.explain.options import Options, PricedOption
from shardwright.stages.solve.explain.priced_run import ExplainError, Item, ItemisedPartition, ItemKind, PlannedRun
from shardwright.stages.solve.problem.build import Choices

OP = "op:"  # before the name of an op that is a module's name as well
NEAR = 3  # names that a message offers
WHOLE_MODEL = "the model itself"  # the module of an op that is in none


class SubjectKind(StrEnum):
    parameter = "parameter"
    buffer = "buffer"
    input = "input"
    op = "op"
    module = "module"


@dataclass(frozen=True)
class Subject:
    what: SubjectKind
    name: str  # of the value, of the op, or the pattern


def find_subject(graph: OpGraph, name: str) -> Subject:
    by_origin = {value.origin: value for value in graph.values.values() if value.role is not Role.RESULT}
    value = by_origin.get(name) or graph.values.get(name)
    if value is not None and value.role is not Role.RESULT:
        return Subject(SubjectKind(value.role.value), value.name)
    modules = dict.fromkeys(around for op in graph.ops if op.module for around in _prefixes(op.module))
    if any(inside(name, known) for known in (*modules, *by_origin)):
        return Subject(SubjectKind.module, name)
    ops, plain = {op.name for op in graph.ops}, name.removeprefix(OP)
    if plain in ops:
        return Subject(SubjectKind.op, plain)
    if value is not None:
        return Subject(SubjectKind.op, value.origin)
    near = get_close_matches(name, list(dict.fromkeys([*by_origin, *modules, *ops, *graph.values])), n=NEAR)
    remedy = f"did you mean {', '.join(near)}?" if near else "names are those of named_modules(), named_parameters()"
    raise ExplainError(f"nothing is called {name!r}", where="explain", remedy=remedy)


def inside(pattern: str, name: str) -> bool:
    """Whether a module or a parameter is what is named, or lies in it."""
    return any(fnmatchcase(around, pattern) for around in _prefixes(name))


def _prefixes(name: str) -> list[str]:
    """`a.b.c`: a, a.b and a.b.c."""
    return list(accumulate(name.split("."), "{}.{}".format))


def starred(name: str) -> str:
    """The name with a star for each number between dots: equal layers have equal ones."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


# ---- what was chosen for it


@dataclass(frozen=True)
class HeldBytes:
    what: str
    nbytes: int  # on one device


@dataclass(frozen=True)
class ImpossibleSplit:
    """A split that no option has."""

    tensor: str
    dim: int
    size: int
    axis: str
    why: str


@dataclass(frozen=True)
class SubjectSummary:
    what: SubjectKind
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
    never: tuple[ImpossibleSplit, ...]


def home_of(plan: PlannedRun, subject: Subject) -> ItemisedPartition:
    """The partition that has it: of several the first."""
    for part in plan.parts:
        if (
            subject.name in part.sharding.strategies
            if subject.what is SubjectKind.op
            else subject.name in part.graph.values
        ):
            return part
    raise ExplainError(f"the plan has no {subject.what} {subject.name!r}", remedy="run `dvc repro checkpoint`")


def explain_one(plan: PlannedRun, options: Options, subject: Subject, most: int, again: float | None) -> SubjectSummary:
    part, name, is_op = options.part, subject.name, subject.what is SubjectKind.op
    graph, fixed = part.graph, subject.what is SubjectKind.buffer
    found, more = ((), 0) if fixed else options.of(name, most, again)
    if is_op:
        written = graph.op(name).outputs
        items = [item for item in part.items() if item.op == name or item.value in written]
    else:
        whose, own = graph.values[name].origin, (ItemKind.gradient, ItemKind.optimizer)
        items = [item for item in part.items() if item.value == name or (item.kind in own and item.name == whose)]
    seconds = {kind: sum(item.seconds for item in items if item.kind is kind) for kind in ItemKind}
    moved = (item for item in items if item.kind not in (ItemKind.op, ItemKind.optimizer))
    return SubjectSummary(
        what=subject.what,
        name=name if is_op else whose,
        about=_about(graph, subject),
        partition=part.number if plan.plan.pipelined else None,
        chosen=found[0].choice if found else "R: a buffer is whole on every device",
        step_seconds=plan.plan.prediction.step_seconds,
        compute_seconds=seconds[ItemKind.op],
        communication_seconds=sum(item.seconds for item in moved),
        optimizer_seconds=seconds[ItemKind.optimizer],
        held=tuple(_held(part, subject)),
        conversions=tuple(item for item in items if item.kind is ItemKind.conversion),
        options=found,
        more=more,
        never=() if fixed else tuple(_never_split(part, options.choices, subject)),
    )


def _about(graph: OpGraph, subject: Subject) -> str:
    def shape(name: str) -> str:
        return "x".join(map(str, graph.values[name].type.shape)) or "scalar"

    if subject.what is SubjectKind.op:
        op = graph.op(subject.name)
        read, made = (", ".join(f"{name} {shape(name)}" for name in names) for names in (op.inputs, op.outputs))
        return f"{op.target} of {op.module or WHOLE_MODEL} ({op.source}): {read} -> {made}"
    readers = [f"{op.name} ({op.module or WHOLE_MODEL})" for op in graph.consumers()[subject.name]]
    shown = ", ".join(readers[:3]) + (f" and {len(readers) - 3} more" if len(readers) > 3 else "")
    return f"{shape(subject.name)} {graph.values[subject.name].type.dtype}, read by {shown or 'nothing'}"


def _held(part: ItemisedPartition, subject: Subject) -> Iterator[HeldBytes]:
    graph, name, local = part.graph, subject.name, part.sharded.local_bytes
    if subject.what is SubjectKind.op:
        op, strategy = graph.op(name), part.sharding.strategies[name]
        layouts = dict(zip((*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs), strict=True))
        yield HeldBytes("writes", sum(local(own, layouts[own]) for own in op.outputs))
        saved = [own for own in part.profile.ops[name].saves if own in layouts]
        yield HeldBytes("keeps for backward", sum(local(own, layouts[own]) for own in saved))
    elif subject.what is SubjectKind.parameter:
        yield HeldBytes("value", local(name, part.sharding.storage[graph.values[name].origin]))
        yield HeldBytes("value, gradient and optimizer state", round(part.parameters[name].resident))
    else:
        layout = part.sharding.inputs.get(name)
        yield HeldBytes("value", local(name, layout) if layout else graph.values[name].type.nbytes)


def _never_split(part: ItemisedPartition, choices: Choices, subject: Subject) -> Iterator[ImpossibleSplit]:
    """Dims that no option splits over an axis, and why."""
    graph, name = part.graph, subject.name
    offered: dict[str, list[Layout]] = defaultdict(list)  # by tensor, of all options
    if subject.what is SubjectKind.op:
        op = graph.op(name)
        for strategy in choices.ops[name]:
            for tensor, layout in zip((*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs), strict=True):
                offered[tensor].append(layout)
        rule = rule_of(op)
        otherwise = "the op has no rule, and none was found by trying"
        if rule is not None:
            otherwise = f"not offered by its rule `{rule.line(view_op(graph, op))}`"
    elif name in choices.storage:
        offered[name] = [layout for way in choices.storage[name] for layout in (way.layout, way.state)]
        otherwise = "no op reads it split so, and ZeRO splits another dim"
    else:
        offered[name] = [*choices.inputs[name]]
        otherwise = "no op that reads it is offered that split"
    for tensor, layouts in offered.items():
        value = graph.values[tensor]
        shown = tensor if value.role in (Role.RESULT, Role.ENTERS) else value.origin
        for number, axis in enumerate(part.cluster.axes):
            split = {layout.states[number].dim for layout in layouts if layout.states[number].kind == "S"}
            for dim, size in enumerate(value.type.shape):
                if dim not in split and axis.size > 1:
                    why = f"{size} does not divide by {axis.size}" if size % axis.size else otherwise
                    yield ImpossibleSplit(shown, dim, size, axis.name, why)
