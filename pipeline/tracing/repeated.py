"""A graph of a model of many equal layers, from a trace of few of them.

`torch.export` of 80 layers takes ten times as long as of 8. So a run of layers that are alike is cut to its first seven
and its last, that is traced, and where the chain has one block for each of them, one in the middle is repeated until
there are as many as the model has. Layers are alike where nothing that their modules hold tells them apart but their
own number. What only `forward()` knows is seen in the trace: a layer that is used in another way, every second or
every sixth, is no equal block. Where anything of this does not hold, the whole model is traced. Not seen: a `forward()`
that treats some layer beyond the first seven in its own way, by a number in the settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from shardwright.pipeline.base.errors import TraceError
from shardwright.pipeline.config import Config
from shardwright.pipeline.ir.graph import Arg, Args, Link, Op, OpGraph, Ref, Role, Value
from shardwright.pipeline.ir.verify import InvalidGraph, verify_graph
from shardwright.pipeline.tracing.build import build_model, fake_mode
from shardwright.pipeline.tracing.shortened import EqualBlocks, equal_blocks
from shardwright.pipeline.tracing.trace import trace, trace_module

KEPT = 8  # layers of a run: what happens at every second to seventh is among the first of them
MIDDLE = 3  # the block that is repeated
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
AGAIN = "_again"  # in the name of an op that is a copy
TENSORS = (Role.PARAMETER, Role.BUFFER)


class NotEqual(Exception):
    """The layers are not equal, or not known to be: the model is to be traced as a whole."""


@dataclass(frozen=True)
class Layers:
    """A list of a model's layers, so many of which are left out of its equal ones."""

    name: str
    first: int  # of those that are alike
    left_out: int


def trace_repeated(config: Config) -> OpGraph:
    """What `trace` gives, but for the names of ops."""
    mode = fake_mode()
    model = build_model(config, mode)
    whole = {name: _tensor(parameter) for name, parameter in model.named_parameters()}
    cut = list(_cut(model))
    try:
        if not cut:
            raise NotEqual
        graph = trace_module(config, model, mode)
        for layers in cut:
            graph = repeated(graph, layers)
        if {v.origin: (v.type.shape, v.type.dtype, v.grad) for v in _parameters(graph, whole)} != whole:
            raise NotEqual
        graph = replace(graph, values=_in_order(graph, whole))
        verify_graph(graph)
    except (NotEqual, TraceError, InvalidGraph):  # a forward() may count on layers that are not there
        return trace(config)
    return graph


def _tensor(parameter: nn.Parameter) -> tuple[tuple[int, ...], str, bool]:
    return tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), parameter.requires_grad


def _parameters(graph: OpGraph, known: Iterable[str]) -> Iterator[Value]:
    """With what is not trained, which has the role of buffers."""
    names = set(known)
    return (v for v in graph.values.values() if v.role is Role.PARAMETER or (v.role in TENSORS and v.origin in names))


def _in_order(graph: OpGraph, names: Iterable[str]) -> dict[str, Value]:
    """Parameters as the model has them, then all else."""
    place = {name: number for number, name in enumerate(names)}
    last = len(place)
    ordered = sorted(graph.values.values(), key=lambda v: place.get(v.origin, last) if v.role in TENSORS else last)
    return {value.name: value for value in ordered}


# --------------------------------------------------------------------------------------------------------- the module


def _cut(model: nn.Module) -> Iterator[Layers]:
    """The model's lists of layers, each without most of its longest run of those that are alike."""
    settings = getattr(model, "config", None)
    if settings is None or not hasattr(settings, "to_dict"):
        return  # what tells layers apart may stand anywhere
    for name, layers in list(_lists(model, "")):
        first, count = _longest_run(layers)
        if count > KEPT and not _names_layers(settings.to_dict(), len(layers)):
            del layers[first + KEPT - 1 : first + count - 1]
            yield Layers(name, first, count - KEPT)


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.ModuleList]]:
    """Outermost ones."""
    for own, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield name + own, child
        else:
            yield from _lists(child, f"{name}{own}.")


def _longest_run(layers: nn.ModuleList) -> tuple[int, int]:
    """Where it begins, and how many it has."""
    best, first = (0, 0), 0
    for number in range(len(layers)):
        if number and not _alike(layers[number - 1], layers[number], (number - 1, number)):
            first = number
        best = max(best, (first, number + 1 - first), key=lambda run: run[1])
    return best


def _alike(one: nn.Module, other: nn.Module, numbers: tuple[int, int]) -> bool:
    """Whether nothing but their own numbers tells two modules apart."""
    if type(one) is not type(other) or vars(one).keys() != vars(other).keys():
        return False
    for key, own in vars(one).items():
        same = vars(other)[key]
        if key in ("_modules", "_parameters", "_buffers"):
            if own.keys() != same.keys():
                return False
            if not all(_alike_held(own[name], same[name], numbers) for name in own):
                return False
        elif not _same(own, same, numbers):
            return False
    return True


def _alike_held(one: Any, other: Any, numbers: tuple[int, int]) -> bool:
    """Of modules, parameters and buffers."""
    if one is None or other is None:
        return one is other
    if isinstance(one, nn.Module):
        return isinstance(other, nn.Module) and _alike(one, other, numbers)
    kinds = ((type(t), t.shape, t.dtype, t.requires_grad) for t in (one, other))
    return one is not other and next(kinds) == next(kinds)


def _same(one: Any, other: Any, numbers: tuple[int, int]) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other) or (type(one) is int and (one, other) == numbers)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key], numbers) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b, numbers) for a, b in zip(one, other, strict=True))
    return isinstance(one, set) and one == other


def _names_layers(settings: Any, count: int) -> bool:
    """Whether a setting has something of its own for each layer, or numbers of layers."""
    if isinstance(settings, dict):
        return any(_names_layers(own, count) for own in settings.values())
    if not isinstance(settings, list | tuple) or not settings:
        return False
    numbers = all(type(own) is int and 0 <= own < count for own in settings)
    each = len(settings) == count and any(own != settings[0] for own in settings)
    return numbers or each or any(_names_layers(own, count) for own in settings)


# ---------------------------------------------------------------------------------------------------------- the graph


def repeated(graph: OpGraph, layers: Layers) -> OpGraph:
    """With the layers that were left out."""
    return _Repetition(graph, layers).graph()


class _Repetition:
    """Links up to the middle block's end stay, then come its copies, then the others, whose layers have higher numbers.
    An op of the prologue belongs to the links that read what it leads to."""

    def __init__(self, graph: OpGraph, layers: Layers) -> None:
        self.whole, self.layers = graph, layers
        self.number = re.compile(rf"^({re.escape(layers.name)}\.)(\d+)(?=\.|$)")
        self.links = _links_of(graph)
        run = self._run()
        start, end = run.first + MIDDLE * run.length, run.first + run.count * run.length
        self.after = start + run.length
        self.block = range(start, self.after)
        self._check([range(first, first + run.length) for first in range(self.after, end, run.length)])

    def _run(self) -> EqualBlocks:
        """The blocks that have the layers' tensors, one for each layer, the last among them: a block that begins inside
        a layer, or a first layer that reads more than the others, makes them one less."""
        last = self.layers.first + KEPT - 1
        for run in equal_blocks([link.block for link in self.whole.chain]):
            found = {number for number, _ in self._tensors(range(run.first, run.first + run.length * run.count))}
            if run.count in (KEPT - 1, KEPT) and len(found) >= KEPT - 1 and max(found) == last:
                return run
        raise NotEqual

    def _ops(self, links: range) -> list[Op]:
        """Of these links alone, in the graph's order."""
        own = set(links)
        return [op for op in self.whole.ops if self.links[op.name] and self.links[op.name] <= own]

    def _tensors(self, links: range) -> Iterator[tuple[int, Value]]:
        """The layers' tensors that these links read, each with the number of its layer."""
        for name in dict.fromkeys(name for op in self._ops(links) for name in op.inputs):
            value = self.whole.values[name]
            if value.role in TENSORS and (found := self.number.match(value.origin)):
                yield int(found[2]), value

    def _check(self, later: list[range]) -> None:
        """From the block on each tensor of the layers belongs to one link; blocks read the same of what is not own."""
        readers: dict[str, set[int]] = {}
        for op in self.whole.ops:
            for name in op.inputs:
                readers.setdefault(name, set()).update(self.links[op.name])
        tensors = (name for name, value in self.whole.values.items() if self.number.match(value.origin))
        links = (readers.get(name, set()) for name in tensors)
        if any(len(own) > 1 and max(own) >= self.block[0] for own in links):
            raise NotEqual
        if any(self.whole.chain[number].common for number in self.block):
            raise NotEqual
        given = self._given(self.block)
        if any(self._given(links) != given for links in later):
            raise NotEqual

    def _given(self, links: range) -> object:
        """The ops of a block by numbers in place of the names of what is its own."""
        ops = self._ops(links)
        own = dict.fromkeys([value.name for _, value in self._tensors(links)])
        own |= dict.fromkeys([self.whole.chain[links[0]].input or ""])
        own |= dict.fromkeys(out for op in ops for out in op.outputs)
        names = {name: f"own {number}" for number, name in enumerate(own)}
        return [(op.target, _renamed(op.args, names)) for op in ops]

    def graph(self) -> OpGraph:
        graph, chain, prologue = self.whole, self.whole.chain, set(self.whole.prologue)
        block = self._ops(self.block)
        exit_ = chain[self.block[-1]].output
        moved = self._shifted(range(self.after, len(chain)), self.layers.left_out)
        values = {moved.get(name, value).name: moved.get(name, value) for name, value in graph.values.items()}
        links: list[Link] = []
        copies: list[Op] = []
        entry = exit_
        for times in range(1, self.layers.left_out + 1):
            made = self._copied(block, times, entry)
            values |= {value.name: value for name, value in made.items() if name != chain[self.block[0]].input}
            names = {name: value.name for name, value in made.items()}
            entry = names[exit_]
            links += [self._link(chain[number], names, times) for number in self.block]
            copies += [self._op(op, names, times) for op in block]
        names = {name: value.name for name, value in moved.items()} | {exit_: entry}
        later = {op.name for op in self._ops(range(self.after, len(chain)))}
        ops = [self._op(op, names, 0) if op.name in later else op for op in graph.ops]
        sizes = [len(prologue), len(prologue) + sum(len(link.ops) for link in chain[: self.after])]
        parts = ops[: sizes[0]], ops[sizes[0] : sizes[1]], ops[sizes[1] :]
        before = [op for op in copies if op.name.rpartition(AGAIN)[0] in prologue]
        beside = [op for op in copies if op.name.rpartition(AGAIN)[0] not in prologue]
        place = 1 + max((n for n, op in enumerate(parts[0]) if op in block), default=len(parts[0]) - 1)
        first = [*parts[0][:place], *before, *parts[0][place:]]
        tail = (replace(link, input=link.input and names.get(link.input, link.input)) for link in chain[self.after :])
        return OpGraph(
            values=values,
            ops=(*first, *parts[1], *beside, *parts[2]),
            output=graph.output,
            prologue=tuple(op.name for op in first),
            chain=(*chain[: self.after], *links, *tail),
        )

    def _shifted(self, links: range, by: int) -> dict[str, Value]:
        """The layers' tensors that these links read, each as that of the layer so many further."""
        found = {}
        for layer, value in self._tensors(links):
            origin = self.number.sub(rf"\g<1>{layer + by}", value.origin)
            name = value.name.replace(value.origin.replace(".", "_").lower(), origin.replace(".", "_").lower())
            found[value.name] = replace(value, name=name, origin=origin)
        return found

    def _copied(self, block: Sequence[Op], times: int, entry: str) -> dict[str, Value]:
        """Values of the middle block -> those of its copy; what it is given is another's exit."""
        made = self._shifted(self.block, times)
        for name in (out for op in block for out in op.outputs):
            value = self.whole.values[name]
            made[name] = replace(value, name=_again(name, times), origin=_again(value.origin, times))
        given = self.whole.chain[self.block[0]].input
        assert given is not None
        made[given] = replace(self.whole.values[given], name=entry)
        return made

    def _link(self, link: Link, names: dict[str, str], times: int) -> Link:
        ops = tuple(_again(op, times) for op in link.ops)
        return replace(link, ops=ops, input=link.input and names[link.input], output=names[link.output])

    def _op(self, op: Op, names: dict[str, str], times: int) -> Op:
        name = _again(op.name, times) if times else op.name
        by = times or self.layers.left_out
        module = self.number.sub(lambda found: f"{found[1]}{int(found[2]) + by}", op.module)
        return replace(
            op,
            name=name,
            args=_renamed(op.args, names),
            outputs=tuple(names.get(out, out) for out in op.outputs),
            mutates=tuple(names.get(own, own) for own in op.mutates),
            module=module,
        )


def _again(name: str, times: int) -> str:
    return f"{name}{AGAIN}{times}"


def _links_of(graph: OpGraph) -> dict[str, set[int]]:
    """The links that an op serves: its own, or those that read what an op of the prologue leads to."""
    links = {name: {number} for number, link in enumerate(graph.chain) for name in link.ops}
    users = graph.consumers()
    for name in reversed(graph.prologue):
        links[name] = {n for out in graph.op(name).outputs for reader in users[out] for n in links[reader.name]}
    return links


def _renamed(args: Args, names: dict[str, str]) -> Args:
    def new(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(names.get(arg.value, arg.value))
        return tuple(map(new, arg)) if isinstance(arg, tuple) else arg

    return Args(tuple(map(new, args.positional)), tuple((name, new(value)) for name, value in args.named))
