"""Several mesh axes taken as one, for a collective over all their ranks.

A ring of n ranks takes `rounds(n)` rounds and sends `share(n)` of the tensor over each link: 2 (n-1) and 2 (n-1)/n for
an all-reduce, n-1 and (n-1)/n for an all-gather or a reduce-scatter, n-1 and (n-1)/n^2 for an all-to-all. So a link of
an axis with n_i ranks moves bandwidth_i * share(n_i) bytes a second, and a round on it takes latency_i / rounds(n_i).
The ring over all n = n_1 n_2 ... ranks is as slow as the slowest of them:

    bandwidth = min_i(bandwidth_i * share(n_i)) / share(n)
    latency   = max_i(latency_i / rounds(n_i)) * rounds(n)

For one axis this is what the axis itself has.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.pipeline.ir.cluster import LATER, Axis, LinkCost


def joined_link(collective: str, axes: Sequence[Axis]) -> LinkCost | None:
    """What a collective over these axes takes; None where they have one rank."""
    wide = [axis for axis in axes if axis.size > 1]
    if len(wide) <= 1:
        return _link(wide[0], collective) if wide else None
    size = prod(axis.size for axis in wide)
    own = [(_link(axis, collective), axis.size) for axis in wide]
    return LinkCost(
        max(link.latency / _rounds(collective, n) for link, n in own) * _rounds(collective, size),
        min(link.bandwidth * _share(collective, n) for link, n in own) / _share(collective, size),
    )


def _link(axis: Axis, collective: str) -> LinkCost:
    return axis.links["reduce_scatter" if collective == LATER and LATER not in axis.links else collective]


def _rounds(collective: str, size: int) -> int:
    return (size - 1) * (2 if collective == "all_reduce" else 1)


def _share(collective: str, size: int) -> float:
    """The part of a tensor that a link passes on."""
    return {"all_reduce": 2.0, "all_to_all": 1 / size}.get(collective, 1.0) * (size - 1) / size
