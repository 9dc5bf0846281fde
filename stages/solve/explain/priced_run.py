"""A run's plan with all that prices it: its partitions, and of each the items that add up to the price of its step.

What `pipeline.cost.step.Priced.step` adds up is listed one by one: ops, conversions, gradient sums and the optimizer,
in the order of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from shardwright.pipeline.base.artifacts import Artifact
from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.cost.parts import priced_parts
from shardwright.pipeline.cost.step import Priced
from shardwright.pipeline.ir.cluster import COLLECTIVES, Cluster
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.plan import Frontier, Plan
from shardwright.pipeline.ir.profile import Profile, as_run
from shardwright.pipeline.ir.program import Call, Convert, Step
from shardwright.pipeline.sharding.conversions import conversion_of, made_again, step_axis
from shardwright.pipeline.sharding.slices import sliced

KINDS = ("graph", "profile", "cluster", "frontier", "plan")


class ExplainError(ShardwrightError):
    """Something that cannot be explained: a name that is not known, a run that is not whole."""


class ItemKind(StrEnum):
    op = "op"
    talk = "inside an op"  # collectives of its local form
    conversion = "conversion"
    gradient = "gradient sum"  # and, with ZeRO-1, new values gathered
    optimizer = "optimizer"


@dataclass(frozen=True)
class Item:
    kind: ItemKind
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


@dataclass(frozen=True)
class ItemisedPartition(Priced):
    """A partition on its mesh; the whole model where there is no pipeline."""

    number: int

    def items(self) -> tuple[Item, ...]:
        """Their seconds add up to the price of the step."""
        graph, sharding, program = self.graph, self.sharding, self.program
        found: list[Item] = []
        passes = [(program.prologue, program.micro_batches), (program.shared, 1)]
        for steps, times in (*passes, *((steps, program.micro_batches) for steps in program.links)):
            found += self._of_steps(steps, times)
        for name, price in self.parameters.items():
            origin, axes = graph.values[name].origin, program.reduced.get(name, ())
            over = "+".join(self.cluster.axes[axis].name for axis in axes)
            state = sharding.state.get(origin)
            moved = ("reduce_scatter", "all_gather") if state else ("all_reduce",)
            how = f"{sharding.storage[origin]}" + (f", state {state}" if state else "")
            module, seconds = origin.rpartition(".")[0], price.gradient_sum
            if seconds:
                named = tuple(f"{one} over {over}" if over else one for one in moved)
                found.append(Item(ItemKind.gradient, origin, module, " + ".join(moved), how, 0.0, seconds, named))
            found.append(Item(ItemKind.optimizer, origin, module, "optimizer", how, 0.0, price.optimizer))
        return tuple(found)

    def _of_steps(self, steps: tuple[Step, ...], times: int) -> Iterator[Item]:
        kept = self.kept_by(steps)
        for number, step in enumerate(steps):
            if isinstance(step, Convert):
                yield self._conversion(step, step.source.value in kept, times, _reader(steps[number:]))
                continue
            op, strategy = self.graph.op(step.op), self.sharded.strategy(step.op)
            ran = self.op(op.name)
            named = (op.name, op.module, op.target, f"{strategy.name}: {', '.join(map(str, strategy.outputs))}")
            yield Item(ItemKind.op, *named, times * ran.forward, times * ran.backward, op=op.name)
            said = self.collectives_inside(op.name)
            if said.total:
                bodies = zip(self.cluster.axes, strategy.body.split(","), strict=False)
                over = "+".join(axis.name for axis, body in bodies if body)
                there, back = times * said.forward, times * said.backward
                yield Item(ItemKind.talk, *named, there, back, (f"inside the op over {over}",), op.name)

    def _conversion(self, step: Convert, kept: bool, times: int, reader: str) -> Item:
        cluster, value = self.cluster, self.graph.values[step.source.value]
        ends = (step.source.layout, step.target.layout)
        entry = conversion_of(*ends, cluster.sizes)
        entry = made_again(entry) if step.again and kept else entry
        axis = cluster.axes[step_axis(*ends, cluster.sizes)].name
        seconds = self.conversion(step, kept)
        moves = (entry.forward, entry.again, entry.backward) if value.grad else (entry.forward,)
        named = tuple(f"{move} over {axis}" for move in moves if move in COLLECTIVES)
        parameter = value.role is Role.PARAMETER
        name = value.origin if parameter else value.name
        module = value.origin.rpartition(".")[0] if parameter else self.graph.op(reader).module if reader else ""
        how = f"{ends[0]} -> {ends[1]}"
        there, back = times * seconds.forward, times * seconds.backward
        return Item(ItemKind.conversion, name, module, entry.function, how, there, back, named, reader, value.name)


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


@dataclass(frozen=True)
class PlannedRun:
    graph: OpGraph
    profile: Profile
    cluster: Cluster
    frontier: Frontier
    plan: Plan
    parts: tuple[ItemisedPartition, ...]
    config: dict[str, str]  # group or key of the configuration -> digest

    def busiest(self) -> ItemisedPartition:
        """The partition whose devices have most to do in a step: those that the step waits for."""
        return max(self.parts, key=lambda part: part.step.seconds)


def planned(found: Mapping[str, Artifact]) -> PlannedRun:
    """Of artifacts that belong together."""
    profile, cluster, frontier, plan = (found[kind].body for kind in KINDS[1:])
    graph = as_run(found["graph"].body, profile.types)
    cut, costs = sliced(graph, profile, plan.slices)
    parts = []
    for number, (one, own) in enumerate(
        zip(plan.partitions, priced_parts(plan, cut, costs, cluster, frontier), strict=True)
    ):
        if own is None:
            axes = " x ".join(f"{name}={size}" for name, size in one.axes)
            what, remedy = f"the frontier has no mesh {axes}", "run `dvc repro checkpoint`"
            raise ExplainError(what, where="runs/solve", remedy=remedy)
        parts.append(ItemisedPartition(own.sharded, own.ops, own.optimizer_copies, number))
    if not plan.pipelined:
        graph, profile, frontier = cut, costs, replace(frontier, micro_batches=plan.micro_batches)
    return PlannedRun(graph, profile, cluster, frontier, plan, tuple(parts), dict(found["plan"].config))
