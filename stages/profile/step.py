"""The memory and the kernels of a whole training step, link by link.

Every distinct link is run once on meta tensors (symbolic.py); a deep model costs no more than a shallow one. Then the
links are put together: what link i keeps stays until its backward, its input goes after it unless something kept it,
and gradients appear as links are undone.

    forward    peak_i = live + forward_i       live += kept_i, less the input if nobody kept it
    backward   peak_i = live + backward_i      live += gradients_i - kept_i, less the gradient that came in
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipeline.ir.graph import Arg, Op, OpGraph, Ref, Role, Torch
from stages.profile.autocast import COMPOSITES, Autocast
from stages.profile.device import LOWERED
from stages.profile.symbolic import Kernel, Watch, rounded


@dataclass(frozen=True)
class LinkStep:
    """One link, run alone. Sizes in bytes, peaks above what was there when its pass began."""

    forward_peak: int
    kept: int  # after forward, its output included
    output: int
    keeps_input: bool  # something in it needs its input for backward
    keeps_output: bool
    backward_peak: int
    parameter_gradients: int
    input_gradient: int
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]


@dataclass(frozen=True)
class StepMemory:
    resident: int
    after_forward: int
    forward_peak: int
    backward_peak: int
    after_backward: int
    optimizer_peak: int

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak, self.optimizer_peak)


@dataclass(frozen=True)
class StepProfile:
    memory: StepMemory
    links: tuple[LinkStep, ...]
    prologue: tuple[Kernel, ...]


class _Runner:
    """Runs the ops of a graph on meta tensors, as the device and the precision would have them."""

    def __init__(self, graph: OpGraph, device: str, precision: str) -> None:
        self.graph = graph
        self.lowered: Mapping[str, Callable[..., Any]] = LOWERED.get(device, {})
        self.precision = precision
        self.known: dict[str, Tensor] = {}
        for value in graph.values.values():
            if value.role is not Role.RESULT:
                self.known[value.name] = meta(value.type.shape, value.type.dtype, value.role is Role.PARAMETER)
        self.parameters = [self.known[value.name] for value in graph.of_role(Role.PARAMETER)]

    def run(self, ops: tuple[str, ...], local: dict[str, Tensor], autocast: Autocast | None) -> None:
        """Adds the results to `local`; what is not read again goes at once, as it does in a module's forward."""
        names = [self.graph.op(name) for name in ops]
        last = {read: number for number, op in enumerate(names) for read in op.inputs}
        for number, op in enumerate(names):
            results = self.call(op, local, autocast)
            local.update(zip(op.outputs, results, strict=True))
            del results
            for read in set(op.inputs):
                if last[read] == number and read in local:
                    del local[read]

    def call(self, op: Op, local: dict[str, Tensor], autocast: Autocast | None) -> list[Tensor]:
        positional = [self._real(a, local) for a in op.args.positional]
        named = {k: self._real(v, local) for k, v in op.args.named if k != "pin_memory"}
        if op.target.startswith("shardwright."):
            kind = self.graph.values[op.outputs[0]].type
            return [meta(kind.shape, kind.dtype)]
        if autocast:
            positional, named = autocast.arguments(op.target, (positional, named))
        parts = COMPOSITES.get(op.target) if autocast else None
        function = parts or self.lowered.get(op.target) or _overload(op.target)
        result = function(*positional, **named)
        return [result] if isinstance(result, Tensor) else list(result)

    def _real(self, arg: Arg, local: dict[str, Tensor]) -> Any:
        if isinstance(arg, Ref):
            return local[arg.value] if arg.value in local else self.known[arg.value]
        if isinstance(arg, Torch):
            return torch.device("meta") if arg.kind == "device" else getattr(torch, arg.name)
        return [self._real(a, local) for a in arg] if isinstance(arg, tuple) else arg


def meta(shape: tuple[int, ...], dtype: str, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta").requires_grad_(grad)


def _overload(target: str) -> Callable[..., Any]:
    namespace, name, overload = target.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found


def profile_step(
    graph: OpGraph, device: str, precision: str, optimizer_copies: float = 2.0, workspace: int = 0
) -> StepProfile:
    """`precision` is `native` (the graph's own types) or `amp`."""
    runner = _Runner(graph, device, precision)
    prologue = _run_prologue(runner)
    links: list[LinkStep] = []
    known: dict[object, tuple[LinkStep, torch.dtype]] = {}
    entry = None
    for link in graph.chain:
        key = (link.block, entry)
        if key not in known:
            known[key] = _run_link(runner, link.ops, link.input, link.output, entry)
        step, entry = known[key]
        links.append(step)
    resident = _resident(graph, optimizer_copies) + workspace
    return StepProfile(_compose(graph, links, resident), tuple(links), prologue)


def _run_prologue(runner: _Runner) -> tuple[Kernel, ...]:
    local: dict[str, Tensor] = {}
    wanted = {read for link in runner.graph.chain for name in link.ops for read in runner.graph.op(name).inputs}
    with Watch() as watch:
        for name in runner.graph.prologue:
            op = runner.graph.op(name)
            results = runner.call(op, local, None)
            local.update(zip(op.outputs, results, strict=True))
    runner.known.update({name: tensor for name, tensor in local.items() if name in wanted})
    return tuple(watch.kernels)


def _run_link(
    runner: _Runner, ops: tuple[str, ...], entry: str | None, exit_: str, dtype: torch.dtype | None
) -> tuple[LinkStep, torch.dtype]:
    graph = runner.graph
    local: dict[str, Tensor] = {}
    inputs: list[Tensor] = []
    if entry is not None:
        shape = graph.values[entry].type.shape
        local[entry] = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        inputs.append(local[entry])
    used = dict.fromkeys(read for name in ops for read in graph.op(name).inputs)
    inputs += [runner.known[n] for n in used if n in runner.known and graph.values[n].role is Role.PARAMETER]
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(_storage(tensor))
        return tensor

    watch = Watch([*runner.known.values(), *inputs])
    with watch:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            runner.run(ops, local, Autocast(runner.parameters) if runner.precision == "amp" else None)
        y = local.pop(exit_)
        local.clear()
        kept, forward_peak, count = watch.weigh(), watch.peak, len(watch.kernels)
        gradient = torch.empty_like(y)
        watch.ignore(gradient)
        watch.peak = 0
        found = torch.autograd.grad(y, inputs, gradient, allow_unused=True)
    sizes = [rounded(g.untyped_storage().nbytes()) if g is not None else 0 for g in found]
    of_input = sizes[0] if entry is not None else 0
    step = LinkStep(
        forward_peak=forward_peak,
        kept=kept,
        output=rounded(y.untyped_storage().nbytes()) if _storage(y) not in watch.foreign else 0,
        keeps_input=entry is not None and _storage(inputs[0]) in saved,
        keeps_output=_storage(y) in saved,
        backward_peak=max(0, watch.peak - kept),
        parameter_gradients=sum(sizes) - of_input,
        input_gradient=of_input,
        forward=tuple(watch.kernels[:count]),
        backward=tuple(watch.kernels[count:]),
    )
    return step, y.dtype


def _storage(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata


def _resident(graph: OpGraph, optimizer_copies: float) -> int:
    parameters = sum(rounded(v.type.nbytes) for v in graph.of_role(Role.PARAMETER))
    others = sum(rounded(v.type.nbytes) for role in (Role.BUFFER, Role.INPUT) for v in graph.of_role(role))
    return round(parameters * (1 + optimizer_copies)) + others


def _compose(graph: OpGraph, links: list[LinkStep], resident: int) -> StepMemory:
    live = forward_peak = resident
    held: list[bool] = []  # whether the output of each link outlives the forward of the next one
    for number, link in enumerate(links):
        forward_peak = max(forward_peak, live + link.forward_peak)
        live += link.kept
        if number:
            before = links[number - 1]
            held.append(link.keeps_input or before.keeps_output)
            live -= 0 if held[-1] else before.output
    after_forward = backward_peak = live
    live += rounded(4)  # the gradient of the loss
    counted: set[str] = set()  # parameters whose gradient is there already: tied weights have one
    for number in reversed(range(len(links))):
        link = links[number]
        backward_peak = max(backward_peak, live + link.backward_peak)
        gone = link.kept - (0 if link.keeps_output or number == len(links) - 1 else link.output)
        before = links[number - 1] if number else None
        if before and held[number - 1] and not before.keeps_output:
            gone += before.output
        arrived = links[number + 1].input_gradient if number < len(links) - 1 else rounded(4)
        twice = counted.intersection(own := _parameters(graph, number))
        counted |= own
        added = link.parameter_gradients - sum(rounded(graph.values[name].type.nbytes) for name in twice)
        live += added + link.input_gradient - gone - arrived
    parameters = sum(rounded(v.type.nbytes) for v in graph.of_role(Role.PARAMETER))
    return StepMemory(resident, after_forward, forward_peak, backward_peak, live, live + parameters)


def _parameters(graph: OpGraph, number: int) -> set[str]:
    read = {name for op in graph.chain[number].ops for name in graph.op(op).inputs}
    return {name for name in read if graph.values[name].role is Role.PARAMETER}
