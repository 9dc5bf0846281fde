"""A problem with shares and with edges that hold bytes, as one of nodes and edges alone, of which only nodes hold some.

edge    that holds bytes: a node between its ends, for what is read and the bytes that it takes. It stands for a class
        of the second end's choices (equal columns) together with one of the bytes that such a column knows. Its edge to
        the second end says which class; that to the first says which bytes, and has the costs.
share   a node per reader, for the form that it wants and who has it made: itself, with so many bytes, as the maker's
        choice has it; or a reader before it that wants the same one. Its edge to the maker has the costs of making the
        form; its edges to the readers before it forbid what they do not want. So every reader is tied to the maker by
        what its own form costs: with a yes or no per form instead, messages bound the cost of a deep model by three
        quarters of what it is.
        Many readers: a node per form, not made, or made with so many bytes; its edges to the readers forbid that it is
        wanted and not made.

Given the choices of a plan, the helpers have one setting that costs and holds the same, and no allowed one that costs
or holds less: both problems have the same optimum under every limit. Arrays of equal layers stay the same objects.

Helpers stand right before the last of the nodes that they are tied to: messages go through the nodes in their order,
and a chain of ops takes one pass, not one per op.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stages.solve.problem.data import FORBIDDEN, Array, Edge, Holding, Node, Problem, Share

MOST_READERS = 6  # of a share, for a node per reader: they know of one another

Usages = tuple[Array, ...]  # of a helper, for each holding: bytes by choice
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Plain:
    problem: Problem
    places: tuple[int, ...]  # of the whole problem's nodes

    def read(self, picked: Sequence[int] | NDArray[np.int64]) -> tuple[int, ...]:
        """A plan of the whole problem."""
        return tuple(int(picked[place]) for place in self.places)


def plain(problem: Problem) -> Plain:
    made = _Helpers(problem)
    for edge in problem.edges:
        made.add_edge(edge)
    for share in problem.shares:
        if len(share.readers) <= MOST_READERS:
            for number in range(len(share.readers)):
                made.add_reader(share, number)
        else:
            for form in sorted({int(f) for reader in share.readers for f in reader.wants}):
                made.add_form(share, form)
    return made.in_order()


class _Helpers:
    """The nodes of a problem, then those that stand for its shares and the bytes of its edges."""

    def __init__(self, problem: Problem) -> None:
        self.own = len(problem.nodes)
        self.nodes, self.edges = list(problem.nodes), list[Edge]()
        self.known: dict[Hashable, Any] = {}

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self.known:
            self.known[key] = make()
        found: T = self.known[key]
        return found

    def _helper(self, name: str, of: Edge | Share, usages: Usages, count: int) -> int:
        held = tuple(Holding(h.first, h.end, own) for h, own in zip(of.holdings, usages, strict=True))
        self.nodes.append(Node(name, self._once(("zeros", count), lambda: np.zeros(count)), held))
        return len(self.nodes) - 1

    def add_edge(self, edge: Edge) -> None:
        if not edge.holdings:
            self.edges.append(edge)
            return
        tables = _tables(edge)
        usages, to_first, to_second = self._once(("edge", *map(id, tables)), lambda: _reading(tables))
        name = f"{self.nodes[edge.first].name} -> {self.nodes[edge.second].name}"
        between = self._helper(name, edge, usages, to_first.shape[1])
        self.edges += [Edge(edge.first, between, to_first), Edge(between, edge.second, to_second)]

    def add_reader(self, share: Share, number: int) -> None:
        tables, readers = _tables(share), share.readers[: number + 1]
        wants = tuple(reader.wants for reader in readers)
        key = ("reader", *map(id, (*tables, *wants)))
        usages, to_maker, to_readers = self._once(key, lambda: _forms_of_reader(tables, wants))
        name = f"{self.nodes[share.maker].name} -> {self.nodes[readers[-1].node].name}"
        node = self._helper(name, share, usages, to_maker.shape[1])
        self.edges.append(Edge(share.maker, node, to_maker))
        self.edges += [Edge(node, reader.node, costs) for reader, costs in zip(readers, to_readers, strict=True)]

    def add_form(self, share: Share, form: int) -> None:
        tables = _tables(share)
        usages, to_maker = self._once(("form", form, *map(id, tables)), lambda: _making(tables, form))
        count = to_maker.shape[1]
        node = self._helper(f"{self.nodes[share.maker].name} as {form}", share, usages, count)
        self.edges.append(Edge(share.maker, node, to_maker))
        for reader in share.readers:
            if (wanted := reader.wants == form).any():
                costs = self._once(("wants", id(reader.wants), form, count), partial(_wanting, wanted, count))
                self.edges.append(Edge(reader.node, node, costs))

    def in_order(self) -> Plain:
        """With the helpers at their places."""
        own = self.own
        last = [*range(own), *([-1] * (len(self.nodes) - own))]
        for edge in self.edges:
            for helper, other in ((edge.first, edge.second), (edge.second, edge.first)):
                if helper >= own:
                    last[helper] = max(last[helper], other if other < own else -1)
        order = sorted(range(len(self.nodes)), key=lambda v: (last[v], v < own, v))
        place = {v: number for number, v in enumerate(order)}
        edges = tuple(Edge(place[e.first], place[e.second], e.costs) for e in self.edges)
        return Plain(Problem(tuple(self.nodes[v] for v in order), edges), tuple(place[v] for v in range(own)))


def _tables(part: Edge | Share) -> tuple[Array, ...]:
    return part.costs, *(h.usages for h in part.holdings)


def _forms_of_reader(tables: tuple[Array, ...], wants: tuple[Any, ...]) -> tuple[Usages, Array, tuple[Array, ...]]:
    """A reader of a share: by choice the bytes held, costs to the maker and to the readers up to itself."""
    costs, *usages = tables
    *before, own = wants
    to_maker, held, on, forms = [], [], [], []  # by choice; on: which reader before has it made, -1 for itself
    for form in np.unique(own):
        known, classes = _classes([u[:, form] for u in usages], len(costs))
        for number, values in enumerate(known):
            to_maker.append(np.where(classes == number, costs[:, form], FORBIDDEN))
            held.append(values)
            forms.append(form)
            on.append(-1)
        for which, other in enumerate(before):
            if (other == form).any():
                to_maker.append(np.zeros(len(costs)))
                held.append(np.zeros(len(usages)))
                forms.append(form)
                on.append(which)
    form_of, made_by = np.array(forms)[:, None], np.array(on)[:, None]
    to_readers = [
        np.where((made_by == which) & (form_of != other[None, :]), FORBIDDEN, 0.0) for which, other in enumerate(before)
    ]
    to_readers.append(np.where(form_of != own[None, :], FORBIDDEN, 0.0))
    return tuple(np.array(held).T.copy()), np.array(to_maker).T.copy(), tuple(to_readers)


def _reading(tables: tuple[Array, ...]) -> tuple[Usages, Array, Array]:
    """What lies between the ends of an edge: by choice the bytes held and the costs to both ends."""
    costs, *usages = tables
    _, columns, of_column = np.unique(np.concatenate(tables), axis=1, return_index=True, return_inverse=True)
    held, to_first, to_second = [], [], []
    for which, column in enumerate(columns):
        known, classes = _classes([u[:, column] for u in usages], len(costs))
        for number, values in enumerate(known):
            held.append(values)
            to_first.append(np.where(classes == number, costs[:, column], FORBIDDEN))
            to_second.append(np.where(of_column.reshape(-1) == which, 0.0, FORBIDDEN))
    return tuple(np.array(held).T.copy()), np.array(to_first).T.copy(), np.array(to_second)


def _making(tables: tuple[Array, ...], form: int) -> tuple[Usages, Array]:
    """A form of a share: the bytes held, not made coming first; and the costs to the maker."""
    costs, *usages = (table[:, form] for table in tables)
    if not usages:
        return (), np.stack([np.zeros(len(costs)), costs], axis=1)
    known, classes = _classes(usages, len(costs))
    made = np.where(classes[:, None] == np.arange(len(known))[None, :], costs[:, None], FORBIDDEN)
    held = np.concatenate([np.zeros((1, len(usages))), known])
    return tuple(held.T.copy()), np.concatenate([np.zeros((len(costs), 1)), made], axis=1)


def _classes(columns: list[Array], count: int) -> tuple[Array, NDArray[np.int64]]:
    """Of so many rows those that differ, and of every row which it is."""
    rows = np.stack(columns, axis=1) if columns else np.zeros((count, 0))
    known, classes = np.unique(rows, axis=0, return_inverse=True)
    return known, classes.reshape(-1)


def _wanting(wants: Any, count: int) -> Array:
    return np.where(wants[:, None] & (np.arange(count) == 0)[None, :], FORBIDDEN, 0.0)
