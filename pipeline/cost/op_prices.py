"""Seconds of every op on one rank: those of its kernels on a GPU, where they are known, else by the roofline.

The one price of an op: the solver's problem, the price of a step, the chain that Rotor is given and what is explained
are made of it. A kernel was seen on the unsplit tensors. On a rank it has the shapes of its shards, its part of the
arithmetic, and as much less to read and write as its shapes are smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, prod

from shardwright.pipeline.cost.unsplit import card_of
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Strategy
from shardwright.pipeline.ir.profile import Kernel, Kernels, Profile
from shardwright.pipeline.ops.autocast import LOW
from shardwright.pipeline.rates.compute import Seconds, op_seconds, optimizer_seconds, part_of_bytes, part_of_work
from shardwright.pipeline.rates.kernels import Card, kernel_seconds

CAST = "_to_copy"
EAGER = Seconds(1.0, 1.0)  # what an op takes of what its kernels do where it is not compiled

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OpKernels:
    """Of an op of the unsplit step. Equal links were run once: `op` is the one that was run."""

    op: str
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()


@dataclass(frozen=True)
class OpPrice:
    seconds: Seconds
    casts: float = 0.0  # of the forward seconds, those in which autocast makes its arguments


@dataclass(frozen=True, eq=False)
class OpPrices:
    """Of the ops of a whole model, whichever of its partitions they are in."""

    graph: OpGraph
    profile: Profile
    cluster: Cluster  # on its mesh
    _made: dict[tuple[str, Strategy], OpPrice] = field(default_factory=dict)

    @cached_property
    def card(self) -> Card | None:
        on_gpu = self.profile.kernels is not None and self.profile.device == "cuda"
        return card_of(self.cluster.compute) if on_gpu else None

    def __call__(self, op: str, strategy: Strategy) -> OpPrice:
        """Of an op run in this way, without the collectives inside it."""
        run, share = self.alike(op)
        key = run or op, strategy
        if key not in self._made:
            self._made[key] = self._priced(op, strategy)
        found = self._made[key]
        return OpPrice(_times(found.seconds, share), share.forward * found.casts) if share != EAGER else found

    def alike(self, op: str) -> tuple[str, Seconds]:
        """Ops of equal costs and layouts have equal prices where these are equal too: the op whose kernels were run,
        and what it takes of their seconds in a block whose compiled form was measured."""
        return (self.kernels[op].op, self._compiled.get(op, EAGER)) if self.card else ("", EAGER)

    def _priced(self, op: str, strategy: Strategy) -> OpPrice:
        if self.card is None:
            cost, compute = self.profile.ops[op], self.cluster.compute
            return OpPrice(op_seconds(self.graph, op, cost, strategy, compute, self.cluster.sizes))
        own = self.local_kernels(op, strategy)
        forward, backward = ([kernel_seconds(one, self.card) for one in part] for part in (own.forward, own.backward))
        casts = sum(took for took, one in zip(forward, own.forward, strict=True) if is_cast(self.graph, one))
        return OpPrice(Seconds(sum(forward), sum(backward)), casts)

    def local_kernels(self, op: str, strategy: Strategy) -> OpKernels:
        """Those of an op as one rank runs them."""
        local, own = _LocalKernels(self, op, strategy), self.kernels[op]
        return OpKernels(own.op, tuple(map(local.of, own.forward)), tuple(map(local.of, own.backward)))

    def unsplit(self, op: str, strategy: Strategy) -> Seconds:
        """Of the op on the whole batch, on one rank."""
        if self.card is not None:
            return _times(_in_all(self.kernels[op], self.card), self.alike(op)[1])
        slices = self.profile.kernels.slices if self.profile.kernels else 1
        one = (1,) * len(self.cluster.sizes)
        return op_seconds(self.graph, op, self.profile.ops[op].times(slices), strategy, self.cluster.compute, one)

    @cached_property
    def _compiled(self) -> dict[str, Seconds]:
        measured, found = self.profile.compiled, dict[str, Seconds]()
        if measured is None or not measured.runs or self.card is None:
            return found
        for block in measured.blocks:
            ops = [name for link in self.graph.chain[block.first : block.last + 1] for name in link.ops]
            eager, run = [_in_all(self.kernels[name], self.card) for name in ops], measured.runs[block.run][0]
            forward, backward = sum(own.forward for own in eager), sum(own.backward for own in eager)
            share = Seconds(run.forward / forward if forward else 1.0, run.backward / backward if backward else 1.0)
            found |= dict.fromkeys(ops, share)
        return found

    def optimizer(self, nbytes: float, copies: float) -> float:
        """Of a parameter that has so many bytes on this rank; a GPU's kernels update many of them at once."""
        if self.card is None:
            return optimizer_seconds(nbytes, copies, self.cluster.compute)
        return nbytes * self._optimizer_pace

    @cached_property
    def _optimizer_pace(self) -> float:
        """Seconds for each byte of all parameters."""
        kernels, card = self.profile.kernels, self.card
        assert kernels is not None and card is not None
        return sum(kernel_seconds(one, card) for one in kernels.optimizer) / max(1, self.profile.parameter_bytes)

    @cached_property
    def kernels(self) -> dict[str, OpKernels]:
        assert self.profile.kernels is not None
        return {own: kernels for own, kernels in _by_op(self.graph, self.profile.kernels)}


def _by_op(graph: OpGraph, kernels: Kernels) -> Iterator[tuple[str, OpKernels]]:
    for name in graph.prologue:
        yield name, OpKernels(name, tuple(one for one in kernels.prologue if one.op == name))
    known: dict[int, tuple[OpKernels, ...]] = {}
    for link, place in zip(graph.chain, kernels.chain, strict=True):
        run = kernels.links[place]
        if place not in known:  # this is the link that was run
            known[place] = tuple(
                OpKernels(name, *(tuple(one for one in part if one.op == name) for part in (run.forward, run.backward)))
                for name in link.ops
            )
        yield from zip(link.ops, known[place], strict=True)


def _in_all(kernels: OpKernels, card: Card) -> Seconds:
    return Seconds(*(sum(kernel_seconds(one, card) for one in part) for part in (kernels.forward, kernels.backward)))


def _times(seconds: Seconds, share: Seconds) -> Seconds:
    return Seconds(share.forward * seconds.forward, share.backward * seconds.backward)


def is_cast(graph: OpGraph, kernel: Kernel) -> bool:
    """Of an argument, as `kept` makes it apart from the product itself."""
    return kernel.name == CAST and bool(kernel.op) and graph.op(kernel.op).target.split(".")[1] in LOW


class _LocalKernels:
    """The kernels of an op as one rank runs them."""

    def __init__(self, prices: OpPrices, op: str, strategy: Strategy) -> None:
        graph, cost, sizes, own = prices.graph, prices.profile.ops[op], prices.cluster.sizes, prices.kernels[op]
        self.slices = prices.profile.kernels.slices if prices.profile.kernels else 1
        bytes_seen = sum(one.read + one.written for one in own.forward)
        work_seen = sum(one.flops for one in (*own.forward, *own.backward))
        cut = cost.bytes_forward / bytes_seen if bytes_seen else 1.0  # where the batch is in slices
        done = (cost.flops_forward + cost.flops_backward) / work_seen if work_seen else 1.0
        self.work = done * part_of_work(strategy, sizes)
        self.size = cut * part_of_bytes(graph, op, strategy, sizes)
        self.shapes: dict[Shape, Shape] = {}
        found = graph.op(op)
        layouts = (*strategy.inputs, *strategy.outputs)
        for kind, layout in zip(graph.types((*found.inputs, *found.outputs)), layouts, strict=True):
            if layout.holds(kind.shape, sizes):
                self._add(kind.shape, layout.local_shape(kind.shape, sizes))

    def _add(self, whole: Shape, local: Shape) -> None:
        """And the forms in which kernels see it: with leading dims as one, with the last two exchanged."""
        unsliced = [whole]
        if self.slices > 1:
            unsliced += [(*whole[:n], size * self.slices, *whole[n + 1 :]) for n, size in enumerate(whole)]
        for seen in unsliced:
            for merged in range(max(1, len(whole) - 1)):
                pair = [(prod(shape[: merged + 1]), *shape[merged + 1 :]) for shape in (seen, local)]
                self.shapes.setdefault(*pair)
                self.shapes.setdefault(*((*shape[:-2], *shape[-2:][::-1]) for shape in pair))

    def of(self, kernel: Kernel) -> Kernel:
        shapes = tuple(self.shapes.get(shape) or self._scaled(shape) for shape in kernel.shapes)
        whole = sum(map(prod, kernel.shapes))
        part = sum(map(prod, shapes)) / whole if whole else self.size
        return replace(
            kernel,
            flops=kernel.flops * self.work,
            read=round(kernel.read * part),
            written=round(kernel.written * part),
            shapes=shapes,
        )

    def _scaled(self, shape: Shape) -> Shape:
        """Of what is no tensor of the graph: as much less as those have."""
        return (ceil(shape[0] * self.size), *shape[1:]) if shape else shape
