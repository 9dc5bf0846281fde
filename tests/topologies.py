"""Random nested networks for tests and benchmarks: groups with the bandwidth between their members, and noisy pairs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

Groups = list[tuple[tuple[int, ...], float]]  # outermost first: ranks, bytes/s between its members
Pairs = list[list[float | None]]


def nested(draw: random.Random, count: int, least: float = 2.0, most: float = 10.0, shuffle: bool = True) -> Groups:
    """Up to three levels of groups of any size; inside a group links are `least` to `most` times faster."""
    ranks = list(range(count))
    if shuffle:
        draw.shuffle(ranks)

    def build(ranks: list[int], bandwidth: float, depth: int) -> Groups:
        found: Groups = [(tuple(sorted(ranks)), bandwidth)]
        if depth == 0 or len(ranks) < 4:
            return found
        cuts = sorted(draw.sample(range(1, len(ranks)), draw.randint(1, len(ranks) // 2 - 1)))
        for start, end in zip([0, *cuts], [*cuts, len(ranks)], strict=True):
            if end - start >= 2:
                found += build(ranks[start:end], bandwidth * draw.uniform(least, most), depth - 1)
        return found

    return build(ranks, 1e9, draw.randint(1, 3))


def uniform(draw: random.Random) -> float:
    return draw.uniform(0.9, 1.1)


def normal(draw: random.Random) -> float:
    return math.exp(draw.gauss(0, 0.1))


def pairs(draw: random.Random, groups: Groups, noise: Callable[[random.Random], float] = uniform) -> Pairs:
    count = len(groups[0][0])
    found: Pairs = [[None] * count for _ in range(count)]
    for ranks, bandwidth in groups:  # inner groups come later and write over outer ones
        for i in ranks:
            for j in ranks:
                if i != j:
                    found[i][j] = bandwidth
    return [[value and value * noise(draw) for value in row] for row in found]


def as_sets(groups: Groups) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(ranks) for ranks, _ in groups)
