"""Which links of the chain are taken as one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shardwright.pipeline.ir.graph import Link, OpGraph
from shardwright.pipeline.ir.profile import LinkKernels, Profile
from shardwright.pipeline.ops.blocks import blocks_of


@dataclass(frozen=True)
class LinkGroup:
    """Links first..last of the chain that are taken as one, and how they were run, if they were."""

    first: int
    last: int
    link: Link
    run: LinkKernels | None
    ops: dict[str, str]  # each of its ops -> the op that stands for it in that run


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
        run, ops = None, {}
        if kernels:
            place = group.run if group else kernels.chain[number]
            run = (kernels.runs if group else kernels.links)[place]
            there = firsts.setdefault((group is not None, place), link.ops)
            ops = dict(zip(link.ops, there, strict=True))
        found.append(LinkGroup(number, last, link, run, ops))
        number = last + 1
    return tuple(found)


def _as_one(links: tuple[Link, ...]) -> Link:
    if len(links) == 1:
        return links[0]
    ops = tuple(op for link in links for op in link.ops)
    common = tuple(name for link in links for name in link.common)
    return Link(ops, links[0].input, links[-1].output, links[0].block, common)
