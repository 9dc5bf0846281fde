"""What a program is held against: steps of the user's own unsplit module in float64, and its graph op by op.

Many modules cast to float32 somewhere, whatever type they have. Adam would turn that rounding into steps of its own. So
the steps are those of the module with such casts widened, which a program must equal closely; and before each, the
module as it is written is run in the same state, which a program must equal up to the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.pipeline.ir.graph import Arg, Op, OpGraph, Ref, Role, Torch
from shardwright.pipeline.ops.own_names import CONSTANT
from shardwright.pipeline.ops.public import overload_of
from shardwright.pipeline.ops.samples import NormParts
from shardwright.pipeline.runtime.programs.collectives import in_memory
from shardwright.pipeline.runtime.step.running_stats import COUNTER
from shardwright.pipeline.user.loss import pick_loss
from shardwright.stages.verify.float64 import ANY, WIDENED, Within, in_float64, widest

Batch = dict[str, Tensor]
Build = Callable[[], nn.Module]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
NO_PARTS: Mapping[str, NormParts] = MappingProxyType({})
BATCH_NORM_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
}


@dataclass(frozen=True)
class ModuleState:
    """A module's tensors at one time: those that are trained, and all others."""

    parameters: dict[str, Tensor]
    constants: dict[str, Tensor]


@dataclass(frozen=True)
class Passes:
    """The forward and backward passes of a step; gradients are the module's own until the next step."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]  # of the mean loss over all samples


@dataclass(frozen=True)
class TruthStep:
    """A step of the unsplit module; its tensors are the module's own until the next step."""

    batches: list[Batch]  # one for each pass
    passes: Passes
    after: ModuleState
    as_written: Passes | None  # with casts to lower types, where the module has any


@dataclass(frozen=True)
class ModuleKind:
    """What a module does with types and random numbers."""

    casts: bool  # to a lower type than float64
    as_written: bool  # it can be held against itself as it is written: these casts run, and are to float32 alone
    draws: bool  # draws random numbers
    others: tuple[str, ...] = ()  # ops that draw, and have numbers of a seed where the stream is not drawn from


@dataclass(frozen=True)
class Truth:
    kind: ModuleKind
    draw: bool  # random numbers are drawn, alike on both sides
    first: ModuleState
    steps: Iterable[TruthStep]
    batch_norm: str = "exact"  # of the train file


def truth_of(
    build: Build, batches: Sequence[Sequence[Batch]], make: MakeOptimizer, *, draw: bool, batch_norm: str = "exact"
) -> Truth:
    """Its steps are taken as they are asked for, once."""
    wide = [[doubled(batch) for batch in step] for step in batches]
    kind = kind_of(build, wide[0][0], draw=draw)
    module = made(build)

    def steps() -> Iterator[TruthStep]:
        optimizer = make([p for p in module.parameters() if p.requires_grad])
        written = made(build) if kind.casts and kind.as_written else None
        for step in wide:
            as_written = None
            if written is not None:
                take(written, state_of(module))
                as_written = passes_of(written, step, widen=False, draw=draw)
            with statistics_of_step(module) if batch_norm == "deferred" else nullcontext():
                passes = passes_of(module, step, widen=True, draw=draw)
            optimizer.step()
            yield TruthStep(step, passes, state_of(module), as_written)

    return Truth(kind, draw, state_of(module), steps(), batch_norm)


def made(build: Build, wide: torch.dtype = torch.float64) -> nn.Module:
    """With parameters and buffers in that type; `double()` leaves complex ones as they are."""
    return build()._apply(lambda tensor: tensor.to(WIDENED[wide].get(tensor.dtype, tensor.dtype))).train()


def kind_of(build: Build, batch: Batch, *, draw: bool) -> ModuleKind:
    """Found out by running it: as it is written or, where that fails, with its casts to lower types widened."""
    for widen in (False, True):
        module = made(build)
        with in_float64(widen=widen, draws=draw) as mode:
            try:
                pick_loss(module(**batch)).backward()
                break
            except RuntimeError:  # such as a product of two types
                if widen:
                    raise
    as_written = not widen and mode.casts <= {torch.float32, torch.complex64}
    return ModuleKind(bool(mode.casts), as_written, mode.drew, tuple(sorted(mode.others)))


def take(module: nn.Module, state: ModuleState) -> None:
    own = state_of(module)
    for name, tensor in (own.parameters | own.constants).items():
        tensor.copy_((state.parameters | state.constants)[name])


def passes_of(
    module: nn.Module, batches: list[Batch], *, widen: bool, draw: bool, within: Within = in_float64
) -> Passes:
    module.zero_grad(set_to_none=True)
    losses = []
    with within(widen=widen, draws=draw):
        for number, (batch, parts) in enumerate(zip(batches, parts_of(batches), strict=True)):
            torch.default_generator.manual_seed(number)
            loss = pick_loss(module(**batch))
            (loss / parts).backward()
            losses.append(loss.detach().double())
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad and p.grad is not None}
    for parameter in trained.values():
        parameter.grad = in_memory(parameter.grad)  # optimizers do not take conjugates that autograd leaves undone
    return Passes(losses, {name: parameter.grad for name, parameter in trained.items()})


def parts_of(batches: Sequence[Batch]) -> list[float]:
    """For each pass of a step: how many of its size would have the samples of the step."""
    samples = [len(next(iter(batch.values()))) for batch in batches]
    return [sum(samples) / own for own in samples]


def state_of(module: nn.Module) -> ModuleState:
    """The module's own tensors."""
    named = dict(module.named_parameters())
    trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
    frozen = {name: p.detach() for name, p in named.items() if not p.requires_grad}
    return ModuleState(trained, {**frozen, **dict(module.named_buffers())})


def doubled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Numbers in float64; whole ones stay."""
    return {n: widest(t) if t.is_floating_point() or t.is_complex() else t for n, t in tensors.items()}


# ---- `batch_norm: deferred`: running statistics change once a step, by the numbers of all its passes


@contextmanager
def statistics_of_step(module: nn.Module) -> Iterator[None]:
    """Around the passes of a step."""
    counters = [buffer for name, buffer in module.named_buffers() if name.rpartition(".")[2] == COUNTER]
    before = [counter.clone() for counter in counters]
    with _BatchNorms() as norms:
        yield
    with torch.no_grad():
        norms.commit()
        for counter, start in zip(counters, before, strict=True):
            counter.copy_(torch.minimum(counter, start + 1))


class _BatchNorms(TorchFunctionMode):
    """Keeps what batch norms are given in training, and their running statistics as they are until `commit`."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, tuple[Tensor, Tensor, float, list[Tensor]]] = {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        names = BATCH_NORM_ARGUMENTS.get(func, ())
        given = dict(zip(names, args, strict=False)) | kwargs
        mean, variance = given.get("running_mean"), given.get("running_var")
        if not names or not given.get("training", False) or mean is None or variance is None:
            return func(*args, **kwargs)
        norm = self.given.setdefault(mean.data_ptr(), (mean, variance, given.get("momentum", 0.1), []))
        norm[-1].append(given["input"].detach().transpose(0, 1).flatten(1))
        rest = args[len(names) :]  # whether cudnn may be used
        instead = given | {"running_mean": mean.clone(), "running_var": variance.clone()}
        return func(*(instead.pop(name) for name in names[: len(args)]), *rest, **instead)

    def commit(self) -> None:
        for mean, variance, momentum, given in self.given.values():
            numbers = torch.cat(given, dim=1)
            mean.lerp_(numbers.mean(1).to(mean.dtype), momentum)
            variance.lerp_(numbers.var(1).to(variance.dtype), momentum)


# ---- `batch_norm: per_rank`: each norm normalises the samples of each rank apart, and rank 0's are remembered


def with_parts(module: nn.Module, norms: Sequence[NormParts]) -> nn.Module:
    """The module, whose batch norms in training, in the order in which they run, have these parts."""
    forward = module.forward

    def within(*args: Any, **kwargs: Any) -> Any:
        with _PartedNorms(norms):
            return forward(*args, **kwargs)

    module.forward = within
    return module


class _PartedNorms(TorchFunctionMode):
    def __init__(self, norms: Sequence[NormParts]) -> None:
        super().__init__()
        self.left = cycle(norms)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        names = BATCH_NORM_ARGUMENTS.get(func, ())
        given = dict(zip(names, args, strict=False)) | kwargs
        if not names or not given.get("training", False):
            return func(*args, **kwargs)
        running = given.get("running_mean"), given.get("running_var")

        def norm(x: Tensor, mean: Tensor | None, variance: Tensor | None) -> Tensor:
            instead = given | {"input": x, "running_mean": mean, "running_var": variance}
            return func(*(instead.pop(name) for name in names[: len(args)]), *args[len(names) :], **instead)

        return normed_apart(norm, given["input"], running, next(self.left))


def normed_apart(
    norm: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    x: Tensor,
    running: tuple[Tensor | None, Tensor | None],
    own: NormParts,
) -> Tensor:
    """Each part of the samples by its own statistics; the running ones are those of the first part."""
    parts = [part.flatten(0, 1) for part in x.unflatten(0, (own.outer, own.parts, -1)).unbind(1)]
    found = [norm(part, *((None, None) if number else running)) for number, part in enumerate(parts)]
    return torch.stack([part.unflatten(0, (own.outer, -1)) for part in found], dim=1).flatten(0, 2)


# ---- the traced graph, op by op, on unsplit tensors


@dataclass(frozen=True)
class Values:
    """Of one pass, by the names of the graph's values."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    loss: Tensor
    asked: dict[str, set[torch.dtype]]  # op -> the lower types to which it casts


def interpret(
    graph: OpGraph,
    state: ModuleState,
    batches: Sequence[Batch],
    number: int,
    draw: bool = False,
    within: Within = in_float64,
    norms: Mapping[str, NormParts] = NO_PARTS,
) -> Values:
    """Pass `number` of a step of these batches; the state is left as it was. `norms` are those with parts."""
    tensors = {name: t.detach().clone().requires_grad_() for name, t in state.parameters.items()}
    tensors |= {name: t.detach().clone() for name, t in state.constants.items()}
    known = {
        value.name: batches[number][value.name] if value.role is Role.INPUT else tensors[value.origin]
        for value in graph.values.values()
        if value.role is not Role.RESULT
    }
    gradients: dict[str, Tensor] = {}
    values = {name: t.detach().clone() for name, t in known.items()}
    asked: dict[str, set[torch.dtype]] = {}
    with within(widen=True, draws=draw, path=ANY) as mode:
        torch.default_generator.manual_seed(number)
        for op in graph.ops:
            mode.asked.clear()
            for name, result in zip(op.outputs, _results(op, known, norms.get(op.name)), strict=True):
                known[name] = result
                values[name] = result.detach().clone()
                if result.requires_grad:
                    result.register_hook(lambda g, name=name: gradients.__setitem__(name, g.detach()))
            asked[op.name] = {dtype for dtype, _ in mode.asked}
        loss = known[graph.output]
        (loss / parts_of(batches)[number]).backward()
    of_parameters = {v.name: tensors[v.origin].grad for v in graph.of_role(Role.PARAMETER)}
    gradients |= {name: g for name, g in of_parameters.items() if g is not None}
    return Values(values, gradients, loss.detach(), asked)


def _results(op: Op, known: dict[str, Tensor], parts: NormParts | None = None) -> list[Tensor]:
    positional = [_real(arg, known) for arg in op.args.positional]
    named = {key: _real(arg, known) for key, arg in op.args.named if key != "pin_memory"}
    if op.target == CONSTANT:
        found: Any = torch.tensor(*positional, **named)
    else:
        overload = overload_of(op.target)
        assert overload is not None, f"torch has no {op.target}, and the graph was read"
        if parts is None:
            found = overload(*positional, **named)
        else:
            x, weight, bias, mean, variance, *rest = positional
            norm = lambda x, *running: overload(x, weight, bias, *running, *rest, **named)  # noqa: E731
            found = normed_apart(norm, x, (mean, variance), parts)
    return [found] if isinstance(found, Tensor) else list(found)


def _real(arg: Arg, known: dict[str, Tensor]) -> Any:
    if isinstance(arg, Ref):
        return known[arg.value]
    if isinstance(arg, Torch):
        return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.name)
    return [_real(item, known) for item in arg] if isinstance(arg, tuple) else arg
