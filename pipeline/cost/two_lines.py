"""A step played on two lines: the host issues kernels, the device runs them.

    host     F0 |F1 |F2 |..B2..|..B1..|          the host is ahead as far as it can be
    device      |F0 |F1 |-|F2 |....B2....|....B1....|

A link ends when the device is through with it: after the one before, and not before its last kernel was issued. Where
the host takes longer than the device, the device waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.cost.groups import Join, groups_of
from pipeline.cost.link_facts import ChainFacts
from pipeline.cost.step import Priced

Pair = tuple[float, float]  # seconds of the host and of the device


def ends_of(parts: Iterable[Pair]) -> Iterator[float]:
    """When the device is through with each of these, which follow one another."""
    issued = ended = 0.0
    for host, device in parts:
        begun, issued = issued, issued + host
        ended = max(max(ended, begun) + device, issued)
        yield ended


def waiting_seconds(priced: Priced) -> float:
    """That the device waits for its host in a pass of which nothing is recomputed."""
    facts = ChainFacts(priced)
    if facts.card is None or priced.profile.compiled is not None:
        return 0.0
    groups = groups_of(priced.graph, priced.profile, Join.NEEDLESS)
    pairs = [(facts.host(group), facts.device(group)) for group in groups]
    forward = [(host.forward, device.forward) for host, device in pairs]
    backward = [(host.backward, device.backward) for host, device in pairs]
    loss = [(forward[-1][0] + backward[-1][0], forward[-1][1] + backward[-1][1])]
    parts = [*forward[:-1], *loss, *reversed(backward[:-1])]
    return max(ends_of(parts)) - sum(device for _, device in parts)
