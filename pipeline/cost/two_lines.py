"""A step played on two lines: the host issues kernels, the device runs them.

    host     F0 |F1 |F2 |..B2..|..B1..|          the host is ahead as far as it can be
    device      |F0 |F1 |-|F2 |....B2....|....B1....|

A link ends when the device is through with it: after the one before, and not before its last kernel was issued. Where
the host takes longer than the device, the device waits. What it sends beside that runs while it waits, too
(pipeline.cost.traffic).

The solver's problem is without the host: what that takes is the same under every sharding, so with h and d for the
seconds of the two in each run, a step ends at

    E = max over k of  h1 + .. + hk  +  d(k+1) + .. + dn   >=   D = d1 + .. + dn

which grows with every d and is no sum of what ops cost. A plan that is fastest in each run is fastest with the host as
well; in general the plan of the least D is later than the best by no more than what its own device waits, E - D.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from shardwright.pipeline.cost.groups import Join, groups_of
from shardwright.pipeline.cost.link_facts import ChainFacts
from shardwright.pipeline.cost.step import Priced
from shardwright.pipeline.cost.traffic import Ran, RunKind, lines_of

Pair = tuple[float, float]  # seconds of the host and of the device


def ends_of(parts: Iterable[Pair]) -> Iterator[float]:
    """When the device is through with each of these, which follow one another."""
    issued = ended = 0.0
    for host, device in parts:
        begun, issued = issued, issued + host
        ended = max(max(ended, begun) + device, issued)
        yield ended


def unrecomputed_runs(priced: Priced) -> list[Ran]:
    """A pass of which nothing is recomputed, with what the device waits for its host."""
    facts = ChainFacts(priced)
    groups = groups_of(
        priced.graph, priced.profile, Join.NEEDLESS if priced.profile.compiled is None else Join.COMPILED
    )
    pairs = [(facts.host(group), facts.device(group)) for group in groups]
    forward = [(host.forward, device.forward) for host, device in pairs]
    backward = [(host.backward, device.backward) for host, device in pairs]
    loss = (forward[-1][0] + backward[-1][0], forward[-1][1] + backward[-1][1])
    parts = [*forward[:-1], loss, *reversed(backward[:-1])]
    *before, last = [(group.first, group.last) for group in groups]
    spans = [
        *((span, RunKind.FORWARD) for span in before),
        (last, RunKind.BOTH),
        *((span, RunKind.BACKWARD) for span in reversed(before)),
    ]
    ends = pairwise([0.0, *ends_of(parts)])
    return [Ran(*span, kind, end - begin) for (span, kind), (begin, end) in zip(spans, ends, strict=True)]


def unrecomputed_seconds(priced: Priced) -> float:
    """Of a step of which nothing is recomputed, as it is played."""
    ran = unrecomputed_runs(priced)
    return priced.step.seconds_with(sum(one.seconds for one in ran)) - lines_of(priced, ran).saved
