"""A smaller problem with the same optimum at every memory limit, and the way back to the choices of the whole.

dominated    a choice that is no better than another of its node, in cost, in memory and on every edge, is dropped
eliminate    a node whose memory does not depend on its choice, with at most two neighbours, is folded into them: its
             best answer to each pair of their choices becomes a cost of theirs

Both are exact. Parallel edges are added up first. A choice that no neighbour allows ends with an infinite cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from stages.solve.problem import Edge, Node, Problem

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class _Folded:
    """An eliminated node: its best choice for every combination of its neighbours' choices."""

    node: int
    neighbours: tuple[int, ...]
    best: dict[tuple[int, ...], int]


@dataclass(frozen=True)
class Reduced:
    problem: Problem
    kept: tuple[int, ...]  # nodes of the whole problem that are left, in the order of the small one
    choices: tuple[tuple[int, ...], ...]  # per node of the whole: which choices are left
    folded: tuple[_Folded, ...]
    constant_usage: float  # of the eliminated nodes
    constant_cost: float  # of eliminated nodes that had no neighbour left to pass it on to

    def expand(self, picked: tuple[int, ...]) -> tuple[int, ...]:
        """The choices of the whole problem behind those of the small one."""
        found = dict(zip(self.kept, picked, strict=True))
        for fold in reversed(self.folded):
            found[fold.node] = fold.best[tuple(found[n] for n in fold.neighbours)]
        return tuple(self.choices[i][found[i]] for i in range(len(self.choices)))


def reduce(problem: Problem) -> Reduced:
    work = _Work(problem)
    work.drop_dominated()
    work.eliminate()
    return work.finish()


class _Work:
    def __init__(self, problem: Problem) -> None:
        self.names = [n.name for n in problem.nodes]
        self.costs = [list(n.costs) for n in problem.nodes]
        self.usages = [list(n.usages) for n in problem.nodes]
        self.choices = [list(range(len(n.costs))) for n in problem.nodes]
        self.edges: list[dict[int, Matrix]] = [{} for _ in problem.nodes]  # edges[i][j][choice of i][choice of j]
        self.folded: list[_Folded] = []
        self.gone: set[int] = set()
        self.constant_usage = 0.0
        self.constant_cost = 0.0
        for edge in problem.edges:
            self._add_edge(edge.first, edge.second, edge.costs)

    def _add_edge(self, i: int, j: int, costs: Matrix) -> None:
        old = self.edges[i].get(j)
        new = (
            costs
            if old is None
            else tuple(tuple(map(sum, zip(a, b, strict=True))) for a, b in zip(old, costs, strict=True))
        )
        self.edges[i][j] = new
        self.edges[j][i] = tuple(zip(*new, strict=True))

    def drop_dominated(self) -> None:
        for i in range(len(self.costs)):
            kept: list[int] = []
            for k in range(len(self.costs[i])):
                if not any(self._beats(i, other, k) for other in range(len(self.costs[i])) if other != k):
                    kept.append(k)
            if len(kept) < len(self.costs[i]):
                self._keep(i, kept)

    def _beats(self, i: int, a: int, b: int) -> bool:
        """Choice a is at least as good as b everywhere; of two equal ones the first stays."""
        pairs = [(self.costs[i][a], self.costs[i][b]), (self.usages[i][a], self.usages[i][b])]
        for matrix in self.edges[i].values():
            pairs += zip(matrix[a], matrix[b], strict=True)
        return all(x <= y for x, y in pairs) and (a < b or any(x < y for x, y in pairs))

    def _keep(self, i: int, kept: list[int]) -> None:
        for table in (self.costs, self.usages, self.choices):
            table[i] = [table[i][k] for k in kept]  # type: ignore[assignment]
        for j, matrix in self.edges[i].items():
            self.edges[i][j] = tuple(matrix[k] for k in kept)
            self.edges[j][i] = tuple(zip(*self.edges[i][j], strict=True))

    def eliminate(self) -> None:
        todo = list(range(len(self.costs)))
        while todo:
            i = todo.pop()
            if i in self.gone or len(self.edges[i]) > 2 or len(set(self.usages[i])) > 1:
                continue
            if len(self.gone) == len(self.costs) - 1:
                return  # leave one node, so that there is a problem
            todo += self._fold(i)

    def _fold(self, i: int) -> list[int]:
        neighbours = tuple(self.edges[i])
        sizes = [range(len(self.costs[j])) for j in neighbours]
        combinations = [(a,) for a in sizes[0]] if len(sizes) == 1 else []
        combinations = [(a, b) for a in sizes[0] for b in sizes[1]] if len(sizes) == 2 else combinations or [()]
        best: dict[tuple[int, ...], int] = {}
        value: dict[tuple[int, ...], float] = {}
        for combination in combinations:
            totals = [
                cost + sum(self.edges[j][i][c][k] for j, c in zip(neighbours, combination, strict=True))
                for k, cost in enumerate(self.costs[i])
            ]
            best[combination] = min(range(len(totals)), key=totals.__getitem__)
            value[combination] = totals[best[combination]]
        self._pass_on(neighbours, value)
        for j in neighbours:
            del self.edges[j][i]
        self.edges[i] = {}
        self.gone.add(i)
        self.folded.append(_Folded(i, neighbours, best))
        self.constant_usage += self.usages[i][0]
        return list(neighbours)

    def _pass_on(self, neighbours: tuple[int, ...], value: dict[tuple[int, ...], float]) -> None:
        if len(neighbours) == 1:
            j = neighbours[0]
            self.costs[j] = [cost + value[(a,)] for a, cost in enumerate(self.costs[j])]
        elif neighbours:
            j, k = neighbours
            rows, columns = range(len(self.costs[j])), range(len(self.costs[k]))
            self._add_edge(j, k, tuple(tuple(value[a, b] for b in columns) for a in rows))
        else:
            self.constant_cost += value[()]

    def finish(self) -> Reduced:
        kept = tuple(i for i in range(len(self.costs)) if i not in self.gone)
        number = {i: n for n, i in enumerate(kept)}
        nodes = tuple(Node(self.names[i], tuple(self.costs[i]), tuple(self.usages[i])) for i in kept)
        edges = tuple(Edge(number[i], number[j], matrix) for i in kept for j, matrix in self.edges[i].items() if i < j)
        return Reduced(
            Problem(nodes, edges),
            kept,
            tuple(map(tuple, self.choices)),
            tuple(self.folded),
            self.constant_usage,
            self.constant_cost,
        )
