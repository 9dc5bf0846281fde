"""Few choices of each node, in the search for large problems; limits that are just met; seeds."""

import math

import numpy as np
import pytest

from benchmarks import contest_search, parallel_search
from benchmarks.contest_search import ContestSearcher
from benchmarks.parallel_search import search
from shardwright.stages.solve.problem.data import Edge, Holding, Node, Problem
from shardwright.stages.solve.search.large import descent, presolve
from shardwright.stages.solve.search.large.arrays import Arrays, candidates, flatten, narrowed
from shardwright.stages.solve.search.large.descent import Searcher
from shardwright.stages.solve.search.large.presolve import reduce
from tests.clocks import Ticks

LENGTH = 40


def planted(seed: int, count: int = 30, choices: int = 6, slack: float = 1.0) -> tuple[Problem, tuple[int, ...], float]:
    """A problem, a plan of it, and a limit that this plan meets to the byte: most others hold more somewhere."""
    random = np.random.default_rng(seed)
    sizes = random.integers(2, choices + 1, count)
    plan = tuple(int(random.integers(size)) for size in sizes)
    nodes = []
    for v, size in enumerate(sizes):
        usages = random.integers(1, 100, size).astype(float)
        usages[plan[v]] = random.integers(1, 20)
        first = int(random.integers(0, LENGTH - 10))
        nodes.append(Node(str(v), random.integers(0, 100, size).astype(float), (Holding(first, first + 10, usages),)))
    edges = []
    for v in range(1, count):
        for other in {int(random.integers(v)), v - 1}:
            costs = random.integers(0, 100, (sizes[other], sizes[v])).astype(float)
            costs[random.random(costs.shape) < 0.3] = math.inf
            costs[plan[other], plan[v]] = random.integers(100)
            edges.append(Edge(other, v, costs))
    problem = Problem(tuple(nodes), tuple(edges))
    return problem, plan, slack * problem.peak(plan)


def arrays_of(problem: Problem, limit: float) -> Arrays:
    return flatten(problem, np.zeros(problem.length), limit, 0.0)


def searcher_of(problem: Problem, limit: float, seed: int = 0) -> Searcher:
    return Searcher(arrays_of(problem, limit), math.inf, seed)


@pytest.mark.parametrize("seed", range(5))
def test_few_choices_cost_and_hold_what_they_do_among_all(seed):
    problem, plan, limit = planted(seed)
    whole, always = searcher_of(problem, limit), np.array(plan)
    random = np.random.default_rng(seed)
    kept = candidates(whole.arrays, random.random(len(whole.arrays.costs)), 3, always)
    few = Searcher(narrowed(whole.arrays, kept, whole.back), math.inf)
    assert (few.sizes == np.minimum(whole.sizes, 3)).all()
    first, start = whole.arrays.start[:-1], few.arrays.start[:-1]
    assert set(first + always) <= set(kept.tolist())
    for _ in range(20):
        picked = np.array([random.integers(size) for size in few.sizes])
        same = kept[start + picked] - first
        assert few.total(picked) == pytest.approx(whole.total(same))
        assert np.array_equal(few.held(picked), whole.held(same))


def test_candidates_are_the_choices_of_least_rank():
    nodes = tuple(Node(str(v), np.zeros(4), (Holding(0, 1, np.ones(4)),)) for v in range(2))
    arrays = arrays_of(Problem(nodes, ()), 5.0)
    rank = np.array([3.0, 0.0, 2.0, 1.0, 0.0, 1.0, 2.0, 3.0])
    assert candidates(arrays, rank, 2, np.array([0, 1])).tolist() == [0, 1, 4, 5]
    assert candidates(arrays, rank, 9, np.array([0, 1])).tolist() == list(range(8))


@pytest.mark.long
def test_a_turn_among_few_choices_finds_what_regions_among_all_of_them_cannot(monkeypatch):
    """A ring of nodes that must all change together: their tables are too large with all choices."""
    monkeypatch.setattr(descent, "TABLES", 2.2)
    monkeypatch.setattr(descent, "MOST_TABLES", 2.2)
    monkeypatch.setattr(descent, "CANDIDATES", (0.4, 0.4))  # two of each node
    size, count = 40, 6
    agree = np.where(np.eye(size, dtype=bool), 0.0, 100.0)
    own = np.full(size, 50.0)
    own[0], own[7] = 2.0, 1.0
    nodes = tuple(Node(str(v), own, (Holding(0, 1, np.ones(size)),)) for v in range(count))
    edges = tuple(Edge(i, j, agree) for i in range(count) for j in range(i))
    found = []
    for among_few in (False, True):
        searcher = searcher_of(Problem(nodes, edges), 100.0)
        searcher.note(np.zeros(count, np.int64), searcher.held(np.zeros(count, np.int64)))
        for _ in range(3):
            if among_few:
                searcher._narrow(searcher._ranks())
            else:
                for _ in range(descent.TURN):
                    searcher._region()
        found.append(searcher.cost)
    assert found == [2.0 * count, 1.0 * count]


@pytest.mark.parametrize("slack", [1.0, 1.05])
def test_a_limit_that_one_plan_is_known_to_meet_is_met(slack, monkeypatch):
    """Never an answer that holds too much, and hardly ever none."""
    clock = Ticks().in_place_of_time(monkeypatch, parallel_search, contest_search, descent, presolve)
    met = 0
    for seed in range(8):
        problem, plan, limit = planted(seed, slack=slack)
        found = search(problem, limit, clock.now + 300, workers=0, step=1.0)
        assert found.bound <= problem.cost(plan) + 1e-6
        if found.picked is not None:
            assert problem.peak(found.picked) <= limit and math.isfinite(problem.cost(found.picked))
            met += found.cost <= problem.cost(plan)
    assert met >= 7


def test_equal_seeds_take_equal_decisions():
    problem, _, limit = planted(3, slack=1.1)
    reduced = reduce(problem)

    def decisions(seed: int) -> list[float]:
        searcher = ContestSearcher(flatten(reduced.problem, reduced.base, limit, reduced.constant), math.inf, seed)
        costs: list[float] = []
        searcher.publish = lambda found: costs.append(found.cost)
        searcher.start()
        searcher.improve(3 * descent.TURN)
        return costs

    assert decisions(0) == decisions(0)
    assert len(decisions(0)) > 2
