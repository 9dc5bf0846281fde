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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.stages.solve.problem.data import FORBIDDEN, Array, Edge, Holding, Node, Problem, Share
from shardwright.stages.solve.problem.made_once import MadeOnce

MOST_READERS = 6  # of a share, for a node per reader: they know of one another

Tables = tuple[Array, ...]  # of an edge or a share: its costs, and the bytes of each holding
Usages = tuple[Array, ...]  # of a helper, for each holding: bytes by choice


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
        self.once = MadeOnce()

    def _helper(self, name: str, of: Edge | Share, usages: Usages, count: int) -> int:
        held = tuple(Holding(h.first, h.end, own) for h, own in zip(of.holdings, usages, strict=True))
        self.nodes.append(Node(name, self.once(np.zeros, count), held))
        return len(self.nodes) - 1

    def add_edge(self, edge: Edge) -> None:
        if not edge.holdings:
            self.edges.append(edge)
            return
        usages, to_first, to_second = self.once(_reading, _tables(edge))
        name = f"{self.nodes[edge.first].name} -> {self.nodes[edge.second].name}"
        between = self._helper(name, edge, usages, to_first.shape[1])
        self.edges += [Edge(edge.first, between, to_first), Edge(between, edge.second, to_second)]

    def add_reader(self, share: Share, number: int) -> None:
        readers = share.readers[: number + 1]
        wants = tuple(reader.wants for reader in readers)
        usages, to_maker, to_readers = self.once(_forms_of_reader, _tables(share), wants)
        name = f"{self.nodes[share.maker].name} -> {self.nodes[readers[-1].node].name}"
        node = self._helper(name, share, usages, to_maker.shape[1])
        self.edges.append(Edge(share.maker, node, to_maker))
        self.edges += [Edge(node, reader.node, costs) for reader, costs in zip(readers, to_readers, strict=True)]

    def add_form(self, share: Share, form: int) -> None:
        usages, to_maker = self.once(_making, _tables(share), form)
        count = to_maker.shape[1]
        node = self._helper(f"{self.nodes[share.maker].name} as {form}", share, usages, count)
        self.edges.append(Edge(share.maker, node, to_maker))
        for reader in share.readers:
            if form in reader.wants:
                self.edges.append(Edge(reader.node, node, self.once(_wanting, reader.wants, form, count)))

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


def _tables(part: Edge | Share) -> Tables:
    return part.costs, *(h.usages for h in part.holdings)


def _forms_of_reader(tables: Tables, wants: tuple[Any, ...]) -> tuple[Usages, Array, tuple[Array, ...]]:
    """A reader of a share: by choice the bytes held, costs to the maker and to the readers up to itself."""
    *before, own = wants
    nothing = np.zeros(len(tables) - 1), np.zeros(len(tables[0]))
    made: list[tuple[Array, Array]] = []  # by choice: the bytes, and the costs to the maker
    on, forms = [], []  # by choice: which reader before has it made, -1 for itself; and the form
    for form in np.unique(own):
        ready = [which for which, other in enumerate(before) if (other == form).any()]
        classes = _classes(tables, form)
        made += [*classes, *[nothing] * len(ready)]
        on += [*[-1] * len(classes), *ready]
        forms += [form] * (len(classes) + len(ready))
    form_of, made_by = np.array(forms)[:, None], np.array(on)[:, None]
    to_readers = [
        np.where((made_by == which) & (form_of != other[None, :]), FORBIDDEN, 0.0) for which, other in enumerate(before)
    ]
    to_readers.append(np.where(form_of != own[None, :], FORBIDDEN, 0.0))
    return *_by_choice(made), tuple(to_readers)


def _reading(tables: Tables) -> tuple[Usages, Array, Array]:
    """What lies between the ends of an edge: by choice the bytes held and the costs to both ends."""
    _, columns, of_column = np.unique(np.concatenate(tables), axis=1, return_index=True, return_inverse=True)
    read: list[tuple[Array, Array]] = []
    to_second: list[Array] = []
    for which, column in enumerate(columns):
        classes = _classes(tables, column)
        read += classes
        to_second += [np.where(of_column.reshape(-1) == which, 0.0, FORBIDDEN)] * len(classes)
    return *_by_choice(read), np.array(to_second)


def _making(tables: Tables, form: int) -> tuple[Usages, Array]:
    """A form of a share: the bytes held, not made coming first; and the costs to the maker."""
    return _by_choice([(np.zeros(len(tables) - 1), np.zeros(len(tables[0]))), *_classes(tables, form)])


def _classes(tables: Tables, column: int) -> list[tuple[Array, Array]]:
    """What is held by the entries of a column, each once, and what they cost; the others are forbidden then."""
    costs, *usages = (table[:, column] for table in tables)
    known, classes = np.unique(np.array(usages).reshape(-1, len(costs)), axis=1, return_inverse=True)
    return [(held, np.where(classes.reshape(-1) == n, costs, FORBIDDEN)) for n, held in enumerate(known.T)]


def _by_choice(pairs: list[tuple[Array, Array]]) -> tuple[Usages, Array]:
    """Of each holding the bytes by choice; and the costs, a column for each choice."""
    held, costs = zip(*pairs, strict=True)
    return tuple(np.array(held).T.copy()), np.array(costs).T.copy()


def _wanting(wants: Any, form: int, count: int) -> Array:
    return np.where((wants == form)[:, None] & (np.arange(count) == 0)[None, :], FORBIDDEN, 0.0)
