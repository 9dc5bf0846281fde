"""Which links of the chain are taken as one, and which of them cost the same."""

from __future__ import annotations

from collections.abc import Container, Hashable
from dataclasses import dataclass, replace
from enum import Enum

from shardwright.pipeline.cost.op_prices import OpPrices
from shardwright.pipeline.ir.graph import Link, OpGraph
from shardwright.pipeline.ir.profile import LinkKernels, Profile
from shardwright.pipeline.ir.program import Convert, Step, Tensor
from shardwright.pipeline.ops.blocks import blocks_of
from shardwright.pipeline.sharding.sharded import Sharded


@dataclass(frozen=True)
class LinkGroup:
    """Links first..last of the chain that are taken as one, and how they were run, if they were."""

    first: int
    last: int
    link: Link
    run: LinkKernels | None
    ops: dict[str, str]  # each of its ops -> the op that stands for it in that run
    run_number: tuple[bool, int] | None = None  # of joined links or of single ones, which run


class Join(Enum):
    """Which links are taken as one."""

    NONE = "none"  # each stands alone
    NEEDLESS = "needless"  # those between which nothing crosses that a backward needs
    COMPILED = "compiled"  # those of a block, which is compiled


def groups_of(graph: OpGraph, profile: Profile, join: Join) -> tuple[LinkGroup, ...]:
    if join is Join.COMPILED:
        return tuple(
            LinkGroup(first, last, _as_one(graph.chain[first : last + 1]), None, {}) for first, last in blocks_of(graph)
        )
    kernels = profile.kernels
    joined = {group.first: group for group in kernels.joined} if kernels and join is Join.NEEDLESS else {}
    firsts: dict[tuple[bool, int], tuple[str, ...]] = {}  # a run -> the ops of the first links that it stands for
    found: list[LinkGroup] = []
    number = 0
    while number < len(graph.chain):
        group = joined.get(number)
        last = group.last if group else number
        links = graph.chain[number : last + 1]
        link = _as_one(links)
        run, ops, own = None, {}, None
        if kernels:
            own = group is not None, group.run if group else kernels.chain[number]
            run = (kernels.runs if group else kernels.links)[own[1]]
            ops = dict(zip(link.ops, firsts.setdefault(own, link.ops), strict=True))
        found.append(LinkGroup(number, last, link, run, ops, own))
        number = last + 1
    return tuple(found)


def _as_one(links: tuple[Link, ...]) -> Link:
    if len(links) == 1:
        return links[0]
    ops = tuple(op for link in links for op in link.ops)
    common = tuple(name for link in links for name in link.common)
    return Link(ops, links[0].input, links[-1].output, links[0].block, common)


def likeness(sharded: Sharded, ops: OpPrices, first: int, last: int, growing: Container[str] = ()) -> Hashable:
    """Equal for runs of links, first..last, that do the same in the same layouts to tensors that are held alike.

    `Link.block` says that ops and types are equal; what it leaves open is added. `growing` are the parameters whose
    gradients appear in backward.
    """
    graph, profile, numbers = sharded.graph, ops.profile, dict[str, int]()
    links = graph.chain[first : last + 1]

    def seen(name: str) -> Hashable:
        if name in numbers:
            return numbers[name]
        number = numbers[name] = len(numbers)
        value, memory = graph.values[name], profile.storage.get(name, name)
        alone = bool(graph.beside(name)), name in graph.common, name in growing
        return number, value.type, value.role, value.grad, sharded.home[name], alone, seen(memory)

    def placed(tensor: Tensor) -> Hashable:
        return seen(tensor.value), tensor.layout

    def step_of(step: Step) -> Hashable:
        if isinstance(step, Convert):
            return placed(step.source), placed(step.target), step.again
        cost = profile.ops[step.op]
        ends = tuple(map(placed, step.inputs)), tuple(map(placed, step.outputs))
        return (
            ops.alike(step.op),
            sharded.strategy(step.op),
            ends,
            replace(cost, saves=()),
            tuple(map(seen, cost.saves)),
        )

    return (
        tuple((link.block, tuple(map(seen, link.common))) for link in links),
        tuple(step_of(step) for steps in sharded.program.links[first : last + 1] for step in steps),
        links[0].input is None or seen(links[0].input),
        placed(sharded.leaving(last)),
    )
