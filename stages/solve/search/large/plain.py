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

Setting = Callable[[Sequence[int]], int]  # a helper's choice, by the choices of a plan

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Plain:
    problem: Problem
    whole: Problem  # that it was made from
    places: tuple[int, ...]  # of the whole problem's nodes
    settings: dict[int, Setting]  # of the helpers, by their places

    def read(self, picked: Sequence[int] | NDArray[np.int64]) -> tuple[int, ...]:
        return tuple(int(picked[place]) for place in self.places)

    def write(self, picked: Sequence[int]) -> tuple[int, ...]:
        found = dict(zip(self.places, picked, strict=True))
        found.update((place, setting(picked)) for place, setting in self.settings.items())
        return tuple(found[place] for place in range(len(found)))


@dataclass(frozen=True, eq=False)
class _Reading:
    """What lies between the ends of an edge: by choice the bytes held and the costs to both ends."""

    usages: tuple[Array, ...]
    to_first: Array
    to_second: Array
    number: Any  # number[choice of first, choice of second]


@dataclass(frozen=True, eq=False)
class _Riding:
    """A reader of a share: by choice the bytes held, costs to the maker and to the readers up to itself."""

    usages: tuple[Array, ...]
    to_maker: Array
    to_readers: tuple[Array, ...]
    own: Any  # own[choice of the maker, form]: made for this reader
    others: Any  # others[reader before, form]: made for that one


@dataclass(frozen=True, eq=False)
class _Making:
    """A form of a share: the bytes held, not made coming first; costs to the maker, and which choice by the maker's."""

    usages: tuple[Array, ...]
    to_maker: Array
    number: Any


def plain(problem: Problem) -> Plain:
    made = _Plain(problem)
    for edge in problem.edges:
        made.edge(edge)
    for share in problem.shares:
        made.share(share)
    return made.finish()


class _Plain:
    def __init__(self, problem: Problem) -> None:
        self.whole = problem
        self.nodes, self.edges = list(problem.nodes), list[Edge]()
        self.settings: list[Setting] = []
        self.known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self.known:
            self.known[key] = make()
        found: T = self.known[key]
        return found

    def helper(self, name: str, holdings: tuple[Holding, ...], usages: tuple[Array, ...], count: int) -> int:
        held = tuple(Holding(h.first, h.end, own) for h, own in zip(holdings, usages, strict=True))
        self.nodes.append(Node(name, self.once(("zeros", count), lambda: np.zeros(count)), held))
        return len(self.nodes) - 1

    def edge(self, edge: Edge) -> None:
        if not edge.holdings:
            self.edges.append(edge)
            return
        tables = (edge.costs, *(h.usages for h in edge.holdings))
        made: _Reading = self.once(("edge", *map(id, tables)), lambda: _reading(tables))
        between = self.helper(
            f"{self.nodes[edge.first].name} -> {self.nodes[edge.second].name}",
            edge.holdings,
            made.usages,
            made.to_first.shape[1],
        )
        self.edges.append(Edge(edge.first, between, made.to_first))
        self.edges.append(Edge(between, edge.second, made.to_second))
        self.settings.append(lambda picked: int(made.number[picked[edge.first], picked[edge.second]]))

    def share(self, share: Share) -> None:
        if len(share.readers) <= MOST_READERS:
            for number in range(len(share.readers)):
                self.rider(share, number)
        else:
            for form in sorted({int(f) for reader in share.readers for f in reader.wants}):
                self.form(share, form)

    def rider(self, share: Share, number: int) -> None:
        tables = (share.costs, *(h.usages for h in share.holdings))
        before, reader = share.readers[:number], share.readers[number]
        wants = tuple(other.wants for other in (*before, reader))
        made: _Riding = self.once(("ride", *map(id, (*tables, *wants))), lambda: _riding(tables, wants))
        name = f"{self.nodes[share.maker].name} -> {self.nodes[reader.node].name}"
        node = self.helper(name, share.holdings, made.usages, made.to_maker.shape[1])
        self.edges.append(Edge(share.maker, node, made.to_maker))
        for other, costs in zip((*before, reader), made.to_readers, strict=True):
            self.edges.append(Edge(node, other.node, costs))

        def setting(picked: Sequence[int]) -> int:
            form = reader.wants[picked[reader.node]]
            first = next((i for i, other in enumerate(before) if other.wants[picked[other.node]] == form), None)
            return int(made.own[picked[share.maker], form] if first is None else made.others[first, form])

        self.settings.append(setting)

    def form(self, share: Share, form: int) -> None:
        tables = (share.costs, *(h.usages for h in share.holdings))
        made: _Making = self.once(("form", form, *map(id, tables)), lambda: _making(tables, form))
        count = made.to_maker.shape[1]
        node = self.helper(f"{self.nodes[share.maker].name} as {form}", share.holdings, made.usages, count)
        self.edges.append(Edge(share.maker, node, made.to_maker))
        for reader in share.readers:
            if (reader.wants == form).any():
                key = ("wants", id(reader.wants), form, count)
                costs = self.once(key, partial(_wanting, reader.wants == form, count))
                self.edges.append(Edge(reader.node, node, costs))
        self.settings.append(lambda picked: int(made.number[picked[share.maker]]) if form in share.forms(picked) else 0)

    def finish(self) -> Plain:
        """With the helpers at their places."""
        own = len(self.whole.nodes)
        last = [*range(own), *([-1] * (len(self.nodes) - own))]
        for edge in self.edges:
            for helper, other in ((edge.first, edge.second), (edge.second, edge.first)):
                if helper >= own:
                    last[helper] = max(last[helper], other if other < own else -1)
        order = sorted(range(len(self.nodes)), key=lambda v: (last[v], v < own, v))
        place = {v: number for number, v in enumerate(order)}
        edges = tuple(Edge(place[e.first], place[e.second], e.costs) for e in self.edges)
        settings = {place[own + number]: setting for number, setting in enumerate(self.settings)}
        problem = Problem(tuple(self.nodes[v] for v in order), edges)
        return Plain(problem, self.whole, tuple(place[v] for v in range(own)), settings)


def _riding(tables: tuple[Array, ...], wants: tuple[NDArray[np.int64], ...]) -> _Riding:
    costs, *usages = tables
    *before, own = wants
    count = costs.shape[1]
    made, riding = np.zeros(costs.shape, dtype=np.int64), np.zeros((len(before), count), dtype=np.int64)
    to_maker, held, on = [], [], []  # by choice; on: which reader before, -1 for itself
    forms: list[int] = []
    for form in np.unique(own):
        rows = np.stack([u[:, form] for u in usages], axis=1) if usages else np.zeros((len(costs), 0))
        known, row_class = np.unique(rows, axis=0, return_inverse=True)
        row_class = row_class.reshape(-1)
        made[:, form] = len(forms) + row_class
        for number, values in enumerate(known):
            to_maker.append(np.where(row_class == number, costs[:, form], FORBIDDEN))
            held.append(values)
            forms.append(form)
            on.append(-1)
        for which, other in enumerate(before):
            if (other == form).any():
                riding[which, form] = len(forms)
                to_maker.append(np.zeros(len(costs)))
                held.append(np.zeros(len(usages)))
                forms.append(form)
                on.append(which)
    form_of, rides = np.array(forms), np.array(on)
    to_readers = [
        np.where((rides[:, None] == which) & (form_of[:, None] != other[None, :]), FORBIDDEN, 0.0)
        for which, other in enumerate(before)
    ]
    to_readers.append(np.where(form_of[:, None] != own[None, :], FORBIDDEN, 0.0))
    return _Riding(tuple(np.array(held).T.copy()), np.array(to_maker).T.copy(), tuple(to_readers), made, riding)


def _reading(tables: tuple[Array, ...]) -> _Reading:
    costs, *usages = tables
    _, columns, classes = np.unique(np.concatenate(tables), axis=1, return_index=True, return_inverse=True)
    number = np.zeros((len(costs), len(columns)), dtype=np.int64)
    to_first, to_second = [], []
    held: list[Array] = []
    for which, column in enumerate(columns):
        rows = np.stack([u[:, column] for u in usages], axis=1)
        known, row_class = np.unique(rows, axis=0, return_inverse=True)
        row_class = row_class.reshape(-1)
        number[:, which] = len(held) + row_class
        for own, values in enumerate(known):
            held.append(values)
            to_first.append(np.where(row_class == own, costs[:, column], FORBIDDEN))
            to_second.append(np.where(classes.reshape(-1) == which, 0.0, FORBIDDEN))
    return _Reading(
        tuple(np.array(held).T.copy()), np.array(to_first).T.copy(), np.array(to_second), number[:, classes.reshape(-1)]
    )


def _making(tables: tuple[Array, ...], form: int) -> _Making:
    costs, *usages = (table[:, form] for table in tables)
    if not usages:
        return _Making((), np.stack([np.zeros(len(costs)), costs], axis=1), np.ones(len(costs), dtype=np.int64))
    known, row_class = np.unique(np.stack(usages, axis=1), axis=0, return_inverse=True)
    row_class = row_class.reshape(-1)
    made = np.where(row_class[:, None] == np.arange(len(known))[None, :], costs[:, None], FORBIDDEN)
    held = np.concatenate([np.zeros((1, len(usages))), known])
    return _Making(tuple(held.T.copy()), np.concatenate([np.zeros((len(costs), 1)), made], axis=1), 1 + row_class)


def _wanting(wants: Any, count: int) -> Array:
    return np.where(wants[:, None] & (np.arange(count) == 0)[None, :], FORBIDDEN, 0.0)
