"""Seconds of the whole unsplit step on a card: its kernels, issued by a host that starts with an empty queue."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from shardwright.pipeline.ir.cluster import HALF, NO_HOST, Compute
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.profile import Kernel, Kernels
from shardwright.pipeline.rates.kernels import REPLAYED_START, START, Card, KernelRun, kernel_seconds, queue_seconds


@dataclass(frozen=True)
class StepSeconds:
    forward: float
    backward: float
    optimizer: float

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.optimizer


def card_of(compute: Compute) -> Card:
    """A card as a cluster describes it: what large products reach in each precision, its memory, its processors."""
    products = {dtype: max(compute.matmul_of(dtype).rates) for dtype in ("float32", *HALF)}
    start = REPLAYED_START if compute.host == NO_HOST else START
    card = Card(products, compute.memory_rate, start=start, host=compute.host, unaligned=compute.unaligned)
    return replace(card, processors=compute.processors) if compute.processors else card


def step_seconds(graph: OpGraph, kernels: Kernels, card: Card) -> StepSeconds:
    parts: dict[int, tuple[KernelRun, KernelRun]] = {}
    before = ""
    for link, number in zip(graph.chain, kernels.chain, strict=True):
        modules = [graph.op(name).module for name in link.ops]
        beside = card.host.op * len(link.ops) + card.host.module * _entered([before, *modules])
        before = modules[-1]
        if number not in parts:
            run = kernels.links[number]
            pace = card.host.kernel + beside / max(1, len(run.forward))
            parts[number] = _part(run.forward, card, pace), _part(run.backward, card, card.host.backward_kernel)
    prologue = _part(kernels.prologue, card, card.host.kernel + card.host.op)
    updated = sum(1 for _ in graph.of_role(Role.PARAMETER))
    pace = card.host.parameter * updated / max(1, len(kernels.optimizer))
    forward = [prologue, *(parts[number][0] for number in kernels.chain)]
    backward = [parts[number][1] for number in reversed(kernels.chain)]
    return StepSeconds(*queue_seconds([forward, backward, [_part(kernels.optimizer, card, pace)]]))


def _part(kernels: tuple[Kernel, ...], card: Card, pace: float) -> KernelRun:
    waits = frozenset(number for number, kernel in enumerate(kernels) if kernel.waits)
    return KernelRun(tuple(kernel_seconds(kernel, card) for kernel in kernels), pace, waits)


def _entered(modules: list[str]) -> int:
    """How many modules are entered on the way from one op to the next, parents included."""
    count = 0
    for before, after in pairwise(modules):
        held, wanted = before.split("."), after.split(".") if after else []
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, wanted, strict=False)))
        count += len(wanted) - shared
    return count
