"""In which order variables are eliminated: greedily, by one of several rules, of which the caller takes the best."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum
from math import inf, prod

ENTRIES_PER_INDEX = 300  # what an index of a share's elimination is taken to cost, in entries of a plain one


@dataclass(frozen=True)
class EliminationStep:
    variables: tuple[int, ...]  # several: the forms of a share
    neighbours: tuple[int, ...]
    tables: tuple[int, ...]  # that name them, by their place in the list of all tables; that of the share first


class OrderRule(Enum):
    """Which variable goes next: the one with the least ..."""

    work = "entries to look at"
    result = "entries of the table that is left"
    fill = "pairs of neighbours that were none before"


class EliminationOrder:
    """Greedily by a rule; ties by the order of variables. The forms of a share go together, as one unit.

    Where shares wait for one another, one of them is spread out: its table becomes one like any other. Where a step
    would look at more than `enough` entries it ends there.
    """

    def __init__(
        self,
        sizes: list[int],
        scopes: list[tuple[int, ...]],
        groups: dict[int, tuple[int, ...]],
        rule: OrderRule,
        enough: float = inf,
    ) -> None:
        self.sizes, self.scopes, self.rule, self.enough = sizes, list(scopes), rule, enough
        self.total = self.most = 0  # entries looked at, in all and at once
        self.naming: list[set[int]] = [set() for _ in sizes]
        for number, scope in enumerate(scopes):
            for variable in scope:
                self.naming[variable].add(number)
        self.near = [{w for t in named for w in scopes[t]} for named in self.naming]  # that a table names beside it
        self.share = dict(groups)  # table of a share that is still there -> its forms
        self.unit: dict[int, tuple[int, ...]] = {v: (v,) for v in range(len(sizes))}
        self.group: dict[int, int] = {}  # form -> its share
        self.making: dict[int, set[int]] = {}  # maker -> its shares that are still there: it must wait for them
        for number, forms in groups.items():
            self.unit |= dict.fromkeys(forms, forms)
            self.group |= dict.fromkeys(forms, number)
            self.making.setdefault(scopes[number][0], set()).add(number)
        self.dense: set[int] = set()
        self.steps = self._find()

    def around(self, unit: tuple[int, ...]) -> set[int]:
        return set().union(*(self.near[variable] for variable in unit)).difference(unit)

    def weight(self, unit: tuple[int, ...]) -> float:
        """By the rule; infinite where it must wait: a maker, or what would tie two forms of a share together."""
        around = self.around(unit)
        shares = [self.group[v] for v in around if v in self.group]
        if self.making.get(unit[0]) or len(set(shares)) < len(shares):
            return inf
        if self.rule is OrderRule.fill:
            return sum(len(around - self.near[v]) for v in around) / 2
        return self._work(unit, around) if self.rule is OrderRule.work else prod(self.sizes[v] for v in around)

    def _work(self, unit: tuple[int, ...], around: set[int]) -> int:
        each = ENTRIES_PER_INDEX if unit[0] in self.group else self.sizes[unit[0]]
        return each * prod(self.sizes[v] for v in around)

    def _find(self) -> list[EliminationStep]:
        weight = {unit: self.weight(unit) for unit in self.unit.values()}
        queue = [(w, unit) for unit, w in weight.items()]
        heapq.heapify(queue)
        steps = []
        while queue and self.most <= self.enough:
            size, unit = heapq.heappop(queue)
            if weight.get(unit) != size:
                continue
            if size == inf and self.share:
                changed = self._spread_one(weight)
            else:
                del weight[unit]
                work = self._work(unit, self.around(unit))
                self.total, self.most = self.total + work, max(self.most, work)
                steps.append(self._step(unit))
                changed = {self.unit[v] for v in steps[-1].neighbours}
            for other in changed:
                weight[other] = self.weight(other)
                heapq.heappush(queue, (weight[other], other))
        return steps

    def _spread_one(self, weight: dict[tuple[int, ...], float]) -> set[tuple[int, ...]]:
        number = min(self.share, key=lambda n: (prod(self.sizes[v] for v in self.scopes[n]), n))
        forms = self.share.pop(number)
        self.dense.add(number)
        self.making[self.scopes[number][0]].discard(number)
        weight.pop(forms)
        for form in forms:
            del self.group[form]
            self.unit[form] = (form,)
        return {*((form,) for form in forms), *weight}

    def _step(self, unit: tuple[int, ...]) -> EliminationStep:
        around = self.around(unit)
        neighbours = tuple(sorted(around))
        tables = sorted({t for v in unit for t in self.naming[v]})
        number = self.group.get(unit[0])
        if number is not None:  # the making of the forms comes first
            tables.sort(key=lambda t: t != number)
            self.making[self.scopes[number][0]].discard(number)
            del self.share[number]
        for table in tables:
            for named in self.scopes[table]:
                self.naming[named].discard(table)
        self.scopes.append(neighbours)
        for neighbour in neighbours:
            self.naming[neighbour].add(len(self.scopes) - 1)
            self.near[neighbour] = self.near[neighbour].difference(unit) | around
        return EliminationStep(unit, neighbours, tuple(tables))
