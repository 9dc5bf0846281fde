"""Seconds of collectives from the latency and bandwidth of one link, n devices, a tensor of N bytes:

ring    all-reduce       2 (n-1) (latency + N / n / bandwidth)
        gather, scatter    (n-1) (latency + N / n / bandwidth)
        all-to-all         (n-1) (latency + N / n^2 / bandwidth)
tree    all-reduce       2 log2(n) latency + 2 N / bandwidth, which is faster for small tensors
"""

from __future__ import annotations

import math

from pipeline.ir.cluster import COLLECTIVES, SEND, LinkCost

FASTEST = 1e15  # bytes/s that stand for "costs nothing" on an axis of one rank
NOTHING = LinkCost(0.0, FASTEST)


def ring_links(size: int, latency: float, bandwidth: float) -> dict[str, LinkCost]:
    """A ring sends 2 (n-1)/n of the tensor over each link for an all-reduce, (n-1)/n of it for the others."""
    if size == 1:
        return dict.fromkeys((*COLLECTIVES, SEND), NOTHING)
    share, steps = (size - 1) / size, size - 1
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1 / size}
    links = {
        name: LinkCost(latency * steps * max(1, rounds[name]), bandwidth / (share * rounds[name])) for name in rounds
    }
    return links | {
        "all_reduce": _or_tree(links["all_reduce"], size, latency, bandwidth),
        SEND: LinkCost(latency, bandwidth),
    }


def _or_tree(ring: LinkCost, size: int, latency: float, bandwidth: float) -> LinkCost:
    """The faster of ring and tree: two lines that cross."""
    tree = LinkCost(2 * math.ceil(math.log2(size)) * latency, bandwidth / 2)
    if tree.latency >= ring.latency:
        return ring
    crossing = (ring.latency - tree.latency) / (1 / tree.bandwidth - 1 / ring.bandwidth)
    return LinkCost(ring.latency, ring.bandwidth, ((0.0, tree.latency), (crossing, ring.seconds(crossing))))
