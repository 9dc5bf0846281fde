"""Every solver against exhaustive search on small random problems."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import numpy as np
import pyomo.environ as pyo
import pytest

from shardwright.stages.solve.answer.frontier import FrontierSearch
from shardwright.stages.solve.problem.data import Edge, Holding, Node, Problem
from shardwright.stages.solve.search.backends import NothingFound, glpk
from shardwright.stages.solve.search.elimination import Elimination, Prices, TooWide, _spread
from shardwright.stages.solve.search.integer_program import best_prices, solve, without_too_costly
from shardwright.stages.solve.search.memory_price import Bounder
from shardwright.stages.solve.search.restricted import restrict, without_dominated
from tests.graphs import BACKENDS, SILENT, solve_settings
from tests.problems import LENGTH, a_limit, best, every_plan, random_problem

WHERE = "conf/solve/test.yaml"
SEEDS = range(300)
PARTS = range(10)


@functools.cache
def possible() -> list[int]:
    return [seed for seed in SEEDS if math.isfinite(best(random_problem(seed)))]


def silent(done, note=""):
    pass


def test_the_random_problems_are_of_all_sorts():
    problems = [random_problem(seed) for seed in SEEDS]
    assert 200 < len(possible()) < 300
    assert sum(bool(p.shares) for p in problems) > 100
    limits = [best(p, a_limit(p, seed)) for seed, p in enumerate(problems)]
    assert 60 < sum(map(math.isinf, limits)) < 250
    assert sum(math.isfinite(x) and x > best(p) for x, p in zip(limits, problems, strict=True)) > 30


def test_cost_and_peak_are_those_of_the_oracle():
    for problem in map(random_problem, SEEDS):
        for picked, cost, peak in every_plan(problem)[:20]:
            assert problem.cost(picked) == pytest.approx(cost, rel=1e-12)
            assert problem.peak(picked) == pytest.approx(peak, rel=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", [*PARTS, *(pytest.param(part, marks=pytest.mark.long) for part in range(10, 30))])
def test_the_integer_program_finds_the_optimum(backend, part):
    for seed in SEEDS[part::30]:
        problem = random_problem(seed)
        for limit in (1e9, a_limit(problem, seed)):
            wanted = best(problem, limit)
            small = without_dominated(problem)
            if math.isinf(wanted):
                with pytest.raises(NothingFound) as refusal:
                    solve(small.problem, limit, tuple(range(LENGTH)), solve_settings(backend), WHERE)
                assert "\n" not in refusal.value.line() and WHERE in refusal.value.line()
                continue
            answer = solve(small.problem, limit, (), solve_settings(backend), WHERE)
            picked = small.expand(answer.picked)
            assert problem.cost(picked) == pytest.approx(wanted, rel=1e-6, abs=1e-6)
            assert answer.bound == pytest.approx(wanted, rel=1e-6, abs=1e-6)
            assert problem.peak(picked) <= limit + 1e-6


@pytest.mark.parametrize("part", PARTS)
def test_dropping_dominated_choices_keeps_the_optimum_at_every_limit(part):
    for problem in map(random_problem, SEEDS[part::10]):
        small = without_dominated(problem)
        for limit in {math.inf, *(peak for _, _, peak in every_plan(problem))}:
            assert best(small.problem, limit) == pytest.approx(best(problem, limit), rel=1e-12)
        for picked, cost, peak in every_plan(small.problem)[:20]:
            assert problem.cost(small.expand(picked)) == pytest.approx(cost, rel=1e-12)
            assert problem.peak(small.expand(picked)) == pytest.approx(peak)
            assert small.shrink(small.expand(picked)) == picked


def test_some_choices_are_dominated():
    dropped = 0
    for seed in SEEDS:
        problem = random_problem(seed)
        dropped += sum(len(n.costs) for n in problem.nodes) - sum(map(len, without_dominated(problem).kept))
    assert dropped > 50


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", range(10))
def test_dropping_hopeless_choices_keeps_every_plan_as_good_as_the_known_one(backend, part):
    dropped = 0
    for seed in possible()[part::10][:8]:
        problem = random_problem(seed)
        limit = a_limit(problem, seed)
        limit = limit if math.isfinite(best(problem, limit)) else max(peak for _, _, peak in every_plan(problem))
        moments, wanted = tuple(range(LENGTH)), best(problem, limit)
        for known in (wanted, 1.2 * wanted):
            bound, left = without_too_costly(problem, limit, moments, known, solve_settings(backend), WHERE)
            assert bound <= wanted + 1e-6
            for picked, cost, peak in every_plan(problem):
                if cost <= known and peak <= limit:
                    assert all(k in own for k, own in zip(picked, left.kept, strict=True))
            dropped += sum(len(n.costs) for n in problem.nodes) - sum(map(len, left.kept))
    assert dropped > 5


def test_a_restricted_problem_has_the_plans_that_are_left():
    problem = random_problem(possible()[3])
    kept = tuple((0,) if i % 2 else tuple(range(len(n.costs))) for i, n in enumerate(problem.nodes))
    left = restrict(problem, kept)
    wanted = {
        (p, round(c, 9), m) for p, c, m in every_plan(problem) if all(k in own for k, own in zip(p, kept, strict=True))
    }
    assert {(left.expand(p), round(c, 9), m) for p, c, m in every_plan(left.problem)} == wanted


@pytest.mark.parametrize("part", PARTS)
def test_elimination_finds_the_optimum_at_any_prices(part):
    for problem in map(random_problem, SEEDS[part::10]):
        elimination = Elimination(problem)
        for prices in (Prices(), Prices((1,), (0.3,)), Prices((0, 3), (0.1, 20.0))):
            found = elimination.minimise(prices)
            wanted = min((cost + paid(problem, p, prices) for p, cost, _ in every_plan(problem)), default=math.inf)
            assert found.value == pytest.approx(wanted, abs=1e-9)
            assert found.value <= wanted + 1e-12
            if math.isfinite(wanted):
                assert problem.cost(found.picked) + paid(problem, found.picked, prices) == pytest.approx(
                    wanted, abs=1e-9
                )


def paid(problem: Problem, picked: tuple[int, ...], prices: Prices) -> float:
    held = [*problem.held(picked), *[0.0] * LENGTH]  # past its last moment a problem holds nothing
    return sum(value * held[moment] for moment, value in zip(prices.moments, prices.values, strict=True))


def test_a_graph_that_is_too_wide_is_refused():
    problem = next(p for p in map(random_problem, possible()) if len(p.edges) > 3)
    with pytest.raises(TooWide):
        Elimination(problem, most_entries=0)


def test_neighbours_without_a_choice_are_no_dims():
    """numpy has 64: every two of 70 nodes are joined, and four of them have a choice."""
    draw = np.random.default_rng(0)
    free = (3, 40, 68, 69)
    nodes = tuple(Node(f"n{n}", draw.integers(0, 9, 2 if n in free else 1).astype(float)) for n in range(70))
    edges = tuple(
        Edge(a, b, draw.integers(0, 9, (len(nodes[a].costs), len(nodes[b].costs))).astype(float))
        for a, b in itertools.combinations(range(70), 2)
    )
    problem = Problem(nodes, edges)
    found = Elimination(problem).minimise()
    every = (
        [dict(zip(free, own, strict=True)).get(n, 0) for n in range(70)] for own in itertools.product((0, 1), repeat=4)
    )
    assert found.value == problem.cost(found.picked) == min(problem.cost(tuple(own)) for own in every)


@pytest.mark.parametrize("part", PARTS)
def test_a_bound_is_below_every_plan_that_fits(part):
    for seed in possible()[part::10]:
        problem = random_problem(seed)
        bounder = Bounder(problem, best_prices(solve_settings(), WHERE))
        for limit in {a_limit(problem, seed), a_limit(problem, seed + 1)}:
            bounded = bounder.within(limit, 1e-6, math.inf)
            wanted = best(problem, limit)
            assert bounded.bound <= wanted * (1 + 1e-9) + 1e-9
            assert bounder.bound_at(limit) <= wanted * (1 + 1e-9) + 1e-9
            if bounded.best is not None:
                assert problem.peak(bounded.best.picked) <= limit + 1e-9
                assert bounded.best.cost >= wanted - 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_best_prices(backend):
    """On a line the lowest plane is highest where two of them cross; a moment with room to spare costs nothing."""
    planes = [(1.0, (5.0,)), (2.0, (1.0,)), (4.0, (-3.0,))]
    solve_prices = best_prices(solve_settings(backend), WHERE)
    assert solve_prices(planes, 10.0) == (pytest.approx(2.5), [pytest.approx(0.5)])
    height, prices = solve_prices([(cost, (*over, -7.0)) for cost, over in planes], 10.0)
    assert height == pytest.approx(2.5) and prices == pytest.approx([0.5, 0.0])


@pytest.mark.parametrize("part", range(10))
def test_the_frontier(part):
    """Every bound holds, fastest first, none beaten; the plan at the user's budget is the best there is."""
    for seed in possible()[part::10][:10]:
        problem = random_problem(seed)
        limit = a_limit(problem, seed + 1000)
        found = FrontierSearch(problem, solve_settings(), WHERE, SILENT).frontier(limit, silent)
        assert found[0].cost == pytest.approx(best(problem), rel=1e-9)
        for point in found:
            wanted = best(problem, point.peak)
            assert problem.peak(point.picked) == pytest.approx(point.peak)
            assert point.cost >= wanted - 1e-9 and point.proof.bound <= wanted + 1e-9
            assert point.proof.objective == point.cost
        for fast, small in itertools.pairwise(found):
            assert fast.cost <= small.cost and fast.peak > small.peak
        fitting = [point.cost for point in found if point.peak <= limit + 1e-9]
        if fitting:
            assert min(fitting) == pytest.approx(best(problem, limit), rel=1e-6)


def test_one_point_is_the_fastest():
    problem = random_problem(possible()[0])
    (point,) = FrontierSearch(problem, solve_settings(frontier_points=1), WHERE, SILENT).frontier(math.inf, silent)
    assert point.cost == pytest.approx(best(problem))


def test_one_point_is_the_best_within_the_budget_as_well():
    problem = four_nodes()
    fast, fits = FrontierSearch(problem, solve_settings(frontier_points=1), WHERE, SILENT).frontier(35.0, silent)
    assert fast.cost == pytest.approx(best(problem)) and fast.peak > 35
    assert fits.cost == pytest.approx(best(problem, 35.0)) and fits.peak <= 35


def four_nodes() -> Problem:
    nodes = [
        Node(f"n{i}", np.array([1.0, 1.0 + 0.1 * (i + 1)]), (Holding(0, 1, np.array([10.0 + i, 5.0])),))
        for i in range(4)
    ]
    return Problem(tuple(nodes), ())


def test_a_solver_that_finds_nothing_in_time_leaves_the_plan_of_prices(monkeypatch, caplog):
    problem = four_nodes()
    sweep = FrontierSearch(problem, solve_settings(), WHERE, SILENT)

    def nothing(*_):
        raise NothingFound("the solver found no plan", where=WHERE)

    monkeypatch.setattr("shardwright.stages.solve.answer.frontier.solve", nothing)
    limit = next(x for x in (38.5, 33.5, 27.5) if sweep.bounder.within(x, 0, math.inf).bound < best(problem, x) - 1e-6)
    stand_in = sweep.within(limit)
    assert stand_in.peak <= limit and 0 < stand_in.proof.gap < 1
    assert stand_in.proof.bound <= best(problem, limit) <= stand_in.cost


def test_a_form_that_several_readers_take_is_made_once():
    """By the maker's choice, and a form for each of three readers."""
    costs, forms = np.array([[1.0, 2.0, 4.0, 8.0], [3.0, 5.0, 7.0, 11.0]]), ((0, 1, 3), (1, 2), (0, 1, 2, 3))
    found = _spread(costs, forms)
    assert found.shape == (2, 3, 2, 4)
    for row, *places in itertools.product(range(2), *(range(len(own)) for own in forms)):
        made = {own[place] for own, place in zip(forms, places, strict=True)}
        assert found[row, *places] == sum(costs[row, form] for form in made)


def test_what_glpk_has_not_proven_counts_by_its_bound(monkeypatch):
    model = pyo.ConcreteModel()
    model.x = pyo.Var(domain=pyo.Integers, bounds=(2, 9))
    model.objective = pyo.Objective(expr=model.x)
    settings = solve_settings(backend="glpk")
    assert glpk.solve(model, settings, WHERE) == 2.0
    monkeypatch.setattr(glpk, "termination", lambda results: "feasible")
    monkeypatch.setattr(Path, "read_text", lambda file: "+ 7: mip = 3.0 >= 0.5\n+ 9: mip = 2.0 >= 1.25 37.5%\n")
    assert glpk.solve(model, settings, WHERE) == 1.25
    monkeypatch.setattr(Path, "read_text", lambda file: "")
    assert glpk.solve(model, settings, WHERE) == -math.inf
