"""Blocks of the model as `torch.compile` makes them, run on the device: what they take and what they keep.

What a compiled block does is not known before it is compiled: it is measured, each distinct block by itself, in every
way of keeping less for backward that torch's partitioner has. Weights and inputs are random; what enters a block has
the order in memory that the block before it gave it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

import shardwright.pipeline.ops.own  # noqa: F401  -- blocks may call them
from shardwright.pipeline.base.garbage import no_collection
from shardwright.pipeline.ir.graph import Arg, OpGraph, Ref, Role, Torch
from shardwright.pipeline.ir.profile import Compiled, CompiledBlock, CompiledWay
from shardwright.pipeline.ops.blocks import blocks_of, convolves, relus_between
from shardwright.pipeline.runtime.compiler.compiled import compiled
from shardwright.pipeline.runtime.programs.autocast import without_autocast
from shardwright.pipeline.runtime.step.memory import allocate_exactly
from shardwright.stages.profile.link import LinkEnds, link_ends
from shardwright.stages.profile.step import ends_of

Measured = tuple[CompiledWay, tuple[Tensor, ...]]  # and what left the block
KEEPS = (1.0, 0.9, 0.0)  # parts of what a block would keep for backward, chosen by torch
CHEAPEST = (0.75, 0.5, 0.3, 0.1)  # and so that the rest takes least to make again
NOISE = 1.01  # of measured times
LITTLE = 1e-3  # of the bytes of all results: a block that keeps no more is measured in the first way alone
REPEATS = 9
SETTLED = 0.2  # seconds of the same work before each round of passes that are timed
ROUNDS = 3  # more at most: its clocks are settled when two in a row are the same but for noise
AHEAD = 1.3  # of the time that the host needs to give the card its work: it needs more now and then
BEHIND = 0.8  # of the card's time: a host that needs more to give it its work may have kept it waiting


def measure_blocks(
    graph: OpGraph,
    device: torch.device,
    amp: bool,
    keeps: Iterable[float] = KEEPS,
    cheapest: Iterable[float] = CHEAPEST,
    measure: Measure | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> Compiled:
    """On the GPU, unless there is another way to measure."""
    if measure is None:
        allocate_exactly()
    ways = [*((part, False) for part in keeps), *((part, True) for part in cheapest)]
    bench = _Bench(graph, device, amp, ways, measure or measure_on_card)
    blocks = []
    for first, last in bench.spans:
        before = len(bench.runs)
        blocks.append(CompiledBlock(first, last, bench.run(first, last)))
        if len(bench.runs) > before:
            told(f"links {first}..{last}: {bench.runs[-1]}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Compiled(name, tuple(blocks), tuple(bench.runs))


class _Bench:
    def __init__(
        self, graph: OpGraph, device: torch.device, amp: bool, ways: list[tuple[float, bool]], measure: Measure
    ) -> None:
        self.graph, self.device, self.amp, self.ways, self.measure = graph, device, amp, ways, measure
        self.ends, self.spans = link_ends(graph), blocks_of(graph)
        self.relus = relus_between(graph, self.spans)
        self.runs: list[tuple[CompiledWay, ...]] = []
        self.known: dict[object, tuple[int, tuple[Tensor, ...]]] = {}  # block -> its run, and what left it
        self.values: dict[str, Tensor] = {}  # what is there before the chain, and what links write
        self.high = _bound(graph)
        self.results = sum(value.type.nbytes for value in graph.of_role(Role.RESULT))
        self.by_channel = convolves(graph)  # as the program lays its weights out
        with torch.no_grad():
            for op in map(graph.op, graph.prologue):
                arguments = {read: self._given(read) for read in op.inputs}
                function = as_function(graph, [op.name], list(arguments), op.outputs, device)
                self.values.update(zip(op.outputs, function(*arguments.values()), strict=True))

    def run(self, first: int, last: int) -> int:
        links = self.graph.chain[first : last + 1]
        ends = ends_of(self.ends, first, last)
        entering = [self.values[name] for name in ends.reads]
        after, before = links[0].input in self.relus, links[-1].output in self.relus
        key = (tuple(link.block for link in links), after, before, *((t.dtype, t.shape, t.stride()) for t in entering))
        if key not in self.known:
            ops = [op for link in links for op in link.ops]
            self.known[key] = self._measured(ops, ends, links[0].input if after else None, before)
        number, left = self.known[key]
        self.values.update(zip(ends.writes, left, strict=True))
        return number

    def _measured(
        self, ops: list[str], ends: LinkEnds, relu: str | None, before_relu: bool
    ) -> tuple[int, tuple[Tensor, ...]]:
        names = list(dict.fromkeys(name for op in ops for name in self.graph.op(op).inputs))
        written = {name for op in ops for name in self.graph.op(op).outputs}
        names = [name for name in names if name not in written]
        arguments = [self._argument(name) for name in names]
        function = as_function(self.graph, ops, names, ends.writes, self.device)
        after_relu = "" if relu is None else f"a{names.index(relu)}"
        autocast = partial(torch.autocast, self.device.type, torch.bfloat16, enabled=self.amp, cache_enabled=False)
        found: list[CompiledWay] = []
        left: tuple[Tensor, ...] = ()
        for keeps, cheapest in self.ways:
            torch._dynamo.reset()  # it gives up on a function that it has compiled often, and tells by the code's name
            relus: dict[str, Any] = {"after_relu": after_relu, "before_relu": before_relu}
            made = compiled(function, keeps, "python", cheapest=cheapest, **relus)
            block = BlockRun(made, arguments, autocast)
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), no_garbage():
                way, left = self.measure(block, keeps)
            found.append(replace(way, cheapest=cheapest))
            if found[0].saved_alone < LITTLE * self.results:
                break  # nothing to gain by keeping less
        self.runs.append(worth_choosing(found))
        return len(self.runs) - 1, left

    def _argument(self, name: str) -> Tensor:
        value = self.graph.values[name]
        if value.role is Role.RESULT:
            own = self.values[name].detach()
            return own.requires_grad_(value.grad and _is_inexact(own))
        tensor = self._given(name)
        return nn.Parameter(tensor) if value.role is Role.PARAMETER and _is_inexact(tensor) else tensor

    def _given(self, name: str) -> Tensor:
        """A parameter, buffer or input: the latter two are the same for all blocks."""
        if name in self.values:
            return self.values[name]
        value = self.graph.values[name]
        shape, dtype = value.type.shape, getattr(torch, value.type.dtype)
        if value.type.is_inexact:
            tensor = torch.randn(shape, device=self.device).mul_(0.02).to(dtype)
            tensor = tensor.abs().to(dtype) if value.role is Role.BUFFER else tensor  # variances are never negative
            if self.by_channel and value.role is not Role.INPUT and len(shape) == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
        else:
            tensor = torch.randint(self.high, shape, device=self.device).to(dtype)
        if value.role is not Role.PARAMETER:
            self.values[name] = tensor
        return tensor


def worth_choosing(found: Sequence[CompiledWay]) -> tuple[CompiledWay, ...]:
    """The first, in which all is kept, and those that no other surpasses, with less and less kept."""
    first, *others = found
    chosen: list[CompiledWay] = []
    for way in others:
        if not any(_as_good(known, way) for known in (first, *chosen)):
            chosen = [known for known in chosen if not _as_good(way, known)] + [way]
    return first, *sorted(chosen, key=lambda way: -way.saved_alone)


def _as_good(one: CompiledWay, other: CompiledWay) -> bool:
    """The one, known before the other, needs no more memory and not noticeably more time."""
    bytes_of = attrgetter("saved", "saved_alone", "forward_peak", "backward_peak")
    slower = one.forward + one.backward > NOISE * (other.forward + other.backward)
    return not slower and all(mine <= its for mine, its in zip(bytes_of(one), bytes_of(other), strict=True))


def _is_inexact(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class BlockRun:
    function: Callable[..., tuple[Tensor, ...]]
    arguments: list[Tensor]
    autocast: Callable[[], AbstractContextManager[Any]]

    def forward(self) -> list[Tensor]:
        with self.autocast():
            return list(self.function(*self.arguments))

    def backward(self, edges: list[Any], gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
        wanted = [tensor for tensor in self.arguments if tensor.requires_grad]
        return torch.autograd.grad(edges, wanted, gradients, allow_unused=True) if wanted and edges else ()

    def read_entering(self) -> None:
        """So that the card's cache has as much of it as if it had just been written."""
        for tensor in self.arguments:
            if _is_inexact(tensor) and not isinstance(tensor, nn.Parameter):
                tensor.detach().sum()

    def both(
        self, forward_done: Callable[[], object] = _nothing, gradients_made: Callable[[], object] = _nothing
    ) -> None:
        results = self.forward()
        forward_done()
        edges, gradients = _ends(results)
        results.clear()
        gradients_made()
        self.backward(edges, gradients)


Measure = Callable[[BlockRun, float], Measured]


def _ends(results: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
    """Where gradients enter, and gradients; both without the results.

    They are random, as in training: a card's clocks depend also on the numbers that it multiplies.
    """
    trained = [tensor for tensor in results if tensor.requires_grad]
    return [torch.autograd.graph.get_gradient_edge(t) for t in trained], [torch.randn_like(t) for t in trained]


def measure_on_card(block: BlockRun, keeps: float) -> Measured:
    for _ in range(2):
        block.both()
    results, saved, forward_peak = _weigh(block.forward)
    left = tuple(tensor.detach().clone() for tensor in results)
    edges, gradients = _ends(results)
    given = sum(gradient.untyped_storage().nbytes() for gradient in gradients)
    _, gone, _ = _weigh(results.clear)
    _, _, backward_peak = _weigh(lambda: block.backward(edges, gradients))
    edges.clear()
    gradients.clear()
    forward, backward = _seconds(block)
    alone = saved + gone
    return CompiledWay(keeps, forward, backward, saved, alone, forward_peak, alone + given + backward_peak), left


@contextmanager
def no_garbage() -> Iterator[None]:
    """None is there and none is looked for meanwhile: what an earlier block left would be freed as if by this one."""
    gc.collect()
    with no_collection():
        yield


def _weigh(work: Callable[[], Any]) -> tuple[Any, int, int]:
    """Its result, the bytes that it left, and the most that there were beyond those at its beginning."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    return result, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


def _seconds(block: BlockRun) -> tuple[float, float]:
    """Of its passes, when they take what they took before.

    A card that works all the time has other clocks than one that begins, by as much as the work is heavy: they are let
    settle with the block's own.
    """
    found = _medians(block)
    for _ in range(ROUNDS):
        before, found = found, _medians(block)
        if max(sum(before), sum(found)) < NOISE * min(sum(before), sum(found)):
            break
    return found


def _medians(block: BlockRun) -> tuple[float, float]:
    """Of the later passes of many, which follow one another as blocks do in training.

    Where the host is behind, the card copies memory first, not for longer than it must.
    """
    _repeat(block)
    seconds, marks = _queued(block)
    if seconds > BEHIND * _span(marks):
        _, marks = _queued(block, ahead=AHEAD * seconds)
        _repeat(block)
        _, marks = _queued(block, ahead=max(0.0, AHEAD * seconds - _span(marks)))
    forward = [_elapsed(mark[0], mark[1]) for mark in marks[REPEATS:]]
    backward = [_elapsed(mark[2], mark[3]) for mark in marks[REPEATS:]]
    return statistics.median(forward), statistics.median(backward)


def _repeat(block: BlockRun) -> None:
    end = time.perf_counter() + SETTLED
    while time.perf_counter() < end:
        block.both()


def _span(marks: list[list[torch.cuda.Event]]) -> float:
    return _elapsed(marks[0][0], marks[-1][-1])


def _queued(block: BlockRun, ahead: float = 0.0) -> tuple[float, list[list[torch.cuda.Event]]]:
    """Passes one after another: the seconds until the card was given all of them, and marks around both of each pass.

    Between them, which no step does, gradients that enter are made and the card's cache is filled with something else:
    in a step other blocks have run since weights and activations were there, and only what enters has just been
    written. The card is kept busy before them for about as many seconds as the host is to be `ahead`.
    """
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(2 * REPEATS)]
    device = torch.cuda.current_device()
    other = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    _keep_busy(ahead)
    start = time.perf_counter()
    for began, forward_done, gradients_made, done in marks:
        other.zero_()
        block.read_entering()
        began.record()
        block.both(partial(_mark_and_clear, forward_done, other), gradients_made.record)
        done.record()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds, marks


def _mark_and_clear(mark: torch.cuda.Event, other: Tensor) -> None:
    mark.record()
    other.zero_()


def _keep_busy(seconds: float) -> None:
    """With copies, after one that tells how long they take."""
    if not seconds:
        return
    side = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
    room = torch.empty_like(side)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for mark in (before, after):
        room.copy_(side)
        mark.record()
    torch.cuda.synchronize()
    for _ in range(round(seconds / _elapsed(before, after)) + 1):
        room.copy_(side)


def _elapsed(before: torch.cuda.Event, after: torch.cuda.Event) -> float:
    return float(before.elapsed_time(after)) / 1e3


# --------------------------------------------------------------------------------------------------- as a function


def as_function(
    graph: OpGraph, ops: Iterable[str], reads: list[str], writes: Iterable[str], device: torch.device
) -> Callable[..., tuple[Tensor, ...]]:
    """These ops as a Python function of tensors, which torch.compile can read."""
    names = {read: f"a{number}" for number, read in enumerate(reads)}
    given: dict[str, Any] = {"torch": torch, "DEVICE": device, "inf": float("inf"), "nan": float("nan")}
    given["without_autocast"] = without_autocast
    lines = []
    for name in ops:
        op = graph.op(name)
        positional = [_text(arg, names) for arg in op.args.positional]
        named = [f"{key}={_text(arg, names)}" for key, arg in op.args.named if key != "pin_memory"]
        for output in op.outputs:
            names[output] = f"v{len(names)}"
        single = op.outputs == (op.name,)
        targets = ", ".join(names[output] for output in op.outputs) + ("" if single else ",")
        called = [f"torch.ops.{op.target}", *positional, *named]
        call = f"without_autocast({', '.join(called)})" if op.exact else f"{called[0]}({', '.join(called[1:])})"
        lines.append(f"    {targets} = {call}")
    results = ", ".join(names[name] for name in writes)
    head = f"def block({', '.join(names[read] for read in reads)}):"
    exec("\n".join([head, *lines, f"    return ({results},)"]), given)
    function: Callable[..., tuple[Tensor, ...]] = given["block"]
    return function


def _text(arg: Arg, names: Mapping[str, str]) -> str:
    if isinstance(arg, Ref):
        return names[arg.value]
    if isinstance(arg, Torch):
        return "DEVICE" if arg.kind == "device" else f"torch.{arg.name}"
    if isinstance(arg, tuple):
        return f"[{', '.join(_text(item, names) for item in arg)}]"
    return repr(arg)


def _bound(graph: OpGraph) -> int:
    """Below which an integer is a row of every table and a class of every loss."""
    found = [2**31 - 1]
    for op in graph.ops:
        if op.target.startswith("aten.embedding."):
            found.append(graph.values[op.inputs[0]].type.shape[0])
        if op.target.startswith("aten.cross_entropy_loss."):
            found.append(graph.values[op.inputs[0]].type.shape[1])
    return min(found) if len(found) > 1 else 2
