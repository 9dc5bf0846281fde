"""A smaller problem with the same optimum under the same limit, and the way back.

consistent   a choice that no choice of a neighbour allows is dropped
separable    an edge whose matrix is a sum of a row and a column goes into its nodes
settled      a node with one choice left goes into its neighbours; what it holds counts for good
follow       a node whose best answer to a neighbour's choice is always the same goes into that neighbour: the only
             allowed one, or, where it has no other neighbour, the cheapest one if none of the allowed ones holds less
             at any time. The neighbour then also holds what its follower holds
pair         a node with one neighbour and few sensible answers becomes one node with it
bypass       a node that holds the same whatever its choice, with two neighbours, becomes an edge between them
dominated    a choice goes if another of its node costs no more whatever the neighbours take, and never holds more

Every step is exact, so that it may end after any of them; consistency comes first and in full, for the others rely on
it. `Presolved.expand` turns choices of the small problem into choices of the whole one.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.stages.solve.problem.data import Edge, Holding, Node, Problem
from shardwright.stages.solve.search.large.arrays import Floats, Ints
from shardwright.stages.solve.search.large.loops import undominated

Interval = tuple[int, int]

MOST_ENTRIES = 4096  # of an edge that replaces a bypassed node
MOST_COMPARED = 40_000_000  # numbers compared to find the dominated choices of one node
PAIR_GROWTH = 1.25  # choices of a pair over those of the node that stays


class NoChoice(Exception):
    """Some node has no choice that its neighbours allow."""


@dataclass(frozen=True)
class _Step:
    """How to tell the choice of a node that went: labels of `node` by the labels of what it hung on.

    `own`: new labels of `on[0]` -> the labels it had before this step (a pair gives it new ones).
    """

    node: int
    on: tuple[int, ...]
    labels: Ints
    own: Ints | None = None


@dataclass
class Presolved:
    problem: Problem
    kept: list[int]
    labels: list[Ints]  # of the kept nodes
    steps: list[_Step]
    whole: int  # nodes of the whole problem
    constant: float
    base: Floats  # held at every moment whatever is chosen
    counts: Mapping[str, int]  # of what was done

    def expand(self, picked: Sequence[int] | Ints) -> Ints:
        found = np.full(self.whole, -1, np.int64)
        for i, node in enumerate(self.kept):
            found[node] = self.labels[i][picked[i]]
        for step in reversed(self.steps):
            found[step.node] = step.labels[tuple(found[j] for j in step.on)]
            if step.own is not None:
                found[step.on[0]] = step.own[found[step.on[0]]]
        return found


def reduce(
    problem: Problem,
    deadline: float = float("inf"),
    cheap: Callable[[Callable[[], Presolved]], None] = lambda _: None,
) -> Presolved:
    """Until the deadline, with what has been done by then. `cheap` is called before the slow last step, with a function
    that gives what the others have left: good until `cheap` returns, or in a copy of the process."""
    work = _Work(problem, deadline)
    work.make_consistent()
    work.separate()
    work.shrink(range(len(work.costs)))
    cheap(work.finish)
    work.drop_dominated()
    return work.finish()


class _Work:
    def __init__(self, problem: Problem, deadline: float) -> None:
        self.deadline = deadline
        self.length = problem.length
        self.names = [n.name for n in problem.nodes]
        self.costs: list[Floats] = [np.array(n.costs, float) for n in problem.nodes]
        self.held: list[dict[Interval, Floats]] = [{} for _ in problem.nodes]
        for i, node in enumerate(problem.nodes):
            for h in node.holdings:
                if h.end > h.first and np.any(h.usages):
                    self._hold(i, (h.first, h.end), np.asarray(h.usages, float))
        self.labels: list[Ints] = [np.arange(len(c)) for c in self.costs]
        self.spaces = [len(c) for c in self.costs]  # labels are below this
        self.edges: list[dict[int, Floats]] = [{} for _ in self.costs]  # edges[i][j][choice of i, choice of j]
        for e in problem.edges:
            self._join(e.first, e.second, e.costs)
        self.gone = [False] * len(self.costs)
        self.steps: list[_Step] = []
        self.constant = 0.0
        self.base = np.zeros(self.length + 1)
        self.counts = Counter[str]()

    # ---- small changes

    def _hold(self, i: int, interval: Interval, usages: Floats) -> None:
        old = self.held[i].get(interval)
        self.held[i][interval] = usages if old is None else old + usages

    def _join(self, i: int, j: int, matrix: Floats) -> None:
        if i == j:
            self.costs[i] = self.costs[i] + np.diagonal(matrix)
            return
        old = self.edges[i].get(j)
        new = matrix if old is None else old + matrix
        self.edges[i][j], self.edges[j][i] = new, new.T

    def _cut(self, i: int, j: int) -> None:
        del self.edges[i][j], self.edges[j][i]

    def _keep(self, i: int, kept: NDArray[np.bool_]) -> None:
        if not kept.any():
            raise NoChoice(self.names[i])
        self._take(i, kept)

    def _take(self, i: int, choices: NDArray[np.bool_] | Ints) -> None:
        """These choices alone, in this order; one may come several times."""
        self.costs[i], self.labels[i] = self.costs[i][choices], self.labels[i][choices]
        for interval, usages in self.held[i].items():
            self.held[i][interval] = usages[choices]
        for j, matrix in self.edges[i].items():
            self.edges[i][j] = matrix[choices]
            self.edges[j][i] = self.edges[i][j].T

    # ---- consistent, separable

    def make_consistent(self) -> None:
        """Drop the forbidden choices, and those that some neighbour never allows."""
        for i in range(len(self.costs)):
            self._drop_forbidden(i)
        pairs = ((i, j) for i, near in enumerate(self.edges) for j in near if i < j and near[j].max() == np.inf)
        self._support([pair for i, j in pairs for pair in ((i, j), (j, i))])

    def _drop_forbidden(self, i: int) -> bool:
        finite = self.costs[i] < np.inf
        if finite.all():
            return False
        self.counts["choices that are forbidden"] += int((~finite).sum())
        self._keep(i, finite)
        return True

    def _support(self, pairs: list[tuple[int, int]]) -> list[int]:
        """Drop the choices of the first that the second never allows, and what follows: the nodes that lost some."""
        changed: dict[int, None] = {}
        todo = deque(pairs)
        while todo:
            i, j = todo.popleft()
            if j not in self.edges[i]:
                continue
            allowed = self.edges[i][j].min(axis=1) < np.inf
            if not allowed.all():
                self.counts["choices without support"] += int((~allowed).sum())
                self._keep(i, allowed)
                changed[i] = None
                todo.extend((other, i) for other in self.edges[i] if other != j)
        return list(changed)

    def separate(self) -> None:
        for i in range(len(self.costs)):
            if time.monotonic() > self.deadline:
                return
            for j in [j for j in self.edges[i] if j > i]:
                self._separate(i, j)

    def _separate(self, i: int, j: int) -> None:
        matrix = self.edges[i].get(j)
        if matrix is None:
            return
        row, column = matrix[0], matrix[:, 0]
        if (
            max(row[0], row[-1], column[-1], matrix[-1, -1]) < np.inf
            and row[0] + matrix[-1, -1] == row[-1] + column[-1]
            and np.isfinite(matrix).all()
            and (matrix - row == (column - row[0])[:, None]).all()
        ):
            self.costs[i] = self.costs[i] + (column - row[0])
            self.costs[j] = self.costs[j] + row
            self._cut(i, j)
            self.counts["separable edges"] += 1

    # ---- nodes that go

    def shrink(self, nodes: Sequence[int]) -> set[int]:
        """Take nodes out while any can go; the nodes that changed."""
        touched: set[int] = set()
        todo = deque(nodes)
        waiting = set(todo)
        while todo and time.monotonic() < self.deadline:
            i = todo.popleft()
            waiting.discard(i)
            if self.gone[i]:
                continue
            for j in self._try(i):
                touched.add(j)
                for other in (j, *(self.edges[j] if len(self.edges[j]) < 64 else ())):
                    if other not in waiting and not self.gone[other]:
                        waiting.add(other)
                        todo.append(other)
        return touched

    def _try(self, i: int) -> list[int]:
        """Take node i out if a step applies: the nodes that this changed."""
        if len(self.costs[i]) == 1:
            return self._settle(i)
        neighbours = self.edges[i]
        if not neighbours:
            return self._alone(i)
        if len(neighbours) == 1 and (found := self._leaf(i, next(iter(neighbours)))):
            return found
        if len(neighbours) == 2 and (found := self._bypass(i)):
            return found
        if len(neighbours) <= 64:
            for j, matrix in neighbours.items():
                if matrix.shape[0] <= matrix.shape[1] and ((matrix < np.inf).sum(axis=0) == 1).all():
                    return self._follow(i, j, (matrix < np.inf).argmax(axis=0))
        return []

    def _release(self, i: int) -> None:
        """What node i holds counts for good: its first choice's."""
        for (first, end), usages in self.held[i].items():
            self.base[first] += usages[0]
            self.base[end] -= usages[0]
        self.gone[i] = True
        self.held[i] = {}

    def _settle(self, i: int) -> list[int]:
        changed = list(self.edges[i])
        for j in changed:
            self.costs[j] = self.costs[j] + self.edges[i][j][0]
            self._cut(i, j)
        self.constant += float(self.costs[i][0])
        self._release(i)
        self.steps.append(_Step(i, (), np.array(self.labels[i][0])))
        self.counts["settled nodes"] += 1
        lost = [j for j in changed if self._drop_forbidden(j)]
        return changed + self._support([(other, j) for j in lost for other in self.edges[j]])

    def _alone(self, i: int) -> list[int]:
        cheapest = np.flatnonzero(self.costs[i] == self.costs[i].min())
        best = int(min(cheapest, key=self._weights(i).__getitem__))
        if not all(u[best] <= u.min() for u in self.held[i].values()):
            return []
        kept = np.zeros(len(self.costs[i]), bool)
        kept[best] = True
        self._keep(i, kept)
        return self._settle(i)

    def _weights(self, i: int) -> Floats:
        """Bytes of each choice, times how long they are held."""
        held = self.held[i].items()
        return sum(((end - first) * u for (first, end), u in held), np.zeros(len(self.costs[i])))

    def _leaf(self, i: int, j: int) -> list[int]:
        total = self.costs[i][:, None] + self.edges[i][j]
        order = np.argsort(self._weights(i), kind="stable")
        answer = order[total[order].argmin(axis=0)]
        least = ((u, np.where(total < np.inf, u[:, None], np.inf).min(axis=0)) for u in self.held[i].values())
        follows = all((usages[answer] <= low).all() for usages, low in least)
        return self._follow(i, j, answer) if follows else self._pair(i, j, total)

    def _follow(self, i: int, j: int, answer: Ints) -> list[int]:
        """Node i takes choice answer[k] when node j takes k, and goes."""
        labels = np.zeros(self.spaces[j], np.int64)
        labels[self.labels[j]] = self.labels[i][answer]
        self.steps.append(_Step(i, (j,), labels))
        self.costs[j] = self.costs[j] + self.costs[i][answer] + self.edges[i][j][answer, np.arange(len(answer))]
        self._cut(i, j)
        self.counts["followers"] += 1
        for interval, usages in self.held[i].items():
            self._hold(j, interval, usages[answer])
        others = list(self.edges[i])
        for other in others:
            matrix = self.edges[i][other][answer]
            self._cut(i, other)
            self._join(j, other, matrix)
        self.held[i], self.gone[i] = {}, True
        changed = [j, *others]
        changed += self._support([pair for other in others for pair in ((j, other), (other, j))])
        for other in others:
            self._separate(j, other)
        return changed

    def _pair(self, i: int, j: int, total: Floats) -> list[int]:
        """Node i, with the only neighbour j, becomes one node with it, if few pairs make sense."""
        count = total.shape[1]
        most = count + min(8, 1 + int((PAIR_GROWTH - 1) * count))
        usages = np.array(list(self.held[i].values()))  # one row per interval
        if len(usages) > 1:
            return []
        order = np.lexsort((self.costs[i], usages[0]))
        least = np.minimum.accumulate(total[order], axis=0)
        better = np.ones(total.shape, bool)  # than all answers that hold less
        better[1:] = total[order][1:] < least[:-1]
        better &= total[order] < np.inf
        if better.sum() > most:
            return []
        theirs, places = np.nonzero(better.T)
        mine = order[places]
        self.steps.append(_Step(i, (j,), self.labels[i][mine], self.labels[j][theirs]))
        self._cut(i, j)
        self._take(j, theirs)
        self.costs[j] = self.costs[j] + total[mine, theirs]
        self.labels[j], self.spaces[j] = np.arange(len(mine)), len(mine)
        for interval, u in self.held[i].items():
            self._hold(j, interval, u[mine])
        self.held[i], self.gone[i] = {}, True
        self.counts["pairs"] += 1
        return [j]

    def _bypass(self, i: int) -> list[int]:
        a, b = self.edges[i]
        left, right = self.edges[a][i], self.edges[i][b]
        large = left.shape[0] * right.shape[1] > MOST_ENTRIES and b not in self.edges[a]
        if large or not all((u == u[0]).all() for u in self.held[i].values()):
            return []
        total = left[:, :, None] + (self.costs[i][:, None] + right)[None]
        best = total.argmin(axis=1)
        table = np.zeros((self.spaces[a], self.spaces[b]), np.int64)
        table[np.ix_(self.labels[a], self.labels[b])] = self.labels[i][best]
        self.steps.append(_Step(i, (a, b), table))
        self._cut(i, a)
        self._cut(i, b)
        self._release(i)
        self._join(a, b, total.min(axis=1))
        self.counts["bypassed nodes"] += 1
        changed = [a, b, *self._support([(a, b), (b, a)])]
        self._separate(a, b)
        return changed

    # ---- dominated choices

    def drop_dominated(self) -> None:
        todo = {i for i, gone in enumerate(self.gone) if not gone}
        while todo and time.monotonic() < self.deadline:
            changed: set[int] = set()
            for i in sorted(todo):
                size, matrices = len(self.costs[i]), list(self.edges[i].values())
                many = size * size * sum(m.shape[1] for m in matrices) > MOST_COMPARED
                if self.gone[i] or many or time.monotonic() >= self.deadline:
                    continue
                kept = undominated(self.costs[i], list(self.held[i].values()), matrices)
                if not kept.all():
                    self.counts["dominated choices"] += int((~kept).sum())
                    self._keep(i, kept)
                    changed.update([i, *self.edges[i]])
            todo = changed | self.shrink(sorted(changed))
            todo.update(j for i in sorted(todo) if len(self.edges[i]) < 64 for j in self.edges[i])

    def finish(self) -> Presolved:
        kept = [i for i, gone in enumerate(self.gone) if not gone]
        number = {i: n for n, i in enumerate(kept)}
        base = self.base.copy()
        nodes = []
        for i in kept:
            holdings = []
            for (first, end), usages in self.held[i].items():
                least = usages.min()
                base[first] += least
                base[end] -= least
                if usages.max() > least:
                    holdings.append(Holding(first, end, usages - least))
            nodes.append(Node(self.names[i], self.costs[i], tuple(holdings)))
        edges = tuple(Edge(number[i], number[j], m) for i in kept for j, m in self.edges[i].items() if i < j)
        return Presolved(
            Problem(tuple(nodes), edges), kept, [self.labels[i] for i in kept], self.steps, len(self.costs),
            self.constant, np.cumsum(base)[: self.length], self.counts,
        )  # fmt: skip
