"""Seconds of collectives from what the links of an axis carry, n devices, a tensor of N bytes:

ring    all-reduce       2 (n-1) (latency + N / n / around)
        gather, scatter    (n-1) (latency + N / n / around)
        all-to-all         (n-1) (latency + N / n^2 / each)
tree    all-reduce       2 log2(n) latency + 2 N / around, which is faster for small tensors
next    send                     latency + N / one
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.ir.cluster import COLLECTIVES, SEND, LinkCost

FASTEST = 1e15  # bytes/s that stand for "costs nothing": a device to itself
NOTHING = LinkCost(0.0, FASTEST)


@dataclass(frozen=True)
class Link:
    """What a group of devices has, in bytes/s, while the groups beside it do the same."""

    latency: float
    around: float  # past each device, from one to the next around a ring
    one: float  # from one device to the next, nothing else in the group
    each: float  # out of each device, to all others at once

    @classmethod
    def alike(cls, latency: float, bandwidth: float) -> Link:
        return cls(latency, bandwidth, bandwidth, bandwidth)


def group_links(size: int, link: Link) -> dict[str, LinkCost]:
    """A ring sends 2 (n-1)/n of the tensor over each link for an all-reduce, (n-1)/n of it for the others."""
    if size == 1:
        return dict.fromkeys((*COLLECTIVES, SEND), NOTHING)
    share, steps = (size - 1) / size, size - 1
    once = LinkCost(steps * link.latency, link.around / share)
    return {
        "all_reduce": _or_tree(LinkCost(2 * once.latency, once.bandwidth / 2), size, link),
        "all_gather": once,
        "reduce_scatter": once,
        "all_to_all": LinkCost(once.latency, link.each * size / share),
        SEND: LinkCost(link.latency, link.one),
    }


def _or_tree(ring: LinkCost, size: int, link: Link) -> LinkCost:
    """The faster of ring and tree: two lines that cross."""
    tree = LinkCost(2 * math.ceil(math.log2(size)) * link.latency, link.around / 2)
    if tree.latency >= ring.latency:
        return ring
    crossing = (ring.latency - tree.latency) / (1 / tree.bandwidth - 1 / ring.bandwidth)
    return LinkCost(ring.latency, ring.bandwidth, ((0.0, tree.latency), (crossing, ring.seconds(crossing))))
