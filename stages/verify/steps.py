"""A written program's steps on one rank, each held against the same step of the unsplit module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from pipeline.ir.layout import Layout, replicated
from pipeline.ir.names import look_up
from pipeline.runtime.programs.mesh import set_mesh
from pipeline.runtime.programs.parameters import piece_of
from pipeline.runtime.step.buckets import Row
from pipeline.runtime.step.gradients import Gradients
from pipeline.runtime.step.passes import run_passes
from pipeline.runtime.step.running_stats import statistics_of
from stages.verify.compare import IN_FLOAT32, SHARE, TOLERANCE, everywhere, largest, own_gap
from stages.verify.float64 import in_float64
from stages.verify.truth import Batch, MakeOptimizer, Passes, State, Truth, seeded

NO_ROW: Row = ("", "", "")  # of a parameter that the program does not train
LOSS = "loss"
# Adam makes much of little: a bias before a norm, whose gradient is rounding alone, moves by 1e-10; statistics follow.
AFTER_UPDATE = 1e-6
UNIT = 1.0  # a buffer below is held against this: statistics begin with zeros and ones, and a mean may be rounding


@dataclass(frozen=True)
class Difference:
    """Of one thing in one step, relative to its size."""

    kind: str  # loss, gradient, buffer; parameter: after the optimizer's step
    name: str
    step: int
    relative: float
    tolerance: float
    at: int = 0  # which of the step's passes, of a loss
    in_float32: bool = False  # of the step that is run in float32 (stages/verify/float32.py)

    @property
    def over(self) -> float:
        """The tolerance; 1 is just equal."""
        return self.relative / self.tolerance


@dataclass(frozen=True)
class Verdict:
    differences: tuple[Difference, ...]

    @property
    def judged(self) -> list[Difference]:
        """The parameters follow from the gradients, and only help to find a fault."""
        return [d for d in self.differences if d.kind != "parameter"]

    @property
    def worst(self) -> Difference:
        return max(self.judged, key=lambda d: d.over)

    @property
    def equal(self) -> bool:
        return self.worst.over <= 1.0

    def first(self) -> Difference | None:
        """What differs first: of a step the losses, then gradients and buffers; parameters where it was they.

        Of the module as it is written just where nothing else does.
        """
        order = (LOSS, "gradient", "buffer", "parameter")
        found = [d for d in self.differences if d.over > 1.0]
        return min(found, key=lambda d: (d.tolerance == IN_FLOAT32, d.step, order.index(d.kind), d.at), default=None)


class Rank:
    """A program with this rank's pieces of a state."""

    def __init__(self, program: ModuleType, state: State, make: MakeOptimizer, batch_norm: str = "exact") -> None:
        set_mesh(program.MESH)
        program.DEVICE = torch.device("cpu")  # type: ignore[attr-defined]
        self.axes = list(program.MESH)
        self.passes: int = program.MICRO_BATCHES
        self.inputs = {name: Layout.parse(text) for name, text in program.INPUTS.items()}
        table: dict[str, Row] = program.PARAMETERS
        self.rows = {name: look_up(table, name) or NO_ROW for name in state.parameters}
        self.parameters = {
            name: nn.Parameter(piece_of(value, Layout.parse(self.rows[name][0]), self.axes))
            for name, value in state.parameters.items()
            if self.rows[name][0]
        }
        rest = {name: value for name, value in state.parameters.items() if name not in self.parameters}
        self.constants = {name: value.clone() for name, value in (state.constants | rest).items()}
        self.program = program.Program({**self.constants, **self.parameters})
        self.statistics = statistics_of(batch_norm, self.constants.items())
        rows = [self.rows[name] for name in self.parameters]
        self.gradients = Gradients(self.parameters.values(), rows, self.axes)
        self.updated = dict(zip(self.parameters, self.gradients.updated, strict=True))
        self.optimizer = make(list(self.gradients.updated))

    def layout(self, name: str) -> Layout:
        """How a parameter lies; one that is not trained lies whole."""
        text = self.rows[name][0] if name in self.rows else ""
        return Layout.parse(text) if text else replicated(len(self.axes))

    def run(self, batches: list[Batch], on_pass: Callable[[int], None] | None = None) -> list[Tensor]:
        """The losses of one step's passes; gradients are there afterwards. `on_pass` is told each before it begins."""
        pieces = [{name: piece_of(x, self.inputs[name], self.axes) for name, x in b.items()} for b in batches]
        begun = iter(range(-1, len(pieces)))

        def around() -> AbstractContextManager[None]:
            number = next(begun)  # the first is for copies that all passes share
            if on_pass:
                on_pass(number)
            return seeded(max(number, 0))

        with self.statistics():
            return run_passes(self.program, self.gradients, pieces, self.passes, around)

    def update(self) -> None:
        self.optimizer.step()
        self.gradients.publish()


def judge(program: ModuleType, truth: Truth, make: MakeOptimizer) -> Verdict:
    """All steps of the program beside those of the module."""
    rank = Rank(program, truth.first, make, truth.batch_norm)
    found: list[Difference] = []
    for number, step in enumerate(truth.steps):
        with in_float64(widen=True, draws=truth.draw):
            losses = rank.run(step.batches)
        found += compare_passes(rank, losses, step.passes, number, TOLERANCE)
        if step.as_written is not None:
            found += compare_passes(rank, losses, step.as_written, number, IN_FLOAT32)
        rank.update()
        found += compare_state(rank, step.after, number)
    return Verdict(tuple(found))


def compare_passes(rank: Rank, losses: list[Tensor], expected: Passes, step: int, tolerance: float) -> list[Difference]:
    """Losses, and the gradients as the optimizer gets them: whole, in shards, or in pieces."""
    whole = replicated(len(rank.axes))
    gaps = [own_gap(loss, wanted, whole, rank.axes) for loss, wanted in zip(losses, expected.losses, strict=True)]
    for name in rank.rows:
        own = rank.updated.get(name)
        layout = whole if own is None else Layout.parse(rank.rows[name][2])
        gaps.append(own_gap(None if own is None else own.grad, expected.gradients.get(name), layout, rank.axes))
    floor = SHARE * largest(expected.gradients.values())
    together = everywhere(gaps)
    of_losses, of_gradients = together[: len(losses)], together[len(losses) :]
    return [
        *(Difference(LOSS, LOSS, step, each.relative(), tolerance, at) for at, each in enumerate(of_losses)),
        *(
            Difference("gradient", name, step, each.relative(floor), tolerance)
            for name, each in zip(rank.rows, of_gradients, strict=True)
        ),
    ]


def compare_state(rank: Rank, expected: State, step: int) -> list[Difference]:
    """Buffers, and the parameters, after the optimizer's step."""
    whole = replicated(len(rank.axes))
    held = {**rank.constants, **rank.parameters}
    buffers = {n: own_gap(held[n], value, whole, rank.axes) for n, value in expected.constants.items()}
    trained = {n: own_gap(held[n], value, rank.layout(n), rank.axes) for n, value in expected.parameters.items()}
    together = iter(everywhere([*buffers.values(), *trained.values()]))
    floor = SHARE * largest(expected.parameters.values())
    return [
        *(Difference("buffer", name, step, next(together).relative(UNIT), AFTER_UPDATE) for name in buffers),
        *(Difference("parameter", name, step, next(together).relative(floor), AFTER_UPDATE) for name in trained),
    ]
