"""A problem with shares and with edges that hold bytes, as one of nodes and edges alone, of which only nodes hold some.

edge    that holds bytes: a node between its ends, for what is read and the bytes that it takes. It stands for a class
        of the second end's choices (equal columns) together with one of the bytes that such a column knows. Its edge to
        the second end says which class; that to the first says which bytes, and has the costs.
share   a node per form: not made, or made with so many bytes, as the maker's choice has it. Its edge to the maker has
        the costs of making the form; its edges to the readers forbid that it is wanted and not made.

Given the choices of a plan, the helpers have one setting that costs and holds the same, and no allowed one that costs
or holds less: both problems have the same optimum under every limit. Arrays of equal layers stay the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.solve.data import FORBIDDEN, Array, Edge, Holding, Node, Problem, Share


@dataclass(frozen=True, eq=False)
class Plain:
    problem: Problem
    whole: Problem  # that it was made from: its nodes come first
    settings: tuple[Callable[[Sequence[int]], int], ...]  # a helper's choice, by the choices of a plan

    def read(self, picked: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(k) for k in picked[: len(self.whole.nodes)])

    def write(self, picked: Sequence[int]) -> tuple[int, ...]:
        return (*picked, *(setting(picked) for setting in self.settings))


@dataclass(frozen=True, eq=False)
class _Reading:
    """What lies between the ends of an edge: by choice the bytes held and the costs to both ends."""

    usages: tuple[Array, ...]
    to_first: Array
    to_second: Array
    number: Any  # number[choice of first, choice of second]


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
    return Plain(Problem(tuple(made.nodes), tuple(made.edges)), problem, tuple(made.settings))


class _Plain:
    def __init__(self, problem: Problem) -> None:
        self.nodes, self.edges = list(problem.nodes), list[Edge]()
        self.settings: list[Callable[[Sequence[int]], int]] = []
        self.known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def helper(self, name: str, holdings: tuple[Holding, ...], usages: tuple[Array, ...]) -> int:
        held = tuple(Holding(h.first, h.end, own) for h, own in zip(holdings, usages, strict=True))
        count = len(usages[0]) if usages else 2
        self.nodes.append(Node(name, self.once(("zeros", count), lambda: np.zeros(count)), held))
        return len(self.nodes) - 1

    def edge(self, edge: Edge) -> None:
        if not edge.holdings:
            self.edges.append(edge)
            return
        tables = (edge.costs, *(h.usages for h in edge.holdings))
        made: _Reading = self.once(("edge", *map(id, tables)), lambda: _reading(tables))
        between = self.helper(
            f"{self.nodes[edge.first].name} -> {self.nodes[edge.second].name}", edge.holdings, made.usages
        )
        self.edges.append(Edge(edge.first, between, made.to_first))
        self.edges.append(Edge(between, edge.second, made.to_second))
        self.settings.append(lambda picked: int(made.number[picked[edge.first], picked[edge.second]]))

    def share(self, share: Share) -> None:
        tables = (share.costs, *(h.usages for h in share.holdings))
        for form in sorted({int(f) for reader in share.readers for f in reader.wants}):
            made: _Making = self.once(("form", form, *map(id, tables)), lambda form=form: _making(tables, form))
            node = self.helper(f"{self.nodes[share.maker].name} as {form}", share.holdings, made.usages)
            self.edges.append(Edge(share.maker, node, made.to_maker))
            count = made.to_maker.shape[1]
            for reader in share.readers:
                if (reader.wants == form).any():
                    key = ("wants", id(reader.wants), form, count)
                    costs = self.once(key, lambda reader=reader, form=form, n=count: _wanting(reader.wants == form, n))
                    self.edges.append(Edge(reader.node, node, costs))

            def setting(picked: Sequence[int], form: int = form, made: _Making = made) -> int:
                return int(made.number[picked[share.maker]]) if form in share.forms(picked) else 0

            self.settings.append(setting)


def _reading(tables: tuple[Array, ...]) -> _Reading:
    costs, *usages = tables
    _, columns, classes = np.unique(np.concatenate(tables), axis=1, return_index=True, return_inverse=True)
    number = np.zeros((len(costs), len(columns)), dtype=np.int64)
    to_first, to_second, held = [], [], []
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
