"""A problem as plain numbers: nodes with choices, edges and shared copies with cost matrices, memory over time.

Each node takes one choice. A choice costs seconds; an edge costs seconds by the choices at its two ends (infinite where
they do not go together). A share is a tensor that several nodes read, each in one of several forms by its choice: a
form is made once from what the maker wrote, however many want it, and costs seconds by the maker's choice. And all of
them hold bytes during stretches of time. At no moment may more be held than the limit. What the choices mean is the
concern of whoever built the problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Picked = Sequence[int] | NDArray[np.int64]  # of each node its choice
FORBIDDEN = math.inf


@dataclass(frozen=True, eq=False)
class Holding:
    """Bytes held from one moment until before another; as many numbers as there are costs."""

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
    holdings: tuple[Holding, ...] = ()
    behind: Array | None = None  # of these seconds, what may run behind other work


@dataclass(frozen=True, eq=False)
class Reader:
    node: int
    wants: NDArray[np.int64]  # per choice of the node, the form that it reads


@dataclass(frozen=True, eq=False)
class Share:
    maker: int
    readers: tuple[Reader, ...]
    costs: Array  # costs[choice of the maker, form]
    holdings: tuple[Holding, ...] = ()
    behind: Array | None = None

    def forms(self, picked: Picked) -> set[int]:
        """The forms that are made."""
        return {int(reader.wants[picked[reader.node]]) for reader in self.readers}


P = TypeVar("P", Edge, Share)


@dataclass(frozen=True, eq=False)
class Problem:
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    shares: tuple[Share, ...] = ()

    def _taken(self, picked: Picked) -> Iterator[tuple[Node | Edge | Share, tuple[int, ...]]]:
        """Every entry of a cost array that these choices pay, and hold the memory of."""
        for node, k in zip(self.nodes, picked, strict=True):
            yield node, (k,)
        for edge in self.edges:
            yield edge, (picked[edge.first], picked[edge.second])
        for share in self.shares:
            for form in share.forms(picked):
                yield share, (picked[share.maker], form)

    def cost(self, picked: Picked) -> float:
        return math.fsum(part.costs[entry] for part, entry in self._taken(picked))

    def behind(self, picked: Picked) -> float:
        """Of that, the seconds of what may run behind other work."""
        taken = ((getattr(part, "behind", None), entry) for part, entry in self._taken(picked))
        return math.fsum(behind[entry] for behind, entry in taken if behind is not None)

    def exposing(self, share: float) -> Problem:
        """Where of what may run behind other work this share alone costs seconds; equal arrays stay the same one."""
        made: dict[tuple[int, int], Array] = {}

        def cost(part: P) -> P:
            if part.behind is None:
                return part
            key = id(part.costs), id(part.behind)
            if key not in made:
                made[key] = part.costs - (1 - share) * part.behind
            return replace(part, costs=made[key], behind=None)

        return replace(self, edges=tuple(map(cost, self.edges)), shares=tuple(map(cost, self.shares)))

    @cached_property
    def length(self) -> int:
        """Moments: 0 .. length - 1."""
        parts: tuple[Node | Edge | Share, ...] = (*self.nodes, *self.edges, *self.shares)
        return max((h.end for part in parts for h in part.holdings), default=0)

    def held(self, picked: Picked) -> Array:
        """Bytes at each moment."""
        change = np.zeros(self.length + 1)
        for part, entry in self._taken(picked):
            for h in part.holdings:
                change[h.first] += h.usages[entry]
                change[h.end] -= h.usages[entry]
        return np.cumsum(change)[:-1]

    def peak(self, picked: Picked) -> float:
        return float(self.held(picked).max(initial=0.0))
