"""Small random problems for the solvers, and the oracle: looking at every plan."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator

import numpy as np

from shardwright.stages.solve.problem.data import Edge, Holding, Node, Problem, Reader, Share

LENGTH = 5  # moments


@functools.cache
def random_problem(seed: int, nodes: int = 6, choices: int = 3) -> Problem:
    """Edges may be parallel, some pairs and choices forbidden; several read one tensor; memory comes and goes."""
    chosen = random.Random(seed)
    count = chosen.randint(1, nodes)
    sizes = [chosen.randint(1, choices) for _ in range(count)]
    made = [_node(chosen, i, size) for i, size in enumerate(sizes)]
    edges = []
    for _ in range(chosen.randint(0, 8) if count > 1 else 0):
        first, second = chosen.sample(range(count), 2)
        edges.append(Edge(first, second, *_table(chosen, sizes[first], sizes[second], forbidden=0.12)))
    shares = []
    for _ in range(chosen.randint(0, 2) if count > 2 else 0):
        maker, *readers = chosen.sample(range(count), chosen.randint(3, min(count, 4)))
        forms = chosen.randint(1, 3)
        wants = [Reader(r, np.array([chosen.randrange(forms) for _ in range(sizes[r])])) for r in readers]
        shares.append(Share(maker, tuple(wants), *_table(chosen, sizes[maker], forms, forbidden=0.05)))
    return Problem(tuple(made), tuple(edges), tuple(shares))


def _node(chosen: random.Random, number: int, size: int) -> Node:
    costs = [math.inf if size > 1 and chosen.random() < 0.05 else chosen.uniform(0, 5) for _ in range(size)]
    return Node(f"n{number}", np.array(costs), _holdings(chosen, (size,)))


def _table(chosen: random.Random, rows: int, columns: int, forbidden: float):
    costs = [
        [
            math.inf if chosen.random() < forbidden else chosen.choice([0.0, 1.0, chosen.uniform(0, 5)])
            for _ in range(columns)
        ]
        for _ in range(rows)
    ]
    return np.array(costs), _holdings(chosen, (rows, columns)) if chosen.random() < 0.4 else ()


def _holdings(chosen: random.Random, shape: tuple[int, ...]) -> tuple[Holding, ...]:
    found = []
    for _ in range(chosen.randint(0, 2)):
        first = chosen.randrange(LENGTH)
        usages = np.array([float(chosen.randint(0, 9)) for _ in range(math.prod(shape))]).reshape(shape)
        found.append(Holding(first, chosen.randint(first + 1, LENGTH), usages))
    return tuple(found)


@functools.cache
def every_plan(problem: Problem) -> tuple[tuple[tuple[int, ...], float, float], ...]:
    """Each plan that is allowed: its choices, cost and peak."""
    return tuple(_plans(problem))


def _plans(problem: Problem) -> Iterator[tuple[tuple[int, ...], float, float]]:
    for picked in itertools.product(*(range(len(node.costs)) for node in problem.nodes)):
        cost = _cost(problem, picked)
        if math.isfinite(cost):
            yield picked, cost, _peak(problem, picked)


def best(problem: Problem, limit: float = math.inf) -> float:
    """The least cost within the limit; infinite where there is none."""
    return min((cost for _, cost, peak in every_plan(problem) if peak <= limit + 1e-9), default=math.inf)


def a_limit(problem: Problem, seed: int) -> float:
    peaks = sorted({peak for _, _, peak in every_plan(problem)}) or [0.0]
    return random.Random(seed).choice([peaks[0] - 1, *peaks, peaks[-1] + 1])


# Written once more here, entry by entry, so that the oracle shares nothing with the solvers.


def _entries(problem: Problem, picked: tuple[int, ...]):
    for node, k in zip(problem.nodes, picked, strict=True):
        yield node, (k,)
    for edge in problem.edges:
        yield edge, (picked[edge.first], picked[edge.second])
    for share in problem.shares:
        for form in {int(r.wants[picked[r.node]]) for r in share.readers}:
            yield share, (picked[share.maker], form)


def _cost(problem: Problem, picked: tuple[int, ...]) -> float:
    return sum(float(part.costs[at]) for part, at in _entries(problem, picked))


def _peak(problem: Problem, picked: tuple[int, ...]) -> float:
    held = [
        sum(
            float(h.usages[at]) for part, at in _entries(problem, picked) for h in part.holdings if h.first <= t < h.end
        )
        for t in range(LENGTH)
    ]
    return max(held)
