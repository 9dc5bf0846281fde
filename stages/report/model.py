"""The model as blocks: of links that are equal but for the layer they belong to, one body.

In a body `{}` stands for the place of the link in the model, `layers.7`; so equal layers have equal bodies, and a page
of 96 layers is about as large as one of two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.ir.graph import OpGraph, Role
from pipeline.ir.program import Call, Convert, Step, Tensor
from pipeline.sharding.conversions import conversion_of, made_again, step_axis
from stages.report.priced import PricedPartition, class_of

HERE = "{}"
LONGEST_PERIOD = 24  # links of a layer, at most, that are seen to repeat


@dataclass(frozen=True)
class TensorFacts:
    name: str
    layout: str
    shape: tuple[int, ...]
    local: tuple[int, ...]  # of a rank's shard
    dtype: str


@dataclass(frozen=True)
class OpFacts:
    """A line of the program: an op, or with `conversion` a step of the conversion table."""

    name: str  # of the op without its family, or of the function that converts
    module: str
    kind: str  # class of op, or `conversion`
    reads: tuple[TensorFacts, ...]
    writes: tuple[TensorFacts, ...]
    forward: float | None  # seconds of a micro-batch, or None where they are not known
    backward: float | None
    axis: int | None = None  # of a conversion
    moves: str = ""  # of a conversion: what it does forward, and backward
    source: str = ""  # the user's line


@dataclass(frozen=True)
class ParameterFacts:
    name: str
    stored: str
    state: str  # of the optimizer, where it lies otherwise
    regathered: bool
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Body:
    partition: int
    title: str
    steps: tuple[OpFacts, ...]
    parameters: tuple[ParameterFacts, ...]
    forward: float | None
    backward: float | None


@dataclass(frozen=True)
class LinkPlace:
    number: int | None  # None: what runs before the chain
    at: str  # what `{}` is in its body
    body: int


@dataclass(frozen=True)
class Fold:
    """So many times the same `period` bodies one after another, from that place in the list of links."""

    first: int
    period: int
    times: int


@dataclass(frozen=True)
class ModelFacts:
    bodies: tuple[Body, ...]
    links: tuple[LinkPlace, ...]
    folds: tuple[Fold, ...]


def model_of(parts: tuple[PricedPartition, ...]) -> ModelFacts:
    bodies: dict[Body, int] = {}
    links: list[LinkPlace] = []
    for part in parts:
        before = (*part.program.prologue, *part.program.shared)
        listed: list[tuple[int | None, tuple[Step, ...]]] = [(None, before)] if before else []
        listed += [(part.partition.first + n, steps) for n, steps in enumerate(part.program.links)]
        for number, steps in listed:
            at, body = _body(part, number, steps)
            links.append(LinkPlace(number, at, bodies.setdefault(body, len(bodies))))
    return ModelFacts(tuple(bodies), tuple(links), folds_of(tuple(link.body for link in links)))


def folds_of(bodies: tuple[int, ...]) -> tuple[Fold, ...]:
    """The sequence as runs that repeat, each as long as can be; what does not repeat is a run of its own."""
    found: list[Fold] = []
    at = 0
    while at < len(bodies):
        period, times = max(
            ((period, _times(bodies, at, period)) for period in range(1, LONGEST_PERIOD + 1)),
            key=lambda one: (one[0] * one[1] if one[1] > 1 else 1, -one[0]),
        )
        fold = Fold(at, period, times) if times > 1 else Fold(at, 1, 1)
        found.append(fold)
        at += fold.period * fold.times
    return tuple(found)


def _times(bodies: tuple[int, ...], at: int, period: int) -> int:
    pattern, times = bodies[at : at + period], 1
    while bodies[at + times * period : at + (times + 1) * period] == pattern:
        times += 1
    return times


def place_of(graph: OpGraph, ops: tuple[str, ...]) -> str:
    """The numbered module that the ops belong to: `layers.7`; empty where they have none, or several, in common."""
    found = {match[0] for op in ops if (match := re.match(r".*?\.\d+(?=\.|$)", graph.op(op).module))}
    return found.pop() if len(found) == 1 else ""


def _body(part: PricedPartition, number: int | None, steps: tuple[Step, ...]) -> tuple[str, Body]:
    calls = [step for step in steps if isinstance(step, Call)]
    at = place_of(part.graph, tuple(call.op for call in calls)) if number is not None else ""
    writer = _Writer(part, at, steps, calls)
    lines = tuple(map(writer.line, steps))
    modules = [line.module for line in lines if line.kind != "conversion"]
    title = "before the chain" if number is None else _title(modules)
    known = all(line.forward is not None and line.backward is not None for line in lines)
    forward = sum(line.forward or 0.0 for line in lines) if known else None
    backward = sum(line.backward or 0.0 for line in lines) if known else None
    return at, Body(part.number, title, lines, tuple(writer.parameters()), forward, backward)


def _title(modules: list[str]) -> str:
    """The first module and how the link goes on: its own name where all are inside it."""
    named = list(dict.fromkeys(name for name in modules if name and name != HERE))
    if not named:
        return HERE if HERE in modules else "the model itself"
    return named[0] if len(named) == 1 else f"{named[0]} … {named[-1].removeprefix(HERE + '.')}"


class _Writer:
    """Names the values of one link as every equal link names them."""

    def __init__(self, part: PricedPartition, at: str, steps: tuple[Step, ...], calls: list[Call]) -> None:
        self.part, self.at, self.calls = part, at, calls
        self.kept = part.kept(steps)
        self.writers = {
            tensor.value: f"{self._short(call.op)} {n}" for n, call in enumerate(calls) for tensor in call.outputs
        }
        self.input = next((link.input for link in part.graph.chain if calls and calls[0].op in link.ops), None)

    def line(self, step: Step) -> OpFacts:
        seconds = self.part.seconds(step, self.kept)
        forward, backward = (seconds.forward, seconds.backward) if seconds else (None, None)
        if isinstance(step, Convert):
            return self._conversion(step, forward, backward)
        op = self.part.graph.op(step.op)
        free = bool(self.part.priced and self.part.priced.profile.ops[step.op].free)
        return OpFacts(
            name=self._short(step.op),
            module=self._inside(op.module),
            kind=class_of(op.target, free),
            reads=tuple(map(self._tensor, step.inputs)),
            writes=tuple(map(self._tensor, step.outputs)),
            forward=forward,
            backward=backward,
            source=op.source,
        )

    def _conversion(self, step: Convert, forward: float | None, backward: float | None) -> OpFacts:
        ends = step.source.layout, step.target.layout
        entry = conversion_of(*ends, self.part.sizes)
        entry = made_again(entry) if step.again else entry
        back = " + ".join(filter(None, (entry.again, entry.backward)))
        return OpFacts(
            name=entry.function,
            module="",
            kind="conversion",
            reads=(self._tensor(step.source),),
            writes=(self._tensor(step.target),),
            forward=forward,
            backward=backward,
            axis=step_axis(*ends, self.part.sizes),
            moves=f"forward {entry.forward or 'nothing'}, backward {back or 'nothing'}".replace("_", "-"),
        )

    def parameters(self) -> list[ParameterFacts]:
        sharding, values = self.part.partition.sharding, self.part.graph.values
        read = dict.fromkeys(tensor.value for call in self.calls for tensor in call.inputs)
        return [
            ParameterFacts(
                name=self._inside(value.origin),
                stored=str(sharding.storage[value.origin]),
                state=str(sharding.state.get(value.origin) or ""),
                regathered=value.origin in sharding.regathered,
                shape=value.type.shape,
            )
            for value in map(values.__getitem__, read)
            if value.role is Role.PARAMETER
        ]

    def _tensor(self, tensor: Tensor) -> TensorFacts:
        value, layout = self.part.graph.values[tensor.value], tensor.layout
        name = self.writers.get(tensor.value) or ("what enters" if tensor.value == self.input else tensor.value)
        if value.role in (Role.PARAMETER, Role.BUFFER):
            name = self._inside(value.origin)
        local = layout.local_shape(value.type.shape, self.part.sizes)
        return TensorFacts(name, str(layout), value.type.shape, local, value.type.dtype)

    def _short(self, op: str) -> str:
        target = self.part.graph.op(op).target
        return target.split(".")[1] if target.count(".") > 1 else target

    def _inside(self, name: str) -> str:
        if self.at and (name == self.at or name.startswith(f"{self.at}.")):
            return HERE + name[len(self.at) :]
        return name
