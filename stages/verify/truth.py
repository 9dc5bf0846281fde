"""What the user's own unsplit module does in float64: the steps that a program is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.loss import pick_loss
from stages.verify.float64 import in_float64

Batch = dict[str, Tensor]
Build = Callable[[], nn.Module]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class State:
    """A module's tensors at one time: those that are trained, and all others."""

    parameters: dict[str, Tensor]
    constants: dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """A step of the unsplit module; its tensors are the module's own until the next step."""

    batches: list[Batch]  # one for each pass
    losses: list[Tensor]
    gradients: dict[str, Tensor]  # of the mean of the losses
    after: State


@dataclass(frozen=True)
class Kind:
    """What a module does with types and random numbers."""

    casts: bool  # to a lower type than float64
    widened: bool  # ... which does not run: these are taken as casts to float64
    draws: bool  # draws random numbers


@dataclass(frozen=True)
class Truth:
    kind: Kind
    draw: bool  # random numbers are drawn, alike on both sides
    first: State
    steps: Iterable[Step]


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """The random numbers of one pass."""
    torch.default_generator.manual_seed(number)
    yield


def truth_of(build: Build, batches: Sequence[Sequence[Batch]], make: MakeOptimizer, *, draw: bool) -> Truth:
    doubled = [[{name: _double(x) for name, x in batch.items()} for batch in step] for step in batches]
    kind = kind_of(build, doubled[0][0], draw=draw)
    module = build().double().train()
    return Truth(kind, draw, state_of(module), steps_of(module, doubled, make, kind, draw=draw))


def kind_of(build: Build, batch: Batch, *, draw: bool) -> Kind:
    """Found out by running it: as it is written or, where that fails, with its casts to lower types widened."""
    for widen in (False, True):
        module = build().double().train()
        with in_float64(widen=widen, draws=draw) as mode:
            try:
                pick_loss(module(**batch)).backward()
                break
            except RuntimeError:  # such as a product of two types
                if widen:
                    raise
    return Kind(mode.casts, widen, mode.drew)


def steps_of(
    module: nn.Module, batches: Iterable[list[Batch]], make: MakeOptimizer, kind: Kind, *, draw: bool
) -> Iterator[Step]:
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = make(list(trained.values()))
    for passes in batches:
        optimizer.zero_grad(set_to_none=True)
        with in_float64(widen=kind.widened, draws=draw):
            losses = [_pass(module, batch, number, len(passes)) for number, batch in enumerate(passes)]
        optimizer.step()
        gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
        yield Step(passes, losses, gradients, state_of(module))


def _pass(module: nn.Module, batch: Batch, number: int, count: int) -> Tensor:
    with seeded(number):
        loss = pick_loss(module(**batch))
        (loss / count).backward()
    return loss.detach().double()


def state_of(module: nn.Module) -> State:
    """The module's own tensors."""
    named = dict(module.named_parameters())
    trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
    frozen = {name: p.detach() for name, p in named.items() if not p.requires_grad}
    return State(trained, {**frozen, **dict(module.named_buffers())})


def kept(truth: Truth) -> Truth:
    """With copies of all tensors, so that several programs can be held against it."""
    first = _copy(truth.first)
    steps = [
        Step(s.batches, s.losses, {n: g.clone() for n, g in s.gradients.items()}, _copy(s.after)) for s in truth.steps
    ]
    return Truth(truth.kind, truth.draw, first, steps)


def _copy(state: State) -> State:
    return State(*({n: t.clone() for n, t in group.items()} for group in (state.parameters, state.constants)))


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
