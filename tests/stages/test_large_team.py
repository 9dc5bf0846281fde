"""The large search's processes: the one that answers keeps the time, whatever the others do. And what they share."""

import itertools
import math
import time

import numpy as np
import psutil
import pytest

from benchmarks import parallel_search
from benchmarks.parallel_search import Board, SearchResult, search
from shardwright.stages.solve.problem.data import Edge, Holding, Node, Problem
from shardwright.stages.solve.search.large import presolve
from shardwright.stages.solve.search.large.descent import LEAST, Turns
from shardwright.stages.solve.search.large.loops import undominated
from shardwright.stages.solve.search.large.presolve import NoChoice, Presolved, reduce
from tests.clocks import Ticks

LONG_S = 600.0  # what is tested hangs for good, or ends by itself


def ring(count: int = 40, seed: int = 0) -> tuple[Problem, float]:
    """Nodes in a ring, with chords: not for presolve alone. Half of what could be held fits."""
    random = np.random.default_rng(seed)
    nodes = tuple(
        Node(str(i), random.integers(0, 50, 4).astype(float), (Holding(i, i + 5, 1.0 + random.permutation(4)),))
        for i in range(count)
    )
    pairs = [(i, (i + far) % count) for i in range(count) for far in (1, 3, 7)]
    edges = tuple(Edge(i, j, random.integers(0, 50, (4, 4)).astype(float)) for i, j in pairs)
    return Problem(nodes, edges), 12.0


def search_for_one(problem: Problem, limit: float, monkeypatch) -> SearchResult:
    """A search that is interrupted by its first solution, however long that takes."""
    look = parallel_search._Watch.look

    def interrupt(watch):
        look(watch)
        if watch.best is not None:
            seen.append(watch.cost)
            if len(seen) == 2:  # news that came with the first have been read by then
                raise KeyboardInterrupt

    seen: list[float] = []
    monkeypatch.setattr(parallel_search._Watch, "look", interrupt)
    return search(problem, limit, time.monotonic() + LONG_S)


def hang(*_arguments: object, **_options: object) -> None:
    time.sleep(3600)


def crash(*_arguments: object, **_options: object) -> None:
    raise ZeroDivisionError


@pytest.fixture(autouse=True)
def compiled() -> None:
    parallel_search.warm_up()  # what is compiled here is not compiled in the seconds of a test


@pytest.fixture(autouse=True)
def none_left() -> object:
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_presolve_that_hangs_leaves_the_time_kept(monkeypatch):
    monkeypatch.setattr(parallel_search, "reduce", hang)
    found = search(*ring(), time.monotonic() + 0.5)
    assert found.picked is None and found.cost == math.inf and found.bound == -math.inf


@pytest.mark.parametrize("part", ["drop_dominated", "_search"])
def test_there_is_an_answer_where_presolve_or_the_searchers_hang(part, monkeypatch):
    monkeypatch.setattr(presolve._Work if part == "drop_dominated" else parallel_search, part, hang)
    problem, limit = ring()
    found = search_for_one(problem, limit, monkeypatch)
    assert found.picked is not None
    assert problem.peak(found.picked) <= limit and problem.cost(found.picked) == found.cost >= found.bound


def test_there_is_an_answer_where_the_first_solution_fails(monkeypatch):
    monkeypatch.setattr(parallel_search, "_first", crash)
    problem, limit = ring()
    found = search_for_one(problem, limit, monkeypatch)
    assert found.picked is not None and problem.peak(found.picked) <= limit and found.sizes["nodes"] > 0


def test_a_solution_that_does_not_keep_its_word_is_not_taken(monkeypatch):
    def lie(_reduced: Presolved, _slots: object, _searchers: object, _first: object, _early: object, ours: Board,
            _deadline: float) -> None:  # fmt: skip
        ours.write(np.full(len(ours.picks[0]), 3), -1.0)

    monkeypatch.setattr(parallel_search, "_first", hang)
    monkeypatch.setattr(parallel_search, "_gather", lie)
    problem, _ = ring()
    assert search(problem, 0.5, time.monotonic() + LONG_S).picked is None


def test_a_failure_is_not_an_answer(monkeypatch):
    monkeypatch.setattr(parallel_search, "reduce", crash)
    with pytest.raises(RuntimeError, match="status 1"):
        search(*ring(), time.monotonic() + LONG_S)
    nothing = Edge(0, 1, np.full((4, 4), np.inf))
    monkeypatch.undo()
    problem, limit = ring()
    with pytest.raises(NoChoice):
        search(Problem(problem.nodes, (*problem.edges, nothing)), limit, time.monotonic() + LONG_S)


def test_what_presolve_settles_alone_is_answered_at_once():
    nodes = tuple(Node(str(i), np.array([3.0, 1.0 + i])) for i in range(3))
    found = search(Problem(nodes, ()), 1.0, time.monotonic() + LONG_S)  # it ends at once, or this test hangs
    assert found.picked is not None and found.picked.tolist()[0] == 1
    assert found.cost == found.bound == 1.0 + 2.0 + 3.0


# ---- presolve that ends early


def small(seed: int) -> tuple[Problem, float]:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, 6).tolist()
    nodes = tuple(
        Node(str(i), random.integers(0, 9, size).astype(float), (Holding(i % 3, 3, random.integers(0, 5, size) + 0.0),))
        for i, size in enumerate(sizes)
    )
    edges = []
    for i, j in itertools.combinations(range(6), 2):
        if random.random() < 0.5:
            costs = random.integers(0, 9, (sizes[i], sizes[j])).astype(float)
            edges.append(Edge(i, j, np.where(random.random(costs.shape) < 0.15, np.inf, costs)))
    return Problem(nodes, tuple(edges)), float(random.integers(6, 16))


def optimum(problem: Problem, limit: float, reduced: Presolved | None = None) -> float:
    """Of the whole problem, or among what is left of it."""
    left = problem if reduced is None else reduced.problem
    found = math.inf
    for picked in itertools.product(*(range(len(n.costs)) for n in left.nodes)):
        whole = picked if reduced is None else reduced.expand(picked)
        if problem.peak(whole) <= limit:
            found = min(found, problem.cost(whole))
    return found


def test_presolve_may_end_anywhere(monkeypatch):
    ended, seen = set(), 0
    for seed in range(30):
        problem, limit = small(seed)
        best = optimum(problem, limit)
        for ticks in (0, 8, 13, 20):
            monkeypatch.setattr(presolve, "time", Ticks())
            early: list[Presolved] = []
            try:
                reduced = reduce(problem, ticks, lambda finish, early=early: early.append(finish()))
            except NoChoice:
                assert best == math.inf
                continue
            for found in (*early, reduced):
                assert optimum(problem, limit, found) == best
            ended.add(len(reduced.steps))
            seen += len(early[0].problem.nodes) > len(reduced.problem.nodes)
    assert len(ended) > 4 and seen > 0


def test_dominated_choices_by_their_definition():
    random = np.random.default_rng(0)
    dropped = 0
    for _ in range(200):
        size = int(random.integers(1, 6))
        costs = random.integers(0, 4, size).astype(float)
        held = [random.integers(0, 3, size).astype(float) for _ in range(random.integers(0, 3))]
        matrices = [random.integers(0, 3, (size, 3)).astype(float) for _ in range(random.integers(0, 3))]
        for m in matrices:
            m[random.random(m.shape) < 0.2] = np.inf
            m[:, 0] = 1.0
        kept = undominated(costs, held, [np.asfortranarray(m) for m in matrices])

        def answers(k: int, costs=costs, matrices=matrices) -> np.ndarray:
            """What choice k costs, whatever the neighbours take."""
            return np.array([costs[k] + sum(row) for row in itertools.product(*(m[k] for m in matrices))])

        for b in range(size):
            better = [
                a
                for a in range(size)
                if a != b and (answers(a) <= answers(b)).all() and all(u[a] <= u[b] for u in held)
            ]
            if kept[b]:
                assert not any(kept[a] for a in better)
            else:
                assert any(kept[a] for a in better)
        dropped += int((~kept).sum())
    assert dropped > 100


# ---- turns


def test_turns_go_to_what_has_gained_lately():
    turns = Turns()
    for few in (False, True):
        assert turns.few(0.5) is few
        turns.note(few, 0.0, 10)
    assert turns.share == 0.5
    for _ in range(3):
        turns.note(True, 5.0, 10)
        turns.note(False, 5.0, 1000)
    assert turns.share == 1 - LEAST and turns.few(0.5)
    for _ in range(30):
        turns.note(False, 1.0, 1000)
    assert turns.share == LEAST and not turns.few(0.5) and turns.few(0.1)
