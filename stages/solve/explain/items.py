"""A step as a list of items that add up to its price: ops, conversions, gradient sums and optimizer, each with seconds.

What `pipeline.cost.step.Priced.step` adds up is listed here one by one, in the order of the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pipeline.cost.step import Priced
from pipeline.ir.cluster import COLLECTIVES
from pipeline.ir.graph import Role
from pipeline.ir.program import Call, Convert, Step
from pipeline.sharding.conversions import conversion_of, made_again, step_axis


class Kind(StrEnum):
    op = "op"
    talk = "inside an op"  # collectives of its local form
    conversion = "conversion"
    gradient = "gradient sum"  # and, with ZeRO-1, new values gathered
    optimizer = "optimizer"


@dataclass(frozen=True)
class Item:
    kind: Kind
    name: str  # of the op, of the value, of the parameter
    module: str  # that it belongs to
    what: str  # the op's target, or the conversion's function
    how: str  # strategy, or layouts
    forward: float  # seconds of a step, all micro-batches
    backward: float
    collectives: tuple[str, ...] = ()  # `all_reduce over d0`
    op: str = ""  # for which a conversion is made: the first that reads it
    value: str = ""  # of a conversion

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def items_of(priced: Priced) -> tuple[Item, ...]:
    """Their seconds add up to the price of the step."""
    graph, cluster, sharding, program = priced.graph, priced.cluster, priced.sharding, priced.program
    found: list[Item] = []
    passes = [(program.prologue, program.micro_batches), (program.shared, 1)]
    for steps, times in (*passes, *((steps, program.micro_batches) for steps in program.links)):
        found += _of_steps(priced, steps, times)
    for name, price in priced.parameters.items():
        origin, axes = graph.values[name].origin, program.reduced.get(name, ())
        over = "+".join(cluster.axes[axis].name for axis in axes)
        state = sharding.state.get(origin)
        moved = ("reduce_scatter", "all_gather") if state else ("all_reduce",)
        how = f"{sharding.storage[origin]}" + (f", state {state}" if state else "")
        module = origin.rpartition(".")[0]
        if price.gradient_sum:
            named = tuple(f"{one} over {over}" if over else one for one in moved)
            found.append(Item(Kind.gradient, origin, module, " + ".join(moved), how, 0.0, price.gradient_sum, named))
        found.append(Item(Kind.optimizer, origin, module, "optimizer", how, 0.0, price.optimizer))
    return tuple(found)


def _of_steps(priced: Priced, steps: tuple[Step, ...], times: int) -> Iterator[Item]:
    kept = priced.kept_by(steps)
    for number, step in enumerate(steps):
        if isinstance(step, Convert):
            yield _conversion(priced, step, step.source.value in kept, times, _reader(steps[number:]))
            continue
        op, strategy = priced.graph.op(step.op), priced.sharded.strategy(step.op)
        ran = priced.op(op.name)
        how = f"{strategy.name}: {', '.join(map(str, strategy.outputs))}"
        yield Item(Kind.op, op.name, op.module, op.target, how, times * ran.forward, times * ran.backward, op=op.name)
        said = priced.collectives_inside(op.name)
        if said.total:
            bodies = zip(priced.cluster.axes, strategy.body.split(","), strict=False)
            over = "+".join(axis.name for axis, body in bodies if body)
            named = (f"inside the op over {over}",)
            there, back = times * said.forward, times * said.backward
            yield Item(Kind.talk, op.name, op.module, op.target, how, there, back, named, op.name)


def _reader(steps: tuple[Step, ...]) -> str:
    """The op for which a conversion is made, at the beginning of these steps; none for the loss that leaves."""
    assert isinstance(steps[0], Convert)
    wanted = {steps[0].target}
    for step in steps:
        if isinstance(step, Convert) and step.source in wanted:
            wanted.add(step.target)
        elif isinstance(step, Call) and wanted.intersection(step.inputs):
            return step.op
    return ""


def _conversion(priced: Priced, step: Convert, kept: bool, times: int, reader: str) -> Item:
    graph, cluster = priced.graph, priced.cluster
    value, ends = graph.values[step.source.value], (step.source.layout, step.target.layout)
    entry = conversion_of(*ends, cluster.sizes)
    entry = made_again(entry) if step.again and kept else entry
    axis = cluster.axes[step_axis(*ends, cluster.sizes)].name
    seconds = priced.conversion(step, kept)
    moves = (entry.forward, entry.again, entry.backward) if value.grad else (entry.forward,)
    named = tuple(f"{move} over {axis}" for move in moves if move in COLLECTIVES)
    parameter = value.role is Role.PARAMETER
    name = value.origin if parameter else value.name
    module = value.origin.rpartition(".")[0] if parameter else graph.op(reader).module if reader else ""
    how = f"{ends[0]} -> {ends[1]}"
    there, back = times * seconds.forward, times * seconds.backward
    return Item(Kind.conversion, name, module, entry.function, how, there, back, named, reader, value.name)
