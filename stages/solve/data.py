"""A problem as plain numbers: nodes with choices, edges with cost matrices, memory over time under a limit.

Each node takes one choice. A choice costs seconds; an edge costs seconds by the choices at its two ends (infinite where
they do not go together); and a choice holds bytes during stretches of time. At no moment may more be held than the
limit. What the choices mean is the concern of whoever built the problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
FORBIDDEN = math.inf


@dataclass(frozen=True, eq=False)
class Holding:
    """Bytes that a node holds from one moment until before another, one number per choice."""

    first: int
    end: int
    usages: Array


@dataclass(frozen=True, eq=False)
class Node:
    name: str
    costs: Array  # seconds, one per choice
    holdings: tuple[Holding, ...] = ()


@dataclass(frozen=True, eq=False)
class Edge:
    first: int
    second: int
    costs: Array  # costs[choice of first, choice of second]


@dataclass(frozen=True, eq=False)
class Problem:
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def cost(self, picked: Sequence[int]) -> float:
        own = math.fsum(node.costs[k] for node, k in zip(self.nodes, picked, strict=True))
        return own + math.fsum(e.costs[picked[e.first], picked[e.second]] for e in self.edges)

    @cached_property
    def length(self) -> int:
        """Moments: 0 .. length - 1."""
        return max((h.end for node in self.nodes for h in node.holdings), default=0)

    def held(self, picked: Sequence[int]) -> Array:
        """Bytes at each moment."""
        change = np.zeros(self.length + 1)
        for node, k in zip(self.nodes, picked, strict=True):
            for h in node.holdings:
                change[h.first] += h.usages[k]
                change[h.end] -= h.usages[k]
        return np.cumsum(change)[:-1]

    def peak(self, picked: Sequence[int]) -> float:
        return float(self.held(picked).max(initial=0.0))
