"""Ways of working in parallel that have names, as sets of choices: for the user's `only`, and for the baselines.

On one axis of the mesh, with the same costs for all:

| role      | inputs of the step | ops                                            | parameters                    |
|-----------|--------------------|------------------------------------------------|-------------------------------|
| data      | split on dim 0     | split on the samples of their activations (1) | whole; gradients summed |
| zero1..3  | same               | same                                           | as the forms of ZeRO say      |
| tensor    | whole              | those with a weight split it, if they can      | split as they are read        |
| sequence  | whole              | same; between the blocks split on the sequence, if they can (2) | same         |

(1) Those lie on dim 0, or where the ops since the step's inputs have put them: a recurrent layer takes them on dim 1.
    Not where nothing of the step's inputs comes in, as in a table of positions: it has no samples.
(2) Norms, dropouts and sums of the residual stream (sequence_region.py). Where none of them can, there is no such way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import product

from shardwright.pipeline.ir.graph import Op, OpGraph, Role
from shardwright.pipeline.ir.layout import Layout, State
from shardwright.pipeline.ir.plan import Strategy
from shardwright.pipeline.ops.samples import samples_of
from shardwright.stages.solve.problem.build import Choices
from shardwright.stages.solve.problem.sequence_region import between_blocks, has_large_weight
from shardwright.stages.solve.problem.storage import Stored, Way


class Parallel(StrEnum):
    data = "data"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"
    tensor = "tensor"
    sequence = "sequence"


DATA = (Parallel.data, Parallel.zero1, Parallel.zero2, Parallel.zero3)
Kept = tuple[tuple[int, ...], ...]  # per node the choices that are left
WAYS = {Parallel.zero1: Way.zero1, Parallel.zero2: Way.gathered, Parallel.zero3: Way.regathered}


@dataclass(frozen=True)
class Families:
    """The choices of a problem that each role leaves on an axis."""

    graph: OpGraph
    choices: Choices

    def kept(self, roles: tuple[Parallel, ...]) -> tuple[tuple[int, ...], ...] | None:
        """Per node the choices that are left with these roles of the axes; None where that is not possible."""
        index = self.choices.index
        if any(role is Parallel.sequence and not self.splits_sequence(axis) for axis, role in enumerate(roles)):
            return None
        found: list[tuple[int, ...]] = [()] * len(index)
        for name, number in index.items():
            found[number] = self._of(name, roles)
        return tuple(found) if all(found) else None

    def replicated(self, kept: Kept, axis: int) -> Kept:
        """Of these choices, the ones that leave whole on an axis what lies between the blocks and is trained there."""
        found = list(self.parameters_whole(kept, axis))
        for name in self._between:
            number, options = self.choices.index[name], self.choices.ops[name]
            split = [any(layout.states[axis].kind == "S" for layout in own.outputs) for own in options]
            found[number] = tuple(k for k in kept[number] if not split[k]) or kept[number]
        return tuple(found)

    def parameters_whole(self, kept: Kept, axis: int) -> Kept:
        """Of these choices, the ones that store whole what no op with a large weight reads, such as that of a norm."""
        found, readers = list(kept), self.graph.consumers()
        for name, ways in self.choices.storage.items():
            if not any(has_large_weight(self.graph, op) for op in readers[name]):
                number = self.choices.index[name]
                found[number] = tuple(k for k in kept[number] if ways[k].layout.states[axis].kind == "R")
        return tuple(found)

    def any_of(self, name: str, roles: tuple[Parallel, ...], axes: int) -> tuple[int, ...]:
        """The choices of a node that some assignment of these roles to the axes leaves; all, where no role is named."""
        count = next(len(group[name]) for group in (*self._groups(), {name: (0,)}) if name in group)
        if not roles:
            return tuple(range(count))
        return tuple(sorted({k for chosen in product(roles, repeat=axes) for k in self._of(name, chosen)}))

    def splits_sequence(self, axis: int) -> bool:
        """Whether there are ops between the blocks that the axis can split along the sequence."""
        return any(self._along(name, range(len(self.choices.ops[name])), axis) for name in self._between)

    def _groups(self) -> tuple[Mapping[str, tuple[object, ...]], ...]:
        return self.choices.storage, self.choices.inputs, self.choices.ops

    def _of(self, name: str, roles: tuple[Parallel, ...]) -> tuple[int, ...]:
        if name in self.choices.storage:
            return _storage(self.choices.storage[name], roles)
        if name in self.choices.inputs:
            layouts = self.choices.inputs[name]
            return tuple(
                k for k in range(len(layouts)) if all(_input(layouts, k, a, role) for a, role in enumerate(roles))
            )
        if name not in self.choices.ops:
            return (0,)  # a buffer is whole
        options = self.choices.ops[name]
        left = tuple(range(len(options)))
        for axis, role in enumerate(roles):
            left = self._op(name, options, left, axis, role)
        return left

    def _op(
        self, name: str, options: tuple[Strategy, ...], left: tuple[int, ...], axis: int, role: Parallel
    ) -> tuple[int, ...]:
        """Of the strategies that are left those that the role is about; where there is none, those without a split."""
        op = self.graph.op(name)
        weights = [i for i, n in enumerate(op.inputs) if self.graph.values[n].role is Role.PARAMETER]
        samples = samples_of(self.graph)

        def splits_samples(k: int) -> bool:
            """Of the activations that have samples one is split at least, and none elsewhere."""
            named = [*zip(op.inputs, options[k].inputs, strict=True), *zip(op.outputs, options[k].outputs, strict=True)]
            found = [(name, layout.states[axis]) for name, layout in named if name in samples.places]
            split = [state.dim == samples.places[name][0] for name, state in found if state.kind == "S"]
            return bool(split) and all(split)

        def states(k: int, of_weights: bool) -> list[State]:
            strategy = options[k]
            own = [x.states[axis] for i, x in enumerate(strategy.inputs) if (i in weights) == of_weights]
            return own if of_weights else [*own, *(x.states[axis] for x in strategy.outputs)]

        whole = [k for k in left if not any(s.kind == "S" for s in (*states(k, True), *states(k, False)))]
        if role in DATA:
            split = [
                k
                for k in left
                if name in samples.fed and not any(s.kind == "S" for s in states(k, True)) and splits_samples(k)
            ]
            return tuple(split or whole)
        if has_large_weight(self.graph, op):
            large = [i for i in weights if len(self.graph.values[op.inputs[i]].type.shape) > 1]
            split = [k for k in left if any(options[k].inputs[i].states[axis].kind == "S" for i in large)]
            return tuple(split or whole)
        if role is Parallel.sequence and (along := self._along(name, left, axis)):
            return along
        read = [name for i, name in enumerate(op.inputs) if i not in weights]
        banned = [self._banned(op, value) for value in (*read, *op.outputs)]
        kept = [
            k
            for k in left
            if not any(s.kind == "S" and s.dim in dims for s, dims in zip(states(k, False), banned, strict=True))
        ]
        return tuple(kept or whole or left)  # a batch norm of each rank's own part splits the batch under any role

    def _along(self, name: str, left: Iterable[int], axis: int) -> tuple[int, ...]:
        """Of the strategies of an op between the blocks those that the axis splits along the sequence."""
        outputs, options = self._between.get(name, {}), self.choices.ops[name]

        def splits(strategy: Strategy) -> bool:
            states = ((strategy.outputs[i].states[axis], wanted) for i, wanted in outputs.items())
            return all((s.kind, s.dim, s.outer) == ("S", wanted.dim, wanted.outer) for s, wanted in states)

        return tuple(k for k in left if splits(options[k])) if outputs else ()

    def _banned(self, op: Op, value: str) -> set[int]:
        """The dims that tensor parallelism does not split: those of batch and sequence."""
        wide = max(len(self.graph.values[n].type.shape) for n in (*op.inputs, *op.outputs)) > 3
        flat = self.graph.values[value].grad and len(self.graph.values[value].type.shape) == 2
        # Heads lie on another dim than the sequence, and so does a vocabulary once batch and sequence are one.
        return {0} if wide or flat else {0, 1}

    @cached_property
    def _between(self) -> dict[str, dict[int, State]]:
        """Op between the blocks -> which of its outputs lie there, and how the sequence of each is split."""
        found = between_blocks(self.graph)
        ops = [op for op in self.graph.ops if not has_large_weight(self.graph, op)]
        written = {op.name: {i: found[n] for i, n in enumerate(op.outputs) if n in found} for op in ops}
        return {name: outputs for name, outputs in written.items() if outputs}


def _storage(ways: tuple[Stored, ...], roles: tuple[Parallel, ...]) -> tuple[int, ...]:
    """The ways that fit; of ZeRO's those that shard on as many axes as can be."""
    fitting = [k for k, way in enumerate(ways) if all(_stored(way, a, role) for a, role in enumerate(roles))]
    sharded = {k: sum(_shards(ways[k], a, role) for a, role in enumerate(roles)) for k in fitting}
    most = max(sharded.values(), default=0)
    return tuple(k for k in fitting if sharded[k] == most)


def _shards(way: Stored, axis: int, role: Parallel) -> bool:
    return role in WAYS and way.way is WAYS[role] and way.state.states[axis].kind == "S"


def _stored(way: Stored, axis: int, role: Parallel) -> bool:
    layout, state = way.layout.states[axis], way.state.states[axis]
    if role in DATA:
        return _shards(way, axis, role) or (layout.kind == "R" and state.kind == "R")
    return layout == state


def _input(layouts: tuple[Layout, ...], number: int, axis: int, role: Parallel) -> bool:
    """Data parallelism splits dim 0 of every input that can be."""
    state = layouts[number].states[axis]
    if role not in DATA:
        return state.kind == "R"
    possible = any(x.states[axis].kind == "S" and x.states[axis].dim == 0 for x in layouts)
    return (state.kind == "S" and state.dim == 0) if possible else state.kind == "R"


def named(axes: int) -> dict[str, tuple[Parallel, ...]]:
    """Name -> the role of each axis, outermost first."""
    found = {
        "DDP": (Parallel.data,) * axes,
        "ZeRO-1": (Parallel.zero1,) * axes,
        "ZeRO-2": (Parallel.zero2,) * axes,
        "ZeRO-3": (Parallel.zero3,) * axes,
        "tensor": (Parallel.tensor,) * axes,
        "tensor + sequence": (Parallel.sequence,) * axes,
    }
    for outer in (Parallel.data, Parallel.zero1, Parallel.zero3) if axes > 1 else ():
        for inner in (Parallel.tensor, Parallel.sequence):
            name = f"{'DDP' if outer is Parallel.data else 'ZeRO-' + outer[-1]} x {inner}"
            found[name] = (*(outer,) * (axes - 1), inner)
    return found
