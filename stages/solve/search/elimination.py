"""Exact minimisation of a problem without a memory row, by eliminating one variable after another.

A table holds a cost for every combination of choices of some variables; at first there is one per node, edge and share.
To eliminate a variable: add up the tables that name it, and replace them by one table that holds, for every combination
of its neighbours' choices, the least cost over its own. When all are gone the least cost is known, and going back in
the reverse order tells every choice. The work is exponential in how many neighbours a variable gathers (the graph's
tree-width), not in the number of nodes.

A share of few forms gets one variable: the set of forms that are made. Where there are too many sets, its readers enter
it by the form they want, not by their choice: a variable of its own, tied to the reader's. Such forms are eliminated
together, once the readers are gone: a kernel that knows that a form is made once tries only those which can be of use.

Equal work is done once (`MadeOnce`): a table is one array whoever asks for it, so the layers of a deep model, whose
arrays are the same objects, share one elimination. Costs are whole ticks held in floats: sums are exact, in whatever
order they are added, and infinity stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.stages.solve.problem.data import Array, Edge, Node, Problem, Share
from shardwright.stages.solve.problem.made_once import MadeOnce
from shardwright.stages.solve.search.kernels import Tables, least_shared, least_sums
from shardwright.stages.solve.search.order import EliminationOrder, EliminationStep, OrderRule

MOST_ENTRIES = 200_000_000  # of one elimination: beyond this the graph is too wide
MOST_SETS = 256  # of the forms of a share, to have a choice each
FINEST = 2.0**50  # ticks in the largest sum: floats count them exactly

Eliminated = tuple[Array, NDArray[np.int32]]  # by the choices of neighbours: the least cost, and own choices


class TooWide(Exception):
    """The graph has no order of elimination with tables that can be held."""


@dataclass(frozen=True)
class Prices:
    """Seconds that a byte costs at some moments: memory as just another cost.

    Nodes before `turn` pay a little less than those from there on: among plans that are equally good at these prices,
    which of them hold more can so be told.
    """

    moments: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    turn: int = 0
    tilt: float = 0.0


FREE = Prices()


@dataclass(frozen=True, eq=False)
class _Factor:
    """A table of the problem, before it has numbers; of a share, the making of its forms."""

    variables: tuple[int, ...]
    part: Node | Edge | Share | None  # None: ties a reader to the form it wants
    wants: tuple[NDArray[np.int64], ...] = ()  # the forms that each variable after the first stands for
    in_sets: bool = False  # the last variable is the set of forms that are made


@dataclass(frozen=True)
class _Form:
    """A step without names: its axes' sizes (own variables last), where each table's dims lie, a share's forms.

    A neighbour with one choice is no axis: hundreds of them may stand in a table, and numpy has 64 dims.
    """

    sizes: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    forms: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Minimum:
    value: float  # seconds, with the prices of bytes; never above the true minimum, by less than a tick per array
    picked: tuple[int, ...]
    relaxed: tuple[int, ...] | None = None  # choices of a looser problem that have the value; None: those picked


class Elimination:
    """The order of elimination of one problem, and what was worked out so far."""

    def __init__(self, problem: Problem, tick: float = 1e-12, most_entries: int = MOST_ENTRIES) -> None:
        self.problem, self.tick = problem, tick
        self.sizes = [len(node.costs) for node in problem.nodes]
        self.factors = self._factors()
        shares = [n for n, f in enumerate(self.factors) if isinstance(f.part, Share) and not f.in_sets]
        groups = {n: self.factors[n].variables[1:] for n in shares}
        scopes = [f.variables for f in self.factors]
        orders = [EliminationOrder(self.sizes, scopes, groups, rule, most_entries) for rule in OrderRule]
        possible = [order for order in orders if order.most <= most_entries]
        if not possible:
            raise TooWide(f"a table of {min(order.most for order in orders):.1g} entries")
        best = min(possible, key=lambda order: order.total)
        self.steps, self.dense = best.steps, best.dense
        self._once = MadeOnce()  # tables, and what is left of them: equal work has equal arrays
        self._coverage: dict[tuple[int, ...], list[tuple[int, list[tuple[Array, list[int]]]]]] = {}
        self._around = [self._axes_around(step) for step in self.steps]
        self._eliminations = self._find_eliminations()
        self._node = [max(v for v in f.variables if v < len(problem.nodes)) for f in self.factors]
        self._unpriced = [self._table(number, ()) for number in range(len(self.factors))]

    def _factors(self) -> list[_Factor]:
        problem = self.problem
        found = [_Factor((i,), node) for i, node in enumerate(problem.nodes)]
        found += [_Factor((e.first, e.second), e) for e in problem.edges]
        for share in problem.shares:
            if 2 ** share.costs.shape[1] <= MOST_SETS:
                made = len(self.sizes)
                self.sizes.append(2 ** share.costs.shape[1])
                found.append(_Factor((share.maker, made), share, in_sets=True))
                found += [_Factor((r.node, made), share, (r.wants,), in_sets=True) for r in share.readers]
                continue
            variables, wants = [share.maker], []
            for reader in share.readers:
                variables.append(len(self.sizes))
                wants.append(np.unique(reader.wants))
                self.sizes.append(len(wants[-1]))
                found.append(_Factor((reader.node, variables[-1]), None, (reader.wants,)))
            found.append(_Factor(tuple(variables), share, tuple(wants)))
        return found

    def minimise(self, prices: Prices = FREE, shifts: Mapping[int, Array] | None = None) -> Minimum:
        """`shifts`: seconds that the choices of some nodes cost more."""
        tables = list(self._unpriced)
        for number, held in self._covered(prices.moments):
            tilt = 1 - prices.tilt if self._node[number] < prices.turn else 1 + prices.tilt
            priced = ((usages, tilt * sum(prices.values[n] for n in at)) for usages, at in held)
            tables[number] = self._table(number, tuple((usages, price) for usages, price in priced if price))
        for node, shift in (shifts or {}).items():  # the tables of nodes come first, in their order
            tables[node] = self._once(np.add, tables[node], tuple(np.floor(shift / self.tick).tolist()))
        answers: list[NDArray[np.int32]] = []
        total = 0.0
        for step, eliminate in zip(self.steps, self._eliminations, strict=True):
            least, best = self._once(eliminate, *[tables[t] for t in step.tables])
            tables.append(least)
            answers.append(best)
            if not step.neighbours:
                total += float(least)
        picked = np.zeros(len(self.sizes), dtype=np.int64)
        for step, around, best in zip(self.steps[::-1], self._around[::-1], answers[::-1], strict=True):
            picked[list(step.variables)] = best[tuple(picked[n] for n in around)]
        return Minimum(total * self.tick, tuple(int(k) for k in picked[: len(self.problem.nodes)]))

    # ---- the tables of the problem

    def _covered(self, moments: tuple[int, ...]) -> list[tuple[int, list[tuple[Array, list[int]]]]]:
        """The factors that hold memory at these moments: which arrays, and at which of the moments."""
        if moments not in self._coverage:
            found = []
            for number, factor in enumerate(self.factors):
                holdings = factor.part.holdings if factor.part and not (factor.in_sets and factor.wants) else ()
                held = [(h.usages, [n for n, m in enumerate(moments) if h.first <= m < h.end]) for h in holdings]
                if held := [(usages, at) for usages, at in held if at]:
                    found.append((number, held))
            self._coverage[moments] = found
        return self._coverage[moments]

    def _table(self, number: int, priced: tuple[tuple[Array, float], ...]) -> Array:
        factor, part = self.factors[number], self.factors[number].part
        if part is None:
            return self._once(_tie, *factor.wants)
        if factor.in_sets and factor.wants:
            return self._once(_in_set, *factor.wants, part.costs.shape[1])
        ticks = self._once(_ticks, part.costs, priced, self.tick)
        if factor.in_sets:
            return self._once(_by_set, ticks)
        if number in self.dense:
            return self._once(_spread, ticks, tuple(tuple(forms.tolist()) for forms in factor.wants))
        return ticks

    # ---- what elimination makes of them

    def _find_eliminations(self) -> list[Callable[..., Eliminated]]:
        """What each step does with its tables: one object for steps that differ in the names of variables alone."""
        scopes = [factor.variables for factor in self.factors]
        known: dict[_Form, Callable[..., Eliminated]] = {}
        found = []
        for step, around in zip(self.steps, self._around, strict=True):
            axes = (*around, *step.variables)
            place = {variable: n for n, variable in enumerate(axes)}
            forms = self.factors[step.tables[0]].wants if len(step.variables) > 1 else ()
            form = _Form(
                tuple(self.sizes[v] for v in axes),
                tuple(tuple(place[v] for v in scopes[t] if v in place) for t in step.tables),
                tuple(tuple(int(n) for n in own) for own in forms),
            )
            found.append(known.setdefault(form, partial(_eliminate, form)))
            scopes.append(step.neighbours)
        return found

    def _axes_around(self, step: EliminationStep) -> tuple[int, ...]:
        """The neighbours that are axes of its tables: those with a choice, and the maker of a share."""
        maker = self.factors[step.tables[0]].variables[0] if len(step.variables) > 1 else None
        return tuple(v for v in step.neighbours if self.sizes[v] > 1 or v == maker)


def _eliminate(form: _Form, *tables: Array) -> Eliminated:
    making = 1 if form.forms else 0  # the first table: by the maker's choice and the form, whatever its readers are
    placed = [
        (table if n < making else table.reshape([form.sizes[axis] for axis in axes]), list(axes))
        for n, (table, axes) in enumerate(zip(tables, form.places, strict=True))
    ]
    return _least_shared(placed, form) if form.forms else _least(placed, form.sizes)


def _ticks(costs: Array, priced: tuple[tuple[Array, float], ...], tick: float) -> Array:
    total = np.array(costs, dtype=float)
    for usages, price in priced:
        total += price * usages
    return np.floor(total / tick)


def _tie(wants: NDArray[np.int64]) -> Array:
    forms = np.unique(wants)
    return np.where(wants[:, None] == forms[None, :], 0.0, np.inf)


def _sets(count: int) -> NDArray[np.bool_]:
    """Every set of so many forms: sets[number, form]."""
    return np.asarray((np.arange(2**count)[:, None] >> np.arange(count)[None, :]) % 2 == 1)


def _in_set(wants: NDArray[np.int64], count: int) -> Array:
    return np.where(_sets(count)[:, wants].T, 0.0, np.inf)


def _by_set(costs: Array) -> Array:
    """The cost of making all forms of a set, by the maker's choice."""
    members = _sets(costs.shape[1])
    return np.array([[row[chosen].sum() for chosen in members] for row in costs])


def _spread(costs: Array, forms_of: tuple[tuple[int, ...], ...]) -> Array:
    """Cost by the maker's choice and the form that each reader takes: a form that several take counts once."""
    wants, count = [np.array(forms) for forms in forms_of], len(forms_of)
    shaped = [w.reshape(*(len(w) if n == at else 1 for n in range(count))) for at, w in enumerate(wants)]
    total = np.zeros((len(costs), *(len(w) for w in wants)))
    for at, forms in enumerate(wants):
        own = costs[:, forms].reshape(len(costs), *shaped[at].shape)
        again = np.zeros((1,) * count, dtype=bool)
        for earlier in shaped[:at]:
            again = again | (earlier == shaped[at])
        total = total + np.where(again[None], 0.0, own)
    return total


def _flat(tables: list[tuple[Array, list[int]]], shape: tuple[int, ...]) -> Tables:
    """Tables one after another, the last axis of each together in memory; `shape`: of the axes before it."""
    strides = np.zeros((len(tables), len(shape)), dtype=np.int64)
    starts = np.zeros(len(tables), dtype=np.int64)
    parts: list[Array] = []
    for number, (costs, axes) in enumerate(tables):
        starts[number] = sum(len(part) for part in parts)
        order = sorted(range(len(axes)), key=axes.__getitem__)
        costs = np.ascontiguousarray(costs.transpose(order))
        parts.append(costs.reshape(-1))
        for dim, n in enumerate(order):
            if axes[n] < len(shape):
                strides[number, axes[n]] = prod(costs.shape[dim + 1 :])
    return Tables(np.concatenate(parts), starts, strides, np.array(shape))


def _least(tables: list[tuple[Array, list[int]]], sizes: tuple[int, ...]) -> Eliminated:
    """The least sum over the last of the axes, and where it is; each table comes with the axes of its dims."""
    if len(sizes) == 1:
        total = sum((costs for costs, _ in tables), np.zeros(sizes[0]))
        return np.array(total.min()), np.array([total.argmin()], dtype=np.int32)
    least, best = least_sums(_flat(tables, sizes[:-1]), sizes[-1])
    return least.reshape(sizes[:-1]), best.reshape(*sizes[:-1], 1)


def _least_shared(tables: list[tuple[Array, list[int]]], form: _Form) -> Eliminated:
    """The same over all forms of a share, which stand last among the axes; the first table is that of making them."""
    (making, (maker, *_)), *others = tables
    readers = len(form.forms)
    around, sizes = form.sizes[:-readers], form.sizes[-readers:]
    owner = np.array([max(axes) - len(around) for _, axes in others])
    known = np.zeros((readers, max(sizes)), dtype=np.int64)
    for r, own in enumerate(form.forms):
        known[r, : len(own)] = own
    least, best = least_shared(_flat(others, around), owner, np.array(sizes), making, maker, known)
    return least.reshape(around), best.reshape(*around, readers)


T = TypeVar("T", Node, Edge, Share)


def least_resident(problem: Problem, parameters: Collection[int], seconds: float) -> tuple[int, ...] | None:
    """The choices by which these nodes, and those that read them, hold least when the step ends, and of such plans the
    fastest.

    No recompute saves what parameters, gradients and optimizer state take. A byte costs `seconds`, which is to be about
    what a step takes. None where no plan exists, or where the graph is too wide to tell.
    """

    def kept_of(part: T, maker: int) -> T:
        return replace(
            part, holdings=tuple(h for h in part.holdings if maker in parameters and h.end == problem.length)
        )

    kept = Problem(
        tuple(kept_of(node, i) for i, node in enumerate(problem.nodes)),
        tuple(kept_of(edge, edge.first) for edge in problem.edges),
        tuple(kept_of(share, share.maker) for share in problem.shares),
    )
    parts: tuple[Node | Edge | Share, ...] = (*kept.nodes, *kept.edges, *kept.shares)
    most = sum(float(h.usages.max(initial=0.0)) for part in parts for h in part.holdings)
    if not isfinite(seconds) or not kept.length:
        return None
    price = seconds or 1.0
    try:
        found = Elimination(kept, tick=price * max(1.0, most) / FINEST).minimise(
            Prices((problem.length - 1,), (price,))
        )
    except TooWide:
        return None
    return found.picked if isfinite(problem.cost(found.picked)) else None
