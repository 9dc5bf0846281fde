"""The first op that differs in a pipeline: as stages.verify.locate, where every rank knows its own partitions alone.

Each rank looks at all that its partitions write in one pass; of what the ranks find, the first counts: forward that of
the first partition, backward that of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeline.ir.graph import OpGraph
from pipeline.ir.layout import of_gradient
from pipeline.ir.plan import Plan
from pipeline.sharding.lowering import lower
from pipeline.sharding.partitions import part_of
from stages.verify.compare import TOLERANCE, own_gap
from stages.verify.float32 import Float32Step
from stages.verify.float64 import in_float32, in_float64
from stages.verify.interpret import interpret
from stages.verify.locate import (
    Case,
    Expected,
    Fault,
    InPass,
    InPassOfFloat32,
    expected_of_float32,
    fault_of,
    floor_of_gradients,
    of_buffer,
    of_readers,
    of_update,
)
from stages.verify.piped import PipedRank, compare_piped
from stages.verify.record import Names, Noted, Recorder, Recorders, names_of, recorded
from stages.verify.steps import Difference
from stages.verify.truth import Batch, MakeOptimizer, State, Step, Truth, parts_of

Found = tuple[tuple[int, int], Fault]  # its place: the partition, and the number of what it writes


def in_pass_of(plan: Plan) -> InPass:
    return partial(_in_pass, plan)


def _in_pass(
    plan: Plan, case: Case, truth: Truth, make: MakeOptimizer, first: Difference, before: State, step: Step, at: int
) -> Fault | None:
    graph = case.graph_of(step.batches[at])
    with in_float64(widen=True, draws=truth.draw):
        rank, recorders, losses = _recorded_step(plan, case, before, step.batches, make, truth.batch_norm, at)
    again = compare_piped(rank, losses, step.passes, first.step, TOLERANCE, truth.first.parameters)
    if first.kind != "buffer" and not any(d.over > 1.0 for d in again):
        return of_update(first)
    values = interpret(graph, before, step.batches[at], at, parts_of(step.batches)[at], draw=truth.draw)
    looked = _Looked(case, rank, recorders, Expected(values))
    return _first(min, looked.forward()) or _first(max, looked.backward()) or _first(min, looked.buffers(first))


def in_pass_of_float32(plan: Plan) -> InPassOfFloat32:
    def look(case: Case, step: Float32Step, make: MakeOptimizer, batch_norm: str, at: int) -> Fault | None:
        with in_float32(draws=False):
            rank, recorders, _ = _recorded_step(plan, case, step.state, step.batches, make, batch_norm, at)
        expected = expected_of_float32(case.graph_of(step.batches[at]), step, at)
        looked = _Looked(case, rank, recorders, expected)
        return _first(min, looked.forward()) or _first(max, looked.backward())

    return look


def _recorded_step(
    plan: Plan, case: Case, before: State, batches: list[Batch], make: MakeOptimizer, batch_norm: str, at: int
) -> tuple[PipedRank, Recorders, list[Tensor]]:
    """One pass of the step is noted."""
    graph = case.graph_of(batches[at])
    recorders = Recorders({n: Recorder(_names(plan, n, case, graph)) for n in range(len(plan.partitions))})
    rank = PipedRank(recorded(case.text, case.path, recorders), before, make, batch_norm)
    rank.inside(lambda partition, number: recorders.inside(partition, number == at))
    return rank, recorders, rank.run(batches)


def all_names(plan: Plan, case: Case) -> list[Names]:
    """Of all partitions, in micro-batches of either size."""
    graphs = [graph for graph in (case.graph, case.smaller) if graph is not None]
    return [_names(plan, n, case, graph) for graph in graphs for n in range(len(plan.partitions))]


def _names(plan: Plan, number: int, case: Case, graph: OpGraph) -> Names:
    partition = plan.partitions[number]
    own = part_of(graph, partition.first, partition.last)
    program = lower(own, partition.sharding, plan.micro_batches, to_loss=partition is plan.partitions[-1])
    apart = graph is case.smaller and f"class Smaller{number}(" in case.written
    return names_of(case.written, program, f"{'Smaller' if apart else 'Partition'}{number}", partition.first)


@dataclass(frozen=True)
class _Looked:
    """What this rank's partitions have written beside what they should have.

    The ranks of a piece meet where a value is partial, so all of them look at everything.
    """

    case: Case
    rank: PipedRank
    recorders: Recorders
    expected: Expected

    def noted(self) -> Iterator[tuple[tuple[int, int], Recorder, Noted]]:
        for number in self.rank.places.numbers:
            recorder = self.recorders.of[number]
            yield from (((number, place), recorder, noted) for place, noted in enumerate(recorder.noted.values()))

    def forward(self) -> list[Found]:
        found = []
        for place, _, noted in self.noted():
            tensor = noted.written.tensor
            far = own_gap(noted.value, self.expected.exact.values[tensor.value], tensor.layout, self.rank.axes)
            if self.expected.is_far(tensor.value, far):
                found.append((place, fault_of(self.case, noted, far)))
        return found

    def backward(self) -> list[Found]:
        floor, found = floor_of_gradients(self.case, self.expected.exact), []
        for place, recorder, noted in self.noted():
            tensor = noted.written.tensor
            wanted = self.expected.exact.gradients.get(tensor.value)
            if wanted is not None and noted.written.by_op:
                far = own_gap(noted.gradient, wanted, of_gradient(tensor.layout), self.rank.axes)
                if self.expected.is_gradient_far(tensor.value, far, floor):
                    found.append((place, of_readers(self.case, recorder, noted, far)))
        return found

    def buffers(self, first: Difference) -> list[Found]:
        found = ((n, of_buffer(self.case, self.recorders.of[n], first)) for n in self.rank.places.numbers)
        return [((number, 0), fault) for number, fault in found if fault is not None]


def _first(pick: Callable[..., Found], own: Iterable[Found]) -> Fault | None:
    """Of all ranks; each tells the first of its own."""
    mine = pick(own, key=lambda found: found[0], default=None)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    there = [found for found in told if found is not None]
    return pick(there, key=lambda found: found[0])[1] if there else None
