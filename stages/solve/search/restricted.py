"""A problem with some of each node's choices alone: those that a user's settings leave, or that are not dominated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from shardwright.stages.solve.problem.data import Edge, Node, Problem, Reader, Share
from shardwright.stages.solve.problem.made_once import MadeOnce

Part = TypeVar("Part", Node, Edge, Share)


@dataclass(frozen=True, eq=False)
class Restricted:
    problem: Problem
    kept: tuple[tuple[int, ...], ...]  # per node: its choices that are left

    def expand(self, picked: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(own[k] for own, k in zip(self.kept, picked, strict=True))

    def shrink(self, picked: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(own.index(k) for own, k in zip(self.kept, picked, strict=True))


def as_it_is(problem: Problem) -> Restricted:
    return Restricted(problem, tuple(tuple(range(len(node.costs))) for node in problem.nodes))


def restrict(problem: Problem, kept: tuple[tuple[int, ...], ...]) -> Restricted:
    """The problem with these choices of each node alone."""
    once = MadeOnce()
    at = [once(np.array, own) for own in kept]

    def cut(part: Part, *axes: np.ndarray) -> Part:
        holdings = tuple(replace(h, usages=once(_entries, h.usages, *axes)) for h in part.holdings)
        return replace(part, costs=once(_entries, part.costs, *axes), holdings=holdings)

    nodes = tuple(cut(node, own) for node, own in zip(problem.nodes, at, strict=True))
    edges = tuple(cut(edge, at[edge.first], at[edge.second]) for edge in problem.edges)
    shares = []
    for share in problem.shares:
        readers = tuple(Reader(r.node, once(_entries, r.wants, at[r.node])) for r in share.readers)
        left = cut(share, at[share.maker], once(np.arange, share.costs.shape[1]))
        shares.append(replace(left, readers=readers))
    return Restricted(Problem(nodes, edges, tuple(shares)), kept)


def _entries(table: np.ndarray, *axes: np.ndarray) -> np.ndarray:
    return np.asarray(table[np.ix_(*axes)])


def without_dominated(problem: Problem) -> Restricted:
    """Drops each choice that another of its node beats or equals in cost, in memory and on every edge and share."""
    columns = [[node.costs[:, None], *(h.usages[:, None] for h in node.holdings)] for node in problem.nodes]
    forms: list[list[np.ndarray]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        for table in (edge.costs, *(h.usages for h in edge.holdings)):
            columns[edge.first].append(table)
            columns[edge.second].append(table.T)
    for share in problem.shares:
        columns[share.maker] += [share.costs, *(h.usages for h in share.holdings)]
        for reader in share.readers:
            forms[reader.node].append(reader.wants)
    kept = tuple(_undominated(np.concatenate(c, axis=1), f) for c, f in zip(columns, forms, strict=True))
    return restrict(problem, kept)


def _undominated(table: np.ndarray, forms: list[np.ndarray]) -> tuple[int, ...]:
    """Rows that no other row with equal forms beats or equals everywhere; of equal ones the first."""
    out: set[int] = set()
    for a in range(len(table)):
        for b in range(len(table)):
            if a == b or b in out or a in out or any(f[a] != f[b] for f in forms):
                continue
            if (table[b] <= table[a]).all() and (b < a or (table[b] < table[a]).any()):
                out.add(a)
    kept = tuple(k for k in range(len(table)) if k not in out and np.isfinite(table[k, 0]))
    return kept or tuple(range(len(table)))
