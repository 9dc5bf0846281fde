"""What the user's own unsplit module does in float64: the steps that a program is held against.

Many modules cast to float32 somewhere, whatever type they have. Adam would turn that rounding into steps of its own. So
the steps are those of the module with such casts widened, which a program must equal closely; and before each, the
module as it is written is run in the same state, which a program must equal up to the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.runtime.programs.collectives import in_memory
from pipeline.user.loss import pick_loss
from stages.verify.compare import widest
from stages.verify.deferred import statistics_of_step
from stages.verify.float64 import WIDENED, Within, in_float64

Batch = dict[str, Tensor]
Build = Callable[[], nn.Module]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class State:
    """A module's tensors at one time: those that are trained, and all others."""

    parameters: dict[str, Tensor]
    constants: dict[str, Tensor]


@dataclass(frozen=True)
class Passes:
    """The forward and backward passes of a step; gradients are the module's own until the next step."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]  # of the mean loss over all samples


@dataclass(frozen=True)
class Step:
    """A step of the unsplit module; its tensors are the module's own until the next step."""

    batches: list[Batch]  # one for each pass
    passes: Passes
    after: State
    as_written: Passes | None  # with casts to lower types, where the module has any


@dataclass(frozen=True)
class Kind:
    """What a module does with types and random numbers."""

    casts: bool  # to a lower type than float64
    as_written: bool  # it can be held against itself as it is written: these casts run, and are to float32 alone
    draws: bool  # draws random numbers
    others: tuple[str, ...] = ()  # ops that draw, and have numbers of a seed where the stream is not drawn from


@dataclass(frozen=True)
class Truth:
    kind: Kind
    draw: bool  # random numbers are drawn, alike on both sides
    first: State
    steps: Iterable[Step]
    batch_norm: str = "exact"  # of the train file


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """The random numbers of one pass."""
    torch.default_generator.manual_seed(number)
    yield


def truth_of(
    build: Build, batches: Sequence[Sequence[Batch]], make: MakeOptimizer, *, draw: bool, batch_norm: str = "exact"
) -> Truth:
    wide = [[{name: doubled(x) for name, x in batch.items()} for batch in step] for step in batches]
    kind = kind_of(build, wide[0][0], draw=draw)
    module = _made(build)
    steps = steps_of(module, build, wide, make, kind, draw=draw, batch_norm=batch_norm)
    return Truth(kind, draw, state_of(module), steps, batch_norm)


def _made(build: Build) -> nn.Module:
    return cast_all(build(), WIDENED[torch.float64]).train()


def cast_all(module: nn.Module, types: Mapping[torch.dtype, torch.dtype]) -> nn.Module:
    """Its parameters and buffers; `double()` leaves complex ones as they are."""
    return module._apply(lambda tensor: tensor.to(types.get(tensor.dtype, tensor.dtype)))


def kind_of(build: Build, batch: Batch, *, draw: bool) -> Kind:
    """Found out by running it: as it is written or, where that fails, with its casts to lower types widened."""
    for widen in (False, True):
        module = _made(build)
        with in_float64(widen=widen, draws=draw) as mode:
            try:
                pick_loss(module(**batch)).backward()
                break
            except RuntimeError:  # such as a product of two types
                if widen:
                    raise
    as_written = not widen and mode.casts <= {torch.float32, torch.complex64}
    return Kind(bool(mode.casts), as_written, mode.drew, tuple(sorted(mode.others)))


def steps_of(
    module: nn.Module,
    build: Build,
    batches: Iterable[list[Batch]],
    make: MakeOptimizer,
    kind: Kind,
    *,
    draw: bool,
    batch_norm: str,
) -> Iterator[Step]:
    optimizer = make([p for p in module.parameters() if p.requires_grad])
    written = _made(build) if kind.casts and kind.as_written else None
    for step in batches:
        as_written = None
        if written is not None:
            take(written, state_of(module))
            as_written = passes_of(written, step, widen=False, draw=draw)
        with statistics_of_step(module) if batch_norm == "deferred" else nullcontext():
            passes = passes_of(module, step, widen=True, draw=draw)
        optimizer.step()
        yield Step(step, passes, state_of(module), as_written)


def take(module: nn.Module, state: State) -> None:
    for own, given in zip(_groups(state_of(module)), _groups(state), strict=True):
        for name, tensor in own.items():
            tensor.copy_(given[name])


def _groups(state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return state.parameters, state.constants


def passes_of(
    module: nn.Module, batches: list[Batch], *, widen: bool, draw: bool, within: Within = in_float64
) -> Passes:
    module.zero_grad(set_to_none=True)
    with within(widen=widen, draws=draw):
        parts = parts_of(batches)
        losses = [_pass(module, batch, number, parts[number]) for number, batch in enumerate(batches)]
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad and p.grad is not None}
    for parameter in trained.values():
        parameter.grad = in_memory(parameter.grad)  # optimizers do not take conjugates that autograd leaves undone
    return Passes(losses, {name: parameter.grad for name, parameter in trained.items()})


def parts_of(batches: Sequence[Batch]) -> list[float]:
    """For each pass of a step: how many of its size would have the samples of the step."""
    samples = list(map(_samples, batches))
    return [sum(samples) / own for own in samples]


def _samples(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _pass(module: nn.Module, batch: Batch, number: int, parts: float) -> Tensor:
    with seeded(number):
        loss = pick_loss(module(**batch))
        (loss / parts).backward()
    return loss.detach().double()


def state_of(module: nn.Module) -> State:
    """The module's own tensors."""
    named = dict(module.named_parameters())
    trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
    frozen = {name: p.detach() for name, p in named.items() if not p.requires_grad}
    return State(trained, {**frozen, **dict(module.named_buffers())})


def kept(truth: Truth) -> Truth:
    """With copies of all tensors, so that several programs can be held against it."""
    first = copied(truth.first)
    steps = [Step(s.batches, _copied(s.passes), copied(s.after), _copied(s.as_written)) for s in truth.steps]
    return Truth(truth.kind, truth.draw, first, steps, truth.batch_norm)


def _copied(passes: Passes | None) -> Any:
    return passes and Passes(passes.losses, {name: g.clone() for name, g in passes.gradients.items()})


def copied(state: State) -> State:
    return State(*({n: t.clone() for n, t in group.items()} for group in _groups(state)))


def doubled(tensor: Tensor) -> Tensor:
    return widest(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor
