"""A written program's steps on one rank, from a state of the unsplit module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from shardwright.pipeline.ir.layout import Layout, replicated
from shardwright.pipeline.ir.names import look_up
from shardwright.pipeline.runtime.pipelining.pipelined import Places, RankPipeline
from shardwright.pipeline.runtime.pipelining.stage import RankPartition
from shardwright.pipeline.runtime.programs.mesh import is_first, set_mesh
from shardwright.pipeline.runtime.programs.parameters import shard_of
from shardwright.pipeline.runtime.step.buckets import Row
from shardwright.pipeline.runtime.step.gradients import Gradients
from shardwright.pipeline.runtime.step.passes import run_passes
from shardwright.pipeline.runtime.step.running_stats import statistics_of
from shardwright.stages.verify.truth import Batch, MakeOptimizer, ModuleState

Around = Callable[[int, int], AbstractContextManager[None]]  # a forward pass of which partition, of which micro-batch
Copies = list[tuple[Tensor | None, Layout]]  # of one tensor, on this rank
Forward = Callable[[int, Mapping[str, Tensor]], tuple[Tensor, ...]]
CPU = torch.device("cpu")


def per_rank_of(program: ModuleType) -> dict[str, bool]:
    """Running statistics of each rank's own samples: those of the first rank of a mesh are the model's."""
    return dict.fromkeys(getattr(program, "PER_RANK", ()), True)


class WholeRank:
    """A program that is no pipeline, with this rank's shards of a state."""

    def __init__(self, program: ModuleType, state: ModuleState, make: MakeOptimizer, batch_norm: str) -> None:
        self.names, self.per_rank = list(state.parameters), per_rank_of(program)
        set_mesh(program.MESH)
        self.axes = list(program.MESH)
        self.passes: int = program.MICRO_BATCHES
        self.inputs = {name: Layout.parse(text) for name, text in program.INPUTS.items()}
        table: Mapping[str, Row] = program.PARAMETERS
        self.rows = {name: row for name in self.names if (row := look_up(table, name)) and row[0]}
        parameters = {
            name: nn.Parameter(shard_of(state.parameters[name], Layout.parse(row[0]), self.axes))
            for name, row in self.rows.items()
        }
        rest = {name: value for name, value in state.parameters.items() if name not in parameters}
        constants = {name: value.clone() for name, value in (state.constants | rest).items()}
        self.tensors: dict[str, Tensor] = constants | parameters
        self.program = program.Program(self.tensors)
        self.statistics = statistics_of(batch_norm, constants.items())
        self.gradients = Gradients(parameters.values(), list(self.rows.values()), self.axes)
        self.updated = dict(zip(parameters, self.gradients.updated, strict=True))
        self.optimizer = make(list(self.gradients.updated))
        self.around: Around = lambda partition, number: nullcontext()

    def run(self, batches: list[Batch]) -> list[Tensor]:
        """The losses of one step's passes; of a pipeline where its last partition is. Then gradients are there."""
        shards = [{name: shard_of(x, self.inputs[name], self.axes) for name, x in b.items()} for b in batches]
        numbers = iter(range(-1, len(shards)))  # the first is for copies that all passes share

        @contextmanager
        def around() -> Iterator[None]:
            number = next(numbers)
            with self.around(0, number):
                torch.default_generator.manual_seed(max(number, 0))
                yield

        with self.statistics():
            return run_passes(self.program, self.gradients, shards, self.passes, around)

    def inside(self, around: Around) -> None:
        """From now on forward passes run inside `around`."""
        self.around = around

    def update(self) -> None:
        self.optimizer.step()
        self.gradients.publish()

    def gradients_of(self, name: str) -> Copies:
        """As the optimizer gets them; a parameter that the program does not train has none."""
        if name not in self.updated:
            return [(None, replicated(len(self.axes)))]
        return [(self.updated[name].grad, Layout.parse(self.rows[name][2]))]

    def tensors_of(self, name: str) -> Copies:
        if look_up(self.per_rank, name) and not is_first(self.axes):
            return []
        whole = replicated(len(self.axes))
        return [(self.tensors[name], Layout.parse(self.rows[name][0]) if name in self.rows else whole)]


class PipelinedRank:
    """The same of a pipeline, partition by partition."""

    def __init__(self, program: ModuleType, state: ModuleState, make: MakeOptimizer, batch_norm: str) -> None:
        self.names, self.per_rank = list(state.parameters), per_rank_of(program)
        self.places = Places(program)
        self.axes = self.places.axes
        self.tables = {n: self.places.written[n].PARAMETERS for n in self.places.numbers}
        tensors = {number: self._tensors(number, state) for number in self.places.numbers}
        shapes = {name: tuple(value.shape) for name, value in state.parameters.items()}
        self.pipeline = RankPipeline(program, self.places, tensors, shapes, CPU, nullcontext)
        self.statistics = statistics_of(batch_norm, (item for own in tensors.values() for item in own.items()))
        updated = [u for partition in self.pipeline.partitions for u in partition.updated.values()]
        self.optimizer = make(updated or [nn.Parameter(torch.empty(0))])

    def _tensors(self, number: int, state: ModuleState) -> dict[str, Tensor]:
        found = {}
        for name, value in (state.constants | state.parameters).items():
            if self.places.holds(number, name):
                trained = name in state.parameters and look_up(self.tables[number], name) is not None
                shard = shard_of(value, self._layout(number, name), self.axes)
                found[name] = nn.Parameter(shard) if trained else shard
        return found

    def _layout(self, number: int, name: str) -> Layout:
        """How a tensor lies in a partition; one that is not trained lies whole."""
        row = look_up(self.tables[number], name)
        return Layout.parse(row[0]) if row is not None else replicated(len(self.axes))

    def run(self, batches: list[Batch]) -> list[Tensor]:
        given = {n: [partial(self._inputs, n, batch) for batch in batches] for n in self.places.numbers}
        with self.statistics():
            return self.pipeline.run_passes(given)

    def _inputs(self, number: int, batch: Batch) -> Batch:
        layouts: Mapping[str, str] = self.places.written[number].INPUTS
        return {name: shard_of(batch[name], Layout.parse(text), self.axes) for name, text in layouts.items()}

    def inside(self, around: Around) -> None:
        def inside(partition: RankPartition, forward: Forward, number: int, entering: Batch) -> tuple[Tensor, ...]:
            with around(partition.number, number):
                return forward(number, entering)

        for partition in self.pipeline.partitions:
            partition.forward = partial(inside, partition, partition.forward)  # type: ignore[method-assign]

    def update(self) -> None:
        self.optimizer.step()
        self.pipeline.publish()

    def gradients_of(self, name: str) -> Copies:
        holders = [p for p in self.pipeline.partitions if name in p.updated]
        return [(p.updated[name].grad, Layout.parse(p.rows[name][2])) for p in holders]

    def tensors_of(self, name: str) -> Copies:
        if look_up(self.per_rank, name) and not is_first(self.axes):
            return []
        holders = [p for p in self.pipeline.partitions if name in p.tensors]
        return [(p.tensors[name], self._layout(p.number, name)) for p in holders]


Rank = WholeRank | PipelinedRank


def rank_of(program: ModuleType, state: ModuleState, make: MakeOptimizer, batch_norm: str) -> Rank:
    program.DEVICE = CPU  # type: ignore[attr-defined]
    return (PipelinedRank if hasattr(program, "PARTITIONS") else WholeRank)(program, state, make, batch_norm)
