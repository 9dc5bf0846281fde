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
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.stages.solve.problem.data import FORBIDDEN, Array, Edge, Holding, Node, Problem, Share
from shardwright.stages.solve.problem.made_once import MadeOnce
from shardwright.stages.solve.search.elimination import FREE, Elimination, Minimum, Prices, TooWide
from shardwright.stages.solve.search.restricted import Restricted, as_it_is, restrict

MOST_DRAWS = 12  # times that copies are drawn together at some prices
CLOSE = 1e-9  # of the value: copies that are this close to agreeing are left
MOST_HALVINGS = 4  # of the distance from which on a reader counts as far

Copies = tuple[int, ...]  # of one maker: their nodes, the maker itself first


class _CutProblem:
    """The problem with all cut that lies further apart than `far` nodes; for single far readers too, with `single`."""

    def __init__(self, problem: Problem, far: int, single: bool) -> None:
        self.whole, self.far = problem, far
        self.copies: dict[int, list[int]] = {}  # by maker
        self.split: list[Share] = []
        self.once = MadeOnce()
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
                edges += [
                    Edge(self._copy(share.maker), r.node, *self._part(share, len(share.readers), r.wants))
                    for r in share.readers
                ]
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

    def _part(
        self, whole: Node | Share, parts: int, wants: NDArray[np.int64] | None = None
    ) -> tuple[Array, tuple[Holding, ...]]:
        """One of so many parts of what it costs and holds; of a share by the form that is wanted."""
        held = tuple(replace(h, usages=self.once(_divided, h.usages, wants, parts)) for h in whole.holdings)
        return self.once(_divided, whole.costs, wants, parts), held

    def _nodes(self) -> list[Node]:
        found = [*self.whole.nodes, *self.whole.nodes[:1] * (self.count - len(self.whole.nodes))]
        for maker, copies in self.copies.items():
            node = self.whole.nodes[maker]
            part = Node(node.name, *self._part(node, len(copies)))
            for copy in copies:
                found[copy] = part
        return found


def _divided(table: Array, wants: NDArray[np.int64] | None, parts: int) -> Array:
    return np.asarray((table if wants is None else table[:, wants]) / parts)


class CutOpen:
    """Elimination of a problem that was cut, and what draws its copies together. Raises TooWide."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        half = len(problem.nodes) // 2
        # where it must be cut and no further: first shares of far readers alone, and what lies furthest apart
        for far, single in ((half, False), *((half >> n, True) for n in range(MOST_HALVINGS))):
            cut = _CutProblem(problem, far, single)
            try:
                self.elimination = Elimination(cut.problem)
                break
            except TooWide:
                continue
        else:
            raise TooWide("even cut open")
        self.copies, self.split = [tuple(nodes) for nodes in cut.copies.values()], cut.split
        self.drawn: dict[int, Array] = {}  # seconds that the choices of a copy cost more, or less

    def minimise(self, prices: Prices = FREE) -> Minimum:
        """A bound of cost + prices * held, the plan of the cut problem that has it, and a plan of the whole one."""
        found = self.elimination.minimise(prices, self.drawn)
        return Minimum(found.value, self._settled(prices, self.drawn, found), found.picked)

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
            drawn = self._draw(best, apart, pace * short)
            found = self.elimination.minimise(prices, drawn)
            if found.value > best.value:
                best, self.drawn = found, drawn
            else:
                pace /= 2
            plans.append(self._settled(prices, drawn, found))
            value = min(value, self._value(plans[-1], prices))
        return plans

    def settle(self, plan: tuple[int, ...]) -> tuple[Hashable, Restricted]:
        """The problem in which the makers that were cut choose as in that plan, and make those forms; and its key.

        What is made is paid for anyway, by nodes that come after those of the whole problem.
        """
        kept = list(as_it_is(self.problem).kept)
        for own in self.copies:
            kept[own[0]] = (plan[own[0]],)
        nodes = list(self.problem.nodes)
        key: list[Hashable] = [*kept]
        for share in self.split:
            forms, choice = sorted(share.forms(plan)), plan[share.maker]
            key.append(tuple(forms))
            for reader in share.readers:
                wanted = set(np.flatnonzero(np.isin(reader.wants, forms)).tolist())
                kept[reader.node] = tuple(k for k in kept[reader.node] if k in wanted)
            costs = np.array([float(share.costs[choice, forms].sum())])
            held = (replace(h, usages=np.array([h.usages[choice, forms].sum()])) for h in share.holdings)
            nodes.append(Node(f"forms of {self.problem.nodes[share.maker].name}", costs, tuple(held)))
            kept.append((0,))
        left = tuple(share for share in self.problem.shares if share not in self.split)
        return tuple(key), restrict(Problem(tuple(nodes), self.problem.edges, left), tuple(kept))

    def _apart(self, picked: Sequence[int]) -> list[Copies]:
        """Makers whose copies choose differently."""
        return [own for own in self.copies if len({picked[n] for n in own}) > 1]

    def _value(self, plan: tuple[int, ...], prices: Prices) -> float:
        held = self.problem.held(plan)
        paid = sum(price * float(held[m]) for m, price in zip(prices.moments, prices.values, strict=True))
        return self.problem.cost(plan) + paid

    def _draw(self, found: Minimum, apart: list[Copies], short: float) -> dict[int, Array]:
        """A step by Polyak's rule: as far as would close the gap if the slope stayed."""
        slopes: dict[int, Array] = {}
        for own in apart:
            taken = np.zeros((len(own), len(self.problem.nodes[own[0]].costs)))
            taken[np.arange(len(own)), [found.picked[n] for n in own]] = 1.0
            slopes |= dict(zip(own, taken - taken.mean(axis=0), strict=True))
        steep = sum(float((slope**2).sum()) for slope in slopes.values())
        return self.drawn | {n: self.drawn.get(n, 0.0) + short / steep * slope for n, slope in slopes.items()}

    def _settled(self, prices: Prices, drawn: dict[int, Array], found: Minimum) -> tuple[int, ...]:
        """A plan: the copies of a maker after another are held to what most of them choose, until all agree."""
        held, picked, done = drawn, found.picked, set[Copies]()
        while apart := [own for own in self._apart(picked) if own not in done]:
            favourites = {own: Counter(picked[n] for n in own).most_common(1)[0] for own in apart}  # and how many
            own = max(apart, key=lambda copies: favourites[copies][1] / len(copies))
            done.add(own)
            only = np.full(len(self.problem.nodes[own[0]].costs), FORBIDDEN)
            only[favourites[own][0]] = 0.0
            held = held | dict.fromkeys(own, only)
            picked = self.elimination.minimise(prices, held).picked
        return tuple(picked[: len(self.problem.nodes)])
