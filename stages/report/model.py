"""The model as blocks: of links that are equal but for the layer they belong to, one body.

In a body `{}` stands for the place of the link in the model, `layers.7`; so equal layers have equal bodies, and a page
of 96 layers is about as large as one of two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.program import Call, Convert, Step, Tensor
from shardwright.pipeline.sharding.conversions import conversion_of, made_again, step_axis
from shardwright.stages.report.priced import PricedPartition, class_of, short_name

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
        program = part.sharded.program
        before = (*program.prologue, *program.shared)
        listed: list[tuple[int | None, tuple[Step, ...]]] = [(None, before)] if before else []
        for number, steps in [*listed, *enumerate(program.links, part.partition.first)]:
            at, body = _body(part, number, steps)
            links.append(LinkPlace(number, at, bodies.setdefault(body, len(bodies))))
    return ModelFacts(tuple(bodies), tuple(links), folds_of(tuple(link.body for link in links)))


def folds_of(bodies: tuple[int, ...]) -> tuple[Fold, ...]:
    """The sequence as runs that repeat, each as long as can be; what does not repeat is a run of its own."""
    found: list[Fold] = []
    at = 0
    while at < len(bodies):
        runs = [Fold(at, period, _times(bodies, at, period)) for period in range(1, LONGEST_PERIOD + 1)]
        repeated = [fold for fold in runs if fold.times > 1]
        fold = max(repeated, key=lambda fold: (fold.period * fold.times, -fold.period), default=Fold(at, 1, 1))
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
    ops = tuple(step.op for step in steps if isinstance(step, Call))
    at = place_of(part.sharded.graph, ops) if number is not None else ""
    writer = _Writer(part, at, steps)
    lines = tuple(map(writer.line, steps))
    modules = [line.module for line in lines if line.kind != "conversion"]
    title = "before the chain" if number is None else _title(modules)
    forward = sum(line.forward or 0.0 for line in lines) if part.priced else None
    backward = sum(line.backward or 0.0 for line in lines) if part.priced else None
    return at, Body(part.number, title, lines, tuple(writer.parameters()), forward, backward)


def _title(modules: list[str]) -> str:
    """The first module and how the link goes on: its own name where all are inside it."""
    named = list(dict.fromkeys(name for name in modules if name and name != HERE))
    if not named:
        return HERE if HERE in modules else "the model itself"
    return named[0] if len(named) == 1 else f"{named[0]} … {named[-1].removeprefix(HERE + '.')}"


class _Writer:
    """Names the values of one link as every equal link names them."""

    def __init__(self, part: PricedPartition, at: str, steps: tuple[Step, ...]) -> None:
        self.part, self.graph, self.priced, self.at = part, part.sharded.graph, part.priced, at
        self.calls = [step for step in steps if isinstance(step, Call)]
        self.kept = part.priced.kept_by(steps) if part.priced else set()
        self.writers = {
            tensor.value: f"{self._short(call)} {n}" for n, call in enumerate(self.calls) for tensor in call.outputs
        }
        first = self.calls[0].op if self.calls else None
        self.input = next((link.input for link in self.graph.chain if first in link.ops), None)

    def line(self, step: Step) -> OpFacts:
        forward = backward = None
        if self.priced:
            kept = isinstance(step, Convert) and step.source.value in self.kept
            seconds = self.priced.conversion(step, kept) if isinstance(step, Convert) else self.priced.op(step.op)
            forward, backward = seconds.forward, seconds.backward
        if isinstance(step, Convert):
            return self._conversion(step, forward, backward)
        op = self.graph.op(step.op)
        return OpFacts(
            name=self._short(step),
            module=self._inside(op.module),
            kind=class_of(op.target, bool(self.priced and self.priced.profile.ops[step.op].free)),
            reads=tuple(map(self._tensor, step.inputs)),
            writes=tuple(map(self._tensor, step.outputs)),
            forward=forward,
            backward=backward,
            source=op.source,
        )

    def _conversion(self, step: Convert, forward: float | None, backward: float | None) -> OpFacts:
        ends, sizes = (step.source.layout, step.target.layout), self.part.sharded.sizes
        entry = conversion_of(*ends, sizes)
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
            axis=step_axis(*ends, sizes),
            moves=f"forward {entry.forward or 'nothing'}, backward {back or 'nothing'}".replace("_", "-"),
        )

    def parameters(self) -> Iterator[ParameterFacts]:
        sharding = self.part.partition.sharding
        for name in dict.fromkeys(tensor.value for call in self.calls for tensor in call.inputs):
            value = self.graph.values[name]
            if value.role is Role.PARAMETER:
                stored, state = sharding.storage[value.origin], sharding.state.get(value.origin)
                again = value.origin in sharding.regathered
                yield ParameterFacts(self._inside(value.origin), str(stored), str(state or ""), again, value.type.shape)

    def _tensor(self, tensor: Tensor) -> TensorFacts:
        value, layout = self.graph.values[tensor.value], tensor.layout
        name = self.writers.get(tensor.value) or ("what enters" if tensor.value == self.input else tensor.value)
        if value.role in (Role.PARAMETER, Role.BUFFER):
            name = self._inside(value.origin)
        local = layout.local_shape(value.type.shape, self.part.sharded.sizes)
        return TensorFacts(name, str(layout), value.type.shape, local, value.type.dtype)

    def _short(self, call: Call) -> str:
        return short_name(self.graph.op(call.op).target)

    def _inside(self, name: str) -> str:
        if self.at and (name == self.at or name.startswith(f"{self.at}.")):
            return HERE + name[len(self.at) :]
        return name
