"""One link of the chain, run alone on meta tensors: its kernels, and the life of every storage it makes.

Activations that enter are tensors of their own, so that it shows when the link lets go of them; what leaves is let go
between the passes, so that it shows whether the link's own backward needs it. The gradients of what leaves are there
when backward begins and stay to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardwright.pipeline.ir.graph import Arg, Op, OpGraph, Ref, Role, Torch
from shardwright.pipeline.ir.profile import Kernel
from shardwright.pipeline.ops.own_names import CONSTANT
from shardwright.pipeline.ops.public import overload_of
from shardwright.pipeline.ops.table import rule_of
from shardwright.stages.profile.autocast import Autocast
from shardwright.stages.profile.device import LOWERED, workspace_bytes
from shardwright.stages.profile.symbolic import Storage, Watch, storage_key


@dataclass(frozen=True)
class LinkEnds:
    """What a link shares with others, by name, in order of first use: equal links have them in the same order."""

    reads: tuple[str, ...]  # activations of earlier links
    writes: tuple[str, ...]  # activations that later links read, or the loss
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class ActivationForm:
    """How an activation that crosses links comes: its type may be autocast's, its order in memory a permutation's."""

    dtype: torch.dtype
    strides: tuple[int, ...]


@dataclass(frozen=True)
class LinkRun:
    """Numbers of storages are places in `storages`; None stands for memory that was there before."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    storages: tuple[Storage, ...]
    reads: tuple[int | None, ...]
    writes: tuple[int | None, ...]
    read_gradients: tuple[int | None, ...]
    write_gradients: tuple[int | None, ...]
    parameter_gradients: tuple[int | None, ...]
    saved: Mapping[str, tuple[int | str, ...]]  # op -> storages it keeps for backward; a name for what was there
    places: Mapping[str, tuple[int | str | None, ...]]  # op -> where its inputs, then its outputs lie
    forms: tuple[ActivationForm, ...]  # of what it writes
    types: Mapping[str, tuple[str, ...]]  # op -> dtypes of its outputs, which autocast may have changed
    dropped_peak: int  # of a forward pass that keeps nothing for backward; what enters is not counted


@dataclass(frozen=True)
class _Notes:
    """Of a link's ops while they run, as `LinkRun` has them."""

    watch: Watch
    names: Mapping[int, str]  # of the memory that was there before
    saved: dict[str, list[int | str]] = field(default_factory=dict)
    places: dict[str, tuple[int | str | None, ...]] = field(default_factory=dict)
    types: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def take(self, op: Op, inputs: list[Tensor], results: list[Tensor]) -> None:
        self.places[op.name] = tuple(self._place(t) for t in (*inputs, *results))
        self.types[op.name] = tuple(str(t.dtype).removeprefix("torch.") for t in results)

    def keep(self, tensor: Tensor) -> Tensor:
        if (where := self._place(tensor)) is not None:
            self.saved.setdefault(self.watch.op, []).append(where)
        return tensor

    def _place(self, tensor: Tensor) -> int | str | None:
        number = self.watch.find(tensor)
        return self.names.get(storage_key(tensor)) if number is None else number


class Runner:
    """Runs the ops of a graph on meta tensors, as the device and the precision would have them."""

    def __init__(self, graph: OpGraph, device: str, precision: str) -> None:
        self.graph = graph
        self.lowered: Mapping[str, Callable[..., Any]] = LOWERED.get(device, {})
        self.device, self.precision = device, precision
        self.workspace = workspace_bytes if device == "cuda" else None
        self.known: dict[str, Tensor] = {}  # what is there before a link runs, of what those that were run read
        self.names: dict[int, str] = {}  # of the memory behind what is known

    def _know(self, name: str, tensor: Tensor) -> None:
        self.known[name] = tensor
        self.names[storage_key(tensor)] = name

    def _know_given(self, ops: Iterable[str]) -> None:
        """Parameters, buffers and inputs that these ops read: made outside a watch, they are nobody's kernels."""
        for read in {read for name in ops for read in self.graph.op(name).inputs} - self.known.keys():
            value = self.graph.values[read]
            if value.role is not Role.RESULT:
                self._know(read, meta(value.type.shape, value.type.dtype, value.role is Role.PARAMETER))

    def run_prologue(self) -> tuple[Kernel, ...]:
        """What depends on no parameter is computed once and stays for the links that read it."""
        local: dict[str, Tensor] = {}
        self._know_given(self.graph.prologue)
        autocast = self._autocast()
        with Watch(self.known.values()) as watch:
            for name in self.graph.prologue:
                op = self.graph.op(name)
                watch.op = name
                local.update(zip(op.outputs, self.call(op, local, autocast), strict=True))
        for name, tensor in local.items():
            self._know(name, tensor)
        return self._noted(watch.kernels)

    def run_link(self, ops: tuple[str, ...], ends: LinkEnds, forms: tuple[ActivationForm, ...]) -> LinkRun:
        self._know_given(ops)
        leaves = [self._entering(name, form) for name, form in zip(ends.reads, forms, strict=True)]
        local = {name: leaf.clone() for name, leaf in zip(ends.reads, leaves, strict=True)}
        parameters = [self.known[name] for name in ends.parameters]
        watch = Watch(leaves, self.names, self.workspace)
        reads = [watch.number(local[name]) for name in ends.reads]
        notes = _Notes(watch, self.names)
        with watch:
            with torch.autograd.graph.saved_tensors_hooks(notes.keep, lambda tensor: tensor):
                self._run(ops, local, notes, set(ends.writes))
            outputs = [local.pop(name) for name in ends.writes]
            local.clear()
            writes = [watch.find(y) for y in outputs]
            left = tuple(ActivationForm(y.dtype, y.stride()) for y in outputs)
            forward = len(watch.kernels)
            edges = [torch.autograd.graph.get_gradient_edge(y) for y in outputs if y.requires_grad]
            gradients = [torch.empty_like(y) if y.requires_grad else None for y in outputs]
            incoming = [None if g is None else watch.number(g) for g in gradients]
            for name, number in zip(ends.writes, incoming, strict=True):
                if number is not None:  # also where an op passes it on as it is, to a parameter it adds
                    watch.storages[number].gradient = name
            outputs.clear()
            wanted = [leaf for leaf in leaves if leaf.requires_grad] + parameters
            given = [g for g in gradients if g is not None]
            watch.op = ""
            watch.sweep()
            found = torch.autograd.grad(edges, wanted, given, allow_unused=True) if edges and wanted else ()
            watch.sweep()
            numbers = iter([None if g is None else watch.find(g) for g in found])
        return LinkRun(
            forward=self._noted(watch.kernels[:forward]),
            backward=self._noted(watch.kernels[forward:]),
            storages=tuple(watch.storages),
            reads=tuple(reads),
            writes=tuple(writes),
            read_gradients=tuple(next(numbers, None) if leaf.requires_grad else None for leaf in leaves),
            write_gradients=tuple(incoming),
            parameter_gradients=tuple(next(numbers, None) for _ in parameters),
            saved={op: tuple(dict.fromkeys(kept)) for op, kept in notes.saved.items()},
            places=notes.places,
            forms=left,
            types=notes.types,
            dropped_peak=self._dropped_peak(ops, ends, forms),
        )

    def _dropped_peak(self, ops: tuple[str, ...], ends: LinkEnds, forms: tuple[ActivationForm, ...]) -> int:
        leaves = [self._entering(name, form) for name, form in zip(ends.reads, forms, strict=True)]
        local = dict(zip(ends.reads, leaves, strict=True))
        watch = Watch(leaves, self.names, self.workspace)
        with torch.no_grad(), watch:
            self._run(ops, local, _Notes(watch, self.names), set(ends.writes))
            watch.sweep()
        change = [0] * (len(watch.kernels) + 2)
        for storage in watch.storages:
            change[storage.born] += storage.size
            change[len(watch.kernels) + 1 if storage.died is None else storage.died] -= storage.size
        return max(accumulate(change))

    def _noted(self, kernels: list[Kernel]) -> tuple[Kernel, ...]:
        """Before the first kernel of an op of which it reads values, the host waits for the card."""
        first = {kernel.op: number for number, kernel in reversed(list(enumerate(kernels))) if kernel.op}
        rules = ((rule_of(self.graph.op(op)), number) for op, number in first.items())
        waits = {number for rule, number in rules if rule is not None and rule.reads_values}
        return tuple(replace(kernel, waits=True) if n in waits else kernel for n, kernel in enumerate(kernels))

    def _entering(self, name: str, form: ActivationForm) -> Tensor:
        value = self.graph.values[name]
        empty = torch.empty_strided(value.type.shape, form.strides, dtype=form.dtype, device="meta")
        return empty.requires_grad_(value.grad)

    def _run(self, ops: tuple[str, ...], local: dict[str, Tensor], notes: _Notes, stays: set[str]) -> None:
        """Adds the results to `local`; what is not read again goes at once, as it does in a module's forward."""
        watch, autocast = notes.watch, self._autocast()
        calls = [self.graph.op(name) for name in ops]
        last = {read: number for number, op in enumerate(calls) for read in op.inputs}
        for number, op in enumerate(calls):
            watch.op = op.name
            inputs = [local[name] if name in local else self.known[name] for name in op.inputs]
            before = [t.grad_fn for t in inputs if t.grad_fn is not None]
            results = self.call(op, local, autocast)
            edges = _edges(op.inputs, inputs) if torch.is_grad_enabled() else {}
            _mark_backward(results, before, op.name, watch, edges)
            notes.take(op, inputs, results)
            for name, tensor in zip(op.outputs, results, strict=True):
                place = watch.find(tensor)
                if place is not None and not watch.storages[place].value:
                    watch.storages[place].value = name
            local.update(zip(op.outputs, results, strict=True))
            del inputs, results, before, edges
            for read in set(op.inputs) | set(op.outputs):
                if last.get(read, number) == number and read in local and read not in stays:
                    del local[read]

    def _autocast(self) -> Autocast | None:
        return Autocast(self.device) if self.precision == "amp" else None

    def call(self, op: Op, local: dict[str, Tensor], autocast: Autocast | None) -> list[Tensor]:
        positional = [self._real(a, local) for a in op.args.positional]
        named = {k: self._real(v, local) for k, v in op.args.named if k != "pin_memory"}
        if op.target == CONSTANT:
            kind = self.graph.values[op.outputs[0]].type
            return [meta(kind.shape, kind.dtype)]
        autocast = None if op.exact else autocast
        if autocast:
            positional, named = autocast.arguments(op.target, (positional, named))
        parts = autocast.composites.get(op.target) if autocast else None
        function: Any = parts or self.lowered.get(op.target) or overload_of(op.target)
        result = function(*positional, **named)
        return [result] if isinstance(result, Tensor) else list(result)

    def _real(self, arg: Arg, local: dict[str, Tensor]) -> Any:
        if isinstance(arg, Ref):
            return local[arg.value] if arg.value in local else self.known[arg.value]
        if isinstance(arg, Torch):
            return torch.device("meta") if arg.kind == "device" else getattr(torch, arg.name)
        return [self._real(a, local) for a in arg] if isinstance(arg, tuple) else arg


def ops_by_run(graph: OpGraph, runs: Sequence[LinkRun]) -> list[dict[str, str]]:
    """Of each link, by the names that its run has for them: equal links share the run of the first of them."""
    first: dict[int, tuple[str, ...]] = {}
    links = zip(graph.chain, runs, strict=True)
    return [dict(zip(first.setdefault(id(run), link.ops), link.ops, strict=True)) for link, run in links]


def link_ends(graph: OpGraph) -> tuple[LinkEnds, ...]:
    """What each link of the chain reads and writes beyond itself."""
    trained = {value.name for value in graph.of_role(Role.PARAMETER)}
    written: list[dict[str, None]] = []
    reads: list[tuple[str, ...]] = []
    parameters: list[tuple[str, ...]] = []
    before: set[str] = set()
    for link in graph.chain:
        ops = [graph.op(name) for name in link.ops]
        used = dict.fromkeys(read for op in ops for read in op.inputs)
        reads.append(tuple(read for read in used if read in before))
        parameters.append(tuple(read for read in used if read in trained))
        written.append(dict.fromkeys(out for op in ops for out in op.outputs))
        before.update(written[-1])
    later = {graph.output}
    writes: list[tuple[str, ...]] = []
    for own, read in zip(reversed(written), reversed(reads), strict=True):
        writes.append(tuple(name for name in own if name in later))
        later |= set(read)
    return tuple(LinkEnds(*ends) for ends in zip(reads, reversed(writes), parameters, strict=True))


Edge = tuple[Any, int]  # where in the graph of autograd the gradient of a tensor arrives


def _edges(names: Iterable[str], tensors: Iterable[Tensor]) -> dict[Edge, str]:
    trained = [(name, tensor) for name, tensor in zip(names, tensors, strict=True) if tensor.requires_grad]
    found = ((torch.autograd.graph.get_gradient_edge(tensor), name) for name, tensor in trained)
    return {(edge.node, edge.output_nr): name for edge, name in found}


def _mark_backward(results: list[Tensor], before: list[Any], op: str, watch: Watch, values: Mapping[Edge, str]) -> None:
    """The backward nodes that an op has made say, when they run, that they are the op's, and which gradients they make.

    `values` are the op's inputs, by where their gradients arrive.
    """

    def begin(_: Any) -> None:
        watch.op = op

    def end(names: tuple[str, ...]) -> Callable[[Any, Any], None]:
        def note(gradients: Any, _: Any) -> None:
            for name, gradient in zip(names, gradients, strict=True):
                number = watch.find(gradient) if name and gradient is not None else None
                if number is not None and not watch.storages[number].gradient:
                    watch.storages[number].gradient = name

        return note

    stop = {id(node) for node in before}
    nodes = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if id(node) in stop or node.name().endswith("AccumulateGrad"):
            continue
        stop.add(id(node))
        before.append(node)  # so that its identity stays its own while we look
        node.register_prehook(begin)
        node.register_hook(end(tuple(values.get(edge, "") for edge in node.next_functions)))
        nodes += [following for following, _ in node.next_functions if following is not None]


def meta(shape: tuple[int, ...], dtype: str, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta").requires_grad_(grad)
