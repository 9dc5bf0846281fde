"""A problem that is too wide for elimination, cut open where its parts hang together from afar.

A weight that every layer reads ties all layers to one choice. Cut: every reader gets its own copy of the weight, with
an equal part of what it costs and holds, and pays that part of making the form it reads. What is left is narrow, and
its least is a bound: whatever a plan of the whole problem costs, the copies that all choose alike cost no more. Where
they do choose alike, and read one form, the bound is met and the plan is the best. A tensor that is read far from where
it is made is cut in the same way: the far readers get a copy of its maker.

Where copies disagree, they are drawn together: what a copy alone chooses becomes dearer for it and cheaper for the
others (the sum over the copies stays, so it remains a bound: Lagrangian decomposition). And a plan is had by settling
the copies of one maker after another on what most of them choose.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.solve.problem.data import FORBIDDEN, Array, Edge, Holding, Node, Problem, Share
from stages.solve.search.elimination import FREE, Elimination, Minimum, Prices, TooWide
from stages.solve.search.exact import Reduced, restrict

MOST_DRAWS = 12  # times that copies are drawn together at some prices
CLOSE = 1e-9  # of the value: copies that are this close to agreeing are left
MOST_HALVINGS = 4  # of the distance from which on a reader counts as far


@dataclass(frozen=True, eq=False)
class Copies:
    """Those of one maker: their nodes, the maker itself first."""

    nodes: tuple[int, ...]


class _Cut:
    """The problem with all cut that lies further apart than `far` nodes; for single far readers too, with `single`."""

    def __init__(self, problem: Problem, far: int, single: bool) -> None:
        self.whole, self.far = problem, far
        self.copies: dict[int, list[int]] = {}
        self.split: list[Share] = []
        self.known: dict[Hashable, Any] = {}
        self.count = len(problem.nodes)
        self.tied = Counter(v for e in problem.edges for v in (e.first, e.second))
        self.tied += Counter(v for s in problem.shares for v in (s.maker, *(r.node for r in s.readers)))
        edges: list[Edge] = []
        shares: list[Share] = []
        for edge in problem.edges:
            ends = (edge.first, edge.second)
            leaf = any(self.tied[v] == 1 for v in ends)  # makes nothing wide
            apart = single and self._span(*ends) and not leaf
            edges.append(replace(edge, first=self._copy(edge.first)) if apart else edge)
        for share in problem.shares:
            readers = [r.node for r in share.readers]
            if self._span(*readers):
                self.split.append(share)
                edges += self._split(share)
            elif single and self._span(share.maker, *readers):
                shares.append(replace(share, maker=self._copy(share.maker)))
            else:
                shares.append(share)
        self.problem = Problem(tuple(self._nodes()), tuple(edges), tuple(shares))

    def _span(self, *nodes: int) -> bool:
        return max(nodes) - min(nodes) > self.far

    def _copy(self, maker: int) -> int:
        if maker not in self.copies:
            self.copies[maker] = [maker]
            if self.tied[maker] == 1:  # by the share that is being cut alone: the maker is one of the copies
                return maker
        self.copies[maker].append(self.count)
        self.count += 1
        return self.count - 1

    def _split(self, share: Share) -> Iterator[Edge]:
        parts = len(share.readers)
        for reader in share.readers:
            costs, *usages = (
                self._once((id(table), id(reader.wants), parts), partial(_part_of, table, reader.wants, parts))
                for table in (share.costs, *(h.usages for h in share.holdings))
            )
            held = tuple(Holding(h.first, h.end, own) for h, own in zip(share.holdings, usages, strict=True))
            yield Edge(self._copy(share.maker), reader.node, costs, held)

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def _nodes(self) -> list[Node]:
        found = [*self.whole.nodes, *self.whole.nodes[:1] * (self.count - len(self.whole.nodes))]
        for maker, copies in self.copies.items():
            node, parts = self.whole.nodes[maker], len(copies)
            costs, *usages = (
                self._once((id(table), parts), partial(np.divide, table, parts))
                for table in (node.costs, *(h.usages for h in node.holdings))
            )
            held = tuple(Holding(h.first, h.end, own) for h, own in zip(node.holdings, usages, strict=True))
            for copy in copies:
                found[copy] = Node(node.name, costs, held)
        return found


@dataclass(frozen=True, eq=False)
class Settled:
    """The problem with the copies settled: what is read from afar is made in some forms, which are paid for anyway."""

    reduced: Reduced
    count: int  # nodes of the whole problem: those that pay come after them

    def expand(self, picked: tuple[int, ...]) -> tuple[int, ...]:
        return self.reduced.expand(picked)[: self.count]


class CutOpen:
    """Elimination of a problem that was cut, and what draws its copies together. Raises TooWide."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.elimination, self.copies, self.split = _narrow(problem)
        self.drawn: dict[int, Array] = {}  # seconds that the choices of a copy cost more, or less

    def minimise(self, prices: Prices = FREE) -> Minimum:
        """A bound of cost + prices * held, the plan of the cut problem that has it, and a plan of the whole one."""
        found = self.elimination.minimise(prices, self.drawn)
        return Minimum(found.value, self._settled(prices, self.drawn, found), found.picked)

    def forget(self) -> None:
        """Nothing is drawn together any more."""
        self.drawn = {}

    def shift(self, picked: Sequence[int]) -> float:
        """Seconds that a plan of the cut problem costs more as its copies are drawn together now."""
        return sum(float(shift[picked[node]]) for node, shift in self.drawn.items())

    def draw(self, prices: Prices, deadline: float) -> list[tuple[int, ...]]:
        """Copies that disagree at these prices are drawn together, as long as the bound rises; plans on the way."""
        best = self.elimination.minimise(prices, self.drawn)
        pace = 1.0
        plans = [self._settled(prices, self.drawn, best)]
        value = self._value(plans[0], prices)
        for _ in range(MOST_DRAWS if math.isfinite(best.value) else 0):
            apart = self._apart(best.picked)
            if not apart or value - best.value <= CLOSE * best.value or time.monotonic() > deadline:
                break
            short = value - best.value if math.isfinite(value) else 0.1 * best.value
            drawn = self._draw(self.drawn, best, apart, pace * short)
            found = self.elimination.minimise(prices, drawn)
            if found.value > best.value:
                best, self.drawn = found, drawn
            else:
                pace /= 2
            plans.append(self._settled(prices, drawn, found))
            value = min(value, self._value(plans[-1], prices))
        return plans

    def settle(self, plan: tuple[int, ...]) -> tuple[Hashable, Settled]:
        """The problem in which the makers that were cut choose as in that plan, and make those forms; and its key."""
        kept = [tuple(range(len(node.costs))) for node in self.problem.nodes]
        for own in self.copies:
            kept[own.nodes[0]] = (plan[own.nodes[0]],)
        nodes = list(self.problem.nodes)
        key: list[Hashable] = [*kept]
        for share in self.split:
            forms, choice = sorted(share.forms(plan)), plan[share.maker]
            key.append(tuple(forms))
            for reader in share.readers:
                wanted = set(np.flatnonzero(np.isin(reader.wants, forms)).tolist())
                kept[reader.node] = tuple(k for k in kept[reader.node] if k in wanted)
            costs = np.array([float(share.costs[choice, forms].sum())])
            held = (Holding(h.first, h.end, np.array([h.usages[choice, forms].sum()])) for h in share.holdings)
            nodes.append(Node(f"forms of {self.problem.nodes[share.maker].name}", costs, tuple(held)))
            kept.append((0,))
        left = tuple(share for share in self.problem.shares if share not in self.split)
        whole = Problem(tuple(nodes), self.problem.edges, left)
        return tuple(key), Settled(restrict(whole, tuple(kept)), len(self.problem.nodes))

    def _apart(self, picked: Sequence[int]) -> list[Copies]:
        """Makers whose copies choose differently."""
        return [own for own in self.copies if len({picked[n] for n in own.nodes}) > 1]

    def _plan(self, picked: Sequence[int]) -> tuple[int, ...]:
        return tuple(picked[: len(self.problem.nodes)])

    def _value(self, plan: tuple[int, ...], prices: Prices) -> float:
        return self.problem.cost(plan) + _paid(self.problem.held(plan), prices)

    def _draw(self, drawn: dict[int, Array], found: Minimum, apart: list[Copies], short: float) -> dict[int, Array]:
        """A step by Polyak's rule: as far as would close the gap if the slope stayed."""
        slopes: dict[int, Array] = {}
        for own in apart:
            taken = np.zeros((len(own.nodes), len(self.problem.nodes[own.nodes[0]].costs)))
            taken[np.arange(len(own.nodes)), [found.picked[n] for n in own.nodes]] = 1.0
            slopes |= dict(zip(own.nodes, taken - taken.mean(axis=0), strict=True))
        steep = sum(float((slope**2).sum()) for slope in slopes.values())
        return drawn | {n: drawn.get(n, 0.0) + short / steep * slope for n, slope in slopes.items()}

    def _settled(self, prices: Prices, drawn: dict[int, Array], found: Minimum) -> tuple[int, ...]:
        """A plan: the copies of a maker after another are held to what most of them choose, until all agree."""
        held, picked, done = drawn, found.picked, set[Copies]()
        while apart := [own for own in self._apart(picked) if own not in done]:
            own = min(apart, key=lambda o: _lead(picked, o))
            (choice, _), *_ = Counter(picked[n] for n in own.nodes).most_common()
            done.add(own)
            only = np.full(len(self.problem.nodes[own.nodes[0]].costs), FORBIDDEN)
            only[choice] = 0.0
            held = held | dict.fromkeys(own.nodes, only)
            picked = self.elimination.minimise(prices, held).picked
        return self._plan(picked)


def _paid(held: Array, prices: Prices) -> float:
    return sum(price * float(held[m]) for m, price in zip(prices.moments, prices.values, strict=True))


def _lead(picked: Sequence[int], own: Copies) -> float:
    """The more copies choose what most do, the less."""
    (_, most), *_ = Counter(picked[n] for n in own.nodes).most_common()
    return -most / len(own.nodes)


def _narrow(problem: Problem) -> tuple[Elimination, tuple[Copies, ...], tuple[Share, ...]]:
    """Cut where it must be and no further: first shares of far readers alone, and what lies furthest apart."""
    half = len(problem.nodes) // 2
    for far, single in ((half, False), *((half >> n, True) for n in range(MOST_HALVINGS))):
        made = _Cut(problem, far, single)
        try:
            elimination = Elimination(made.problem)
        except TooWide:
            continue
        return elimination, tuple(Copies(tuple(nodes)) for nodes in made.copies.values()), tuple(made.split)
    raise TooWide("even cut open")


def _part_of(table: Array, wants: NDArray[np.int64], parts: int) -> Array:
    return np.asarray(table[:, wants] / parts)
