"""A pipeline's steps on one rank, each held against the same step of the unsplit module.

As stages.verify.steps, where every rank holds some partitions alone: of what it does not hold it knows no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from pipeline.ir.layout import Layout, replicated
from pipeline.ir.names import look_up
from pipeline.runtime.pipelining.pipelined import Places, RankPipeline
from pipeline.runtime.programs.parameters import piece_of
from pipeline.runtime.step.running_stats import statistics_of
from stages.verify.compare import IN_FLOAT32, SHARE, TOLERANCE, Gap, everywhere, largest, own_gap, widest
from stages.verify.float64 import in_float64
from stages.verify.steps import AFTER_UPDATE, LOSS, UNIT, Difference, Verdict
from stages.verify.truth import Batch, MakeOptimizer, Passes, State, Truth

Forward = Callable[[int, Mapping[str, Tensor]], tuple[Tensor, ...]]


class PipedRank:
    """A program with this rank's pieces of a state, partition by partition."""

    def __init__(self, program: ModuleType, state: State, make: MakeOptimizer, batch_norm: str = "exact") -> None:
        cpu = torch.device("cpu")
        program.DEVICE = cpu  # type: ignore[attr-defined]
        self.places = Places(program)
        self.axes = self.places.axes
        self.tables = {n: self.places.written[n].PARAMETERS for n in self.places.numbers}
        tensors = {number: self._tensors(number, state) for number in self.places.numbers}
        shapes = {name: tuple(value.shape) for name, value in state.parameters.items()}
        self.pipeline = RankPipeline(program, self.places, tensors, shapes, cpu, nullcontext)
        self.statistics = statistics_of(batch_norm, (item for own in tensors.values() for item in own.items()))
        updated = [u for partition in self.pipeline.partitions for u in partition.updated.values()]
        self.optimizer = make(updated or [nn.Parameter(torch.empty(0))])

    def _tensors(self, number: int, state: State) -> dict[str, Tensor]:
        found = {}
        for name, value in (state.constants | state.parameters).items():
            if self.places.holds(number, name):
                trained = name in state.parameters and look_up(self.tables[number], name) is not None
                piece = piece_of(value, self.layout(number, name), self.axes)
                found[name] = nn.Parameter(piece) if trained else piece
        return found

    def layout(self, number: int, name: str) -> Layout:
        """How a tensor lies in a partition; one that is not trained lies whole."""
        row = look_up(self.tables[number], name)
        return Layout.parse(row[0]) if row is not None else replicated(len(self.axes))

    def inside(self, around: Callable[[int, int], AbstractContextManager[None]]) -> None:
        """From now on forward passes run inside `around`: of which partition, and of which micro-batch."""
        for partition in self.pipeline.partitions:
            partition.forward = _inside(partition.forward, partial(around, partition.number))  # type: ignore[method-assign, assignment]

    def run(self, batches: list[Batch]) -> list[Tensor]:
        """The losses of one step's passes, where the last partition is; gradients are there afterwards."""
        given = {n: [partial(self._inputs, n, batch) for batch in batches] for n in self.places.numbers}
        with self.statistics():
            return self.pipeline.run_passes(given)

    def _inputs(self, number: int, batch: Batch) -> Batch:
        layouts: Mapping[str, str] = self.places.written[number].INPUTS
        return {name: piece_of(batch[name], Layout.parse(text), self.axes) for name, text in layouts.items()}

    def update(self) -> None:
        self.optimizer.step()
        self.pipeline.publish()


def _inside(forward: Forward, around: Callable[[int], AbstractContextManager[None]]) -> Forward:
    def run(number: int, entering: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        with around(number):
            return forward(number, entering)

    return run


def judge_pipeline(program: ModuleType, truth: Truth, make: MakeOptimizer) -> Verdict:
    """All steps of the program beside those of the module."""
    rank = PipedRank(program, truth.first, make, truth.batch_norm)
    found: list[Difference] = []
    for number, step in enumerate(truth.steps):
        with in_float64(widen=True, draws=truth.draw):
            losses = rank.run(step.batches)
        found += compare_piped(rank, losses, step.passes, number, TOLERANCE, truth.first.parameters)
        if step.as_written is not None:
            found += compare_piped(rank, losses, step.as_written, number, IN_FLOAT32, truth.first.parameters)
        rank.update()
        found += _state(rank, step.after, number)
    return Verdict(tuple(found))


def compare_piped(
    rank: PipedRank, losses: list[Tensor], expected: Passes, step: int, tolerance: float, names: Iterable[str]
) -> list[Difference]:
    whole = replicated(len(rank.axes))
    of_losses = [
        own_gap(losses[at], wanted, whole, rank.axes) if losses else _unknown(wanted)
        for at, wanted in enumerate(expected.losses)
    ]
    of_gradients = {name: _of_gradient(rank, name, expected.gradients.get(name)) for name in names}
    floor = SHARE * largest(expected.gradients.values())
    together = iter(everywhere([*of_losses, *of_gradients.values()]))
    return [
        *(Difference(LOSS, LOSS, step, next(together).relative(), tolerance, at) for at in range(len(of_losses))),
        *(Difference("gradient", name, step, next(together).relative(floor), tolerance) for name in of_gradients),
    ]


def _of_gradient(rank: PipedRank, name: str, expected: Tensor | None) -> Gap:
    """At the holder that is furthest from it."""
    found = [_unknown(expected)]
    for partition in rank.pipeline.partitions:
        if name in partition.updated:
            layout = Layout.parse(partition.rows[name][2])
            found.append(own_gap(partition.updated[name].grad, expected, layout, rank.axes))
    return max(found, key=lambda gap: gap.difference)


def _state(rank: PipedRank, expected: State, step: int) -> list[Difference]:
    """Buffers, and the parameters, after the optimizer's step."""
    buffers = {name: _of_tensor(rank, name, value) for name, value in expected.constants.items()}
    trained = {name: _of_tensor(rank, name, value) for name, value in expected.parameters.items()}
    floor = SHARE * largest(expected.parameters.values())
    together = iter(everywhere([*buffers.values(), *trained.values()]))
    return [
        *(Difference("buffer", name, step, next(together).relative(UNIT), AFTER_UPDATE) for name in buffers),
        *(Difference("parameter", name, step, next(together).relative(floor), AFTER_UPDATE) for name in trained),
    ]


def _of_tensor(rank: PipedRank, name: str, expected: Tensor) -> Gap:
    found = [_unknown(expected)]
    for partition in rank.pipeline.partitions:
        if name in partition.tensors:
            layout = rank.layout(partition.number, name)
            found.append(own_gap(partition.tensors[name], expected, layout, rank.axes))
    return max(found, key=lambda gap: gap.difference)


def _unknown(expected: Tensor | None) -> Gap:
    """Of what this rank does not hold; sizes are of whole tensors, and the same on all."""
    return Gap(0.0, 0.0 if expected is None else largest([widest(expected.detach())]))
