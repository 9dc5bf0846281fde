"""The search for large problems, against exhaustive search on small ones; its benchmark, from the outside."""

import gc
import gzip
import itertools
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import contest_search, parallel_search, solver
from benchmarks.contest_search import ContestSearcher
from benchmarks.parallel_search import SearchResult
from shardwright.stages.solve.problem.data import FORBIDDEN, Edge, Holding, Node, Problem
from shardwright.stages.solve.search.large import descent, presolve
from shardwright.stages.solve.search.large.arrays import flatten
from shardwright.stages.solve.search.large.presolve import NoChoice, reduce
from tests.clocks import Ticks

SLOW = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def make(seed: int) -> tuple[Problem, float]:
    """A few nodes with two or three choices, some holding twice, forbidden pairs, parallel edges and loose nodes."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 8))
    nodes = []
    for i in range(count):
        size = int(random.integers(1, 4))
        holdings = []
        for _ in range(int(random.integers(0, 3))):
            first = int(random.integers(0, 6))
            usages = random.integers(0, 9, size).astype(float)
            holdings.append(Holding(first, first + int(random.integers(1, 5)), usages))
        nodes.append(Node(str(i), random.integers(0, 20, size).astype(float), tuple(holdings)))
    edges = []
    for _ in range(int(random.integers(0, 2 * count + 1))):
        i, j = sorted(random.integers(0, count, 2).tolist())
        if i == j:
            continue
        costs = random.integers(0, 20, (len(nodes[i].costs), len(nodes[j].costs))).astype(float)
        costs[random.random(costs.shape) < 0.2] = FORBIDDEN
        if random.random() < 0.3:
            costs = costs.max(axis=1, keepdims=True, initial=0, where=costs < np.inf) + costs.min(axis=0, keepdims=True)
        edges.append(Edge(i, j, costs) if random.random() < 0.5 else Edge(j, i, costs.T))
    problem = Problem(tuple(nodes), tuple(edges))
    peaks = sorted(problem.peak(p) for p in itertools.product(*(range(len(n.costs)) for n in nodes)))
    return problem, peaks[int(random.integers(0, max(1, len(peaks) // 2)))]


def optimum(problem: Problem, limit: float) -> float:
    every = itertools.product(*(range(len(n.costs)) for n in problem.nodes))
    return min((problem.cost(p) for p in every if problem.peak(p) <= limit), default=math.inf)


@SLOW
@given(st.integers(0, 10**6))
def test_presolve_keeps_the_optimum(seed):
    problem, limit = make(seed)
    best = optimum(problem, limit)
    try:
        reduced = reduce(problem)
    except NoChoice:
        assert optimum(problem, math.inf) == math.inf
        return
    found = math.inf
    for picked in itertools.product(*(range(len(n.costs)) for n in reduced.problem.nodes)):
        whole = reduced.expand(picked)
        held = problem.held(whole)
        small = reduced.base.copy()
        own = reduced.problem.held(picked)
        small[: len(own)] += own
        assert np.array_equal(held, small)
        assert problem.cost(whole) == reduced.problem.cost(picked) + reduced.constant
        if held.max(initial=0.0) <= limit:
            found = min(found, problem.cost(whole))
    assert found == best


@pytest.mark.long
def test_search_finds_the_optimum_of_nearly_all_small_problems(monkeypatch):
    clock = Ticks().in_place_of_time(monkeypatch, parallel_search, contest_search, descent, presolve)
    equal = solved = 0
    for seed in range(24):
        problem, limit = make(seed)
        best = optimum(problem, limit)
        if best == math.inf:
            continue
        solved += 1
        found = parallel_search.search(problem, limit, clock.now + 300, workers=0, step=1.0)
        assert found.bound <= best + 1e-6
        if found.picked is None:
            continue
        assert problem.peak(found.picked) <= limit
        assert problem.cost(found.picked) == pytest.approx(found.cost)
        assert found.cost >= best - 1e-6
        equal += found.cost <= best + 1e-6
    assert solved > 12
    assert equal >= 0.95 * solved


def test_what_cannot_fit_is_proven_so_and_ends_the_search():
    node = Node("n", np.array([1.0, 2.0]), (Holding(0, 1, np.array([5.0, 4.0])),))
    for workers in (0, 2):  # it ends long before its time, or this test hangs
        found = parallel_search.search(Problem((node,), ()), 3.0, time.monotonic() + 36000, workers=workers)
        assert found.picked is None
        assert found.bound > 2.0


@SLOW
@given(st.integers(0, 10**6))
def test_only_what_cannot_fit_is_called_impossible(seed):
    problem, limit = make(seed)
    try:
        reduced = reduce(problem)
    except NoChoice:
        return
    if not reduced.problem.nodes:
        return
    with pytest.MonkeyPatch.context() as patch:
        clock = Ticks().in_place_of_time(patch, contest_search, descent)
        searcher = ContestSearcher(flatten(reduced.problem, reduced.base, limit, reduced.constant), clock.now + 50)
        searcher.run(0.5)
    assert not (searcher.impossible and optimum(problem, limit) < math.inf)


def grid(side: int) -> dict:
    """A contest instance: a grid whose neighbours like to agree, each on its own terms."""
    random = np.random.default_rng(0)
    count = side * side
    usages = random.integers(1, 100, (count, 4)).tolist()
    least = max(sum(min(u) for u in usages[max(0, v - side + 1) : v + 1]) for v in range(count))
    pairs = [[v, v + 1] for v in range(count) if (v + 1) % side] + [[v, v + side] for v in range(count - side)]
    return {
        "problem": {
            "name": "grid",
            "nodes": {
                "intervals": [[v, v + side] for v in range(count)],
                "costs": random.integers(0, 1000, (count, 4)).tolist(),
                "usages": usages,
            },
            "edges": {"nodes": pairs, "costs": random.integers(0, 1000, (len(pairs), 16)).tolist()},
            "usage_limit": int(1.1 * least),
        }
    }


@pytest.fixture
def benchmark(monkeypatch, capsys):
    """`python -m benchmarks.solver` in this process, as if that were new: exit status, stdout and stderr."""
    before = signal.getsignal(signal.SIGINT)
    born = time.time()
    monkeypatch.setattr(solver.psutil, "Process", lambda: SimpleNamespace(create_time=lambda: born))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["solver", *arguments])
        return solver.main(), *capsys.readouterr()

    yield call
    gc.enable()
    signal.signal(signal.SIGINT, before)


def written_to(folder: Path, instance: dict) -> str:
    file = folder / "grid.json.gz"
    file.write_bytes(gzip.compress(json.dumps(instance).encode()))
    return str(file)


def test_benchmark_answers_an_interrupt(tmp_path, benchmark, monkeypatch):
    """With the best so far; it comes as soon as there is one, however long that takes here."""
    look = parallel_search._Watch.look

    def interrupt(watch):
        look(watch)
        if watch.best is not None and not gone:
            gone.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    gone: list[bool] = []
    monkeypatch.setattr(parallel_search._Watch, "look", interrupt)
    status, out, err = benchmark("--instance", written_to(tmp_path, grid(30)), "--seconds", "300")
    found = json.loads(out.splitlines()[-1])
    assert status == 0 and not err and gone and found["feasible"] and found["bound"] <= found["cost"]


def test_benchmark_keeps_the_time(tmp_path, benchmark, monkeypatch):
    """Two of the ten seconds went by before it could look: the search is told when to end, with time left to report."""
    told: list[float] = []
    monkeypatch.setattr(solver, "time", SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 50.0))
    monkeypatch.setattr(solver.psutil, "Process", lambda: SimpleNamespace(create_time=lambda: 48.0))
    monkeypatch.setattr(
        solver, "search", lambda *given, step: told.append(given[2]) or SearchResult(None, math.inf, 1.0)
    )
    benchmark("--instance", written_to(tmp_path, grid(3)), "--seconds", "10")
    assert told == [pytest.approx(108 - solver.RESERVE - 0.2 * 2)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p["edges"]["nodes"].__setitem__(0, [0, 1, 2]), "edge 0"),
        (lambda p: p["edges"]["costs"].__setitem__(0, [1, 2]), "edge 0"),
        (lambda p: p["nodes"]["usages"].__setitem__(1, [1]), "node 1"),
        (lambda p: p["nodes"].pop("intervals"), "intervals"),
        (lambda p: p["edges"]["nodes"].pop(), "edges.nodes has"),
    ],
)
def test_benchmark_refuses_a_bad_file(tmp_path, benchmark, change, words):
    instance = grid(3)
    change(instance["problem"])
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(instance))
    status, _, err = benchmark("--instance", str(file), "--seconds", "5")
    assert status == 2
    assert words in err and len(err.splitlines()) == 1


def test_benchmark_refuses_what_is_no_file(tmp_path, benchmark):
    for name, content in (("absent.json", None), ("text.json", b"{"), ("cut.json.gz", b"\x1f\x8b\x08")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        status, _, err = benchmark("--instance", str(tmp_path / name), "--seconds", "5")
        assert status == 2
        assert err.startswith("error: ") and len(err.splitlines()) == 1
