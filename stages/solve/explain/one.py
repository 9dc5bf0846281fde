"""One parameter, input or op: what was chosen for it, what that costs, what else there was, and what there was not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.ir.graph import Op, OpGraph, Role, TensorType
from pipeline.ir.layout import Layout
from pipeline.ops.mesh import view_op
from pipeline.ops.table import rule_of
from stages.solve.explain.items import Item, Kind
from stages.solve.explain.names import Subject, What
from stages.solve.explain.options import Option, Options
from stages.solve.explain.part import ExplainError, Part, Planned
from stages.solve.problem.build import Choices


@dataclass(frozen=True)
class Held:
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
    held: tuple[Held, ...]
    conversions: tuple[Item, ...]
    options: tuple[Option, ...]
    more: int  # options that were not priced in full: they are slower
    never: tuple[Never, ...]


def home_of(plan: Planned, subject: Subject) -> Part:
    """The partition that has it: of several the first."""
    for part in plan.parts:
        if subject.name in part.sharding.strategies if subject.what is What.op else subject.name in part.graph.values:
            return part
    raise ExplainError(f"the plan has no {subject.what} {subject.name!r}", remedy="run `dvc repro checkpoint`")


def explain_one(plan: Planned, options: Options, subject: Subject, most: int, again: float | None) -> One:
    part, name = options.part, subject.name
    fixed = subject.what is What.buffer
    found, more = ((), 0) if fixed else options.of(name, most, again)
    items = [item for item in part.items() if _is_of(item, part.graph, subject)]
    moved = sum(item.seconds for item in items if item.kind not in (Kind.op, Kind.optimizer))
    return One(
        what=subject.what,
        name=name if subject.what is What.op else part.graph.values[name].origin,
        about=_about(part.graph, subject),
        partition=part.number if plan.plan.pipelined else None,
        chosen=found[0].choice if found else "R: a buffer is whole on every device",
        step_seconds=plan.plan.prediction.step_seconds,
        compute_seconds=sum(item.seconds for item in items if item.kind is Kind.op),
        communication_seconds=moved,
        optimizer_seconds=sum(item.seconds for item in items if item.kind is Kind.optimizer),
        held=tuple(_held(part, subject)),
        conversions=tuple(item for item in items if item.kind is Kind.conversion),
        options=found,
        more=more,
        never=() if fixed else tuple(never_split(part, options.choices, subject)),
    )


def _is_of(item: Item, graph: OpGraph, subject: Subject) -> bool:
    if subject.what is not What.op:
        value = graph.values[subject.name]
        own = item.kind in (Kind.gradient, Kind.optimizer) and item.name == value.origin
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


def _held(part: Part, subject: Subject) -> Iterator[Held]:
    graph, local = part.graph, part.priced.sharded.local_bytes
    if subject.what is What.op:
        op, strategy = graph.op(subject.name), part.sharding.strategies[subject.name]
        layouts = dict(zip((*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs), strict=True))
        yield Held("writes", sum(local(name, layouts[name]) for name in op.outputs))
        saved = [name for name in part.priced.profile.ops[op.name].saves if name in layouts]
        yield Held("keeps for backward", sum(local(name, layouts[name]) for name in saved))
    elif subject.what is What.parameter:
        stored = part.sharding.storage[graph.values[subject.name].origin]
        yield Held("value", local(subject.name, stored))
        yield Held("value, gradient and optimizer state", round(part.priced.parameters[subject.name].resident))
    else:
        layout = part.sharding.inputs.get(subject.name)
        whole = graph.values[subject.name].type.nbytes
        yield Held("value", local(subject.name, layout) if layout else whole)


# ------------------------------------------------------------------------------------------------ what is not offered


def never_split(part: Part, choices: Choices, subject: Subject) -> Iterator[Never]:
    """Dims that no option splits over an axis, and why."""
    graph, name = part.graph, subject.name
    if subject.what is What.op:
        op = graph.op(name)
        for tensor in dict.fromkeys((*op.inputs, *op.outputs)):
            layouts = [layout for s in choices.ops[name] for n, layout in _of(op, s.inputs, s.outputs) if n == tensor]
            yield from _never(part, tensor, layouts, _rule(graph, op))
        return
    if name in choices.storage:
        layouts = [layout for way in choices.storage[name] for layout in (way.layout, way.state)]
        yield from _never(part, name, layouts, "no op reads it split so, and ZeRO splits another dim")
    else:
        yield from _never(part, name, choices.inputs[name], "no op that reads it is offered that split")


def _of(op: Op, inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> Iterator[tuple[str, Layout]]:
    yield from zip((*op.inputs, *op.outputs), (*inputs, *outputs), strict=True)


def _rule(graph: OpGraph, op: Op) -> str:
    rule = rule_of(op)
    if rule is None:
        return "the op has no rule, and none was found by trying"
    return f"not offered by its rule `{rule.line(view_op(graph, op))}`"


def _never(part: Part, tensor: str, layouts: Sequence[Layout], otherwise: str) -> Iterator[Never]:
    value = part.graph.values[tensor]
    for number, axis in enumerate(part.cluster.axes):
        split = {layout.states[number].dim for layout in layouts if layout.states[number].kind == "S"}
        for dim, size in enumerate(value.type.shape):
            if dim not in split and axis.size > 1:
                why = f"{size} does not divide by {axis.size}" if size % axis.size else otherwise
                name = tensor if value.role in (Role.RESULT, Role.ENTERS) else value.origin
                yield Never(name, dim, size, axis.name, why)
