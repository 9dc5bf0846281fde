"""Problems that are too wide for elimination: cut open, or by the search for large problems; against every plan."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.pipeline.config import Search
from shardwright.pipeline.cost.step import Workload
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.solve.answer.baselines import baselines
from shardwright.stages.solve.answer.frontier import FrontierSearch
from shardwright.stages.solve.on_mesh import NO_PROOF, MeshProblem, price_point
from shardwright.stages.solve.problem.build import build
from shardwright.stages.solve.problem.data import Edge, Holding, Node, Problem
from shardwright.stages.solve.search.backends import NothingFound
from shardwright.stages.solve.search.decomposition import CutBounder, WideBounder, fastest
from shardwright.stages.solve.search.elimination import Elimination, Prices, TooWide
from shardwright.stages.solve.search.integer_program import best_prices
from shardwright.stages.solve.search.large.plain import plain
from shardwright.stages.solve.search.large.priced import LargeProblem
from shardwright.stages.solve.search.restricted import restrict
from shardwright.stages.solve.search.separators import CutOpen
from tests.graphs import SILENT, mesh, solve_settings, trace
from tests.problems import LENGTH, a_limit, best, every_plan, random_problem

WHERE = "conf/solve/test.yaml"
PARTS = range(10)
SEEDS = range(200)


def paid(problem: Problem, picked: tuple[int, ...], prices: Prices) -> float:
    held = np.zeros(LENGTH)
    own = problem.held(picked)
    held[: len(own)] = own
    return problem.cost(picked) + sum(p * held[m] for m, p in zip(prices.moments, prices.values, strict=True))


def some_prices(problem: Problem, seed: int) -> Prices:
    chosen = np.random.default_rng(seed)
    moments = tuple(range(problem.length)) if chosen.random() < 0.8 else ()
    return Prices(moments, tuple(chosen.choice([0.0, 0.1, 1.0, 5.0], len(moments)).tolist()))


# ---- without shares, and with bytes on nodes alone


@pytest.fixture(params=["a node per reader", "a node per form"])
def way(request, monkeypatch):
    """To make shares plain."""
    if request.param == "a node per form":
        monkeypatch.setattr("shardwright.stages.solve.search.large.plain.MOST_READERS", 1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("part", PARTS)
def test_the_plain_problem_costs_and_holds_the_same(part):
    """At any prices of memory, with the choices of a plan: the helpers at their best come to what the plan does."""
    for seed in SEEDS[part::10]:
        problem = random_problem(seed)
        made = plain(problem)
        assert not made.problem.shares and not any(edge.holdings for edge in made.problem.edges)
        elimination = Elimination(made.problem)
        for number, (picked, _, _) in enumerate(every_plan(problem)[:20]):
            sizes = [len(made.problem.nodes[place].costs) for place in made.places]
            only = [np.where(np.arange(size) == k, 0.0, np.inf) for size, k in zip(sizes, picked, strict=True)]
            prices = some_prices(problem, number)
            found = elimination.minimise(prices, dict(zip(made.places, only, strict=True)))
            assert made.read(found.picked) == picked
            assert found.value == pytest.approx(paid(problem, picked, prices), rel=1e-9, abs=1e-9)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("part", PARTS)
def test_one_setting_of_the_helpers_costs_and_holds_the_same_and_none_less(part):
    for seed in SEEDS[part::10]:
        problem = random_problem(seed, nodes=4)
        made = plain(problem)
        helpers = [v for v in range(len(made.problem.nodes)) if v not in made.places]
        every = [range(len(made.problem.nodes[v].costs)) for v in helpers]
        if math.prod(map(len, every)) > 3000:
            continue
        for picked, cost, _ in every_plan(problem)[:6]:
            whole, held, equal = np.zeros(len(made.problem.nodes), np.int64), problem.held(picked), 0
            whole[list(made.places)] = picked
            for setting in itertools.product(*every):
                whole[helpers] = setting
                total, own = made.problem.cost(whole), made.problem.held(whole)
                if math.isfinite(total):
                    assert total >= cost - 1e-9
                    assert (own >= held - 1e-9).all()
                    equal += total <= cost + 1e-9 and bool((own <= held + 1e-9).all())
            assert equal


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("part", PARTS)
def test_the_plain_problem_has_the_same_optimum(part):
    for seed in SEEDS[part::10]:
        problem = random_problem(seed)
        made = plain(problem)
        assert Elimination(made.problem).minimise().value == pytest.approx(best(problem), abs=1e-9)
        fixed = next(iter(every_plan(problem)), None)
        if fixed is not None:
            kept = [tuple(range(len(n.costs))) for n in made.problem.nodes]
            for place, k in zip(made.places, fixed[0], strict=True):
                kept[place] = (k,)
            assert Elimination(restrict(made.problem, tuple(kept)).problem).minimise().value == pytest.approx(fixed[1])


# ---- bounds and plans


def cut_open(problem: Problem) -> CutBounder:
    return CutBounder(problem, best_prices(solve_settings(), WHERE))


def wide(problem: Problem, seed: int = 0) -> WideBounder:
    return WideBounder(problem, best_prices(solve_settings(), WHERE), seed, 60)


@pytest.mark.parametrize("kind", [CutOpen, lambda problem: LargeProblem(problem, 0, math.inf)])
def test_what_is_found_at_prices_is_a_bound(kind):
    met = 0
    for seed in SEEDS:
        problem = random_problem(seed)
        prices = some_prices(problem, seed)
        found = kind(problem).minimise(prices)
        wanted = min((paid(problem, p, prices) for p, _, _ in every_plan(problem)), default=math.inf)
        assert found.value <= wanted * (1 + 1e-9) + 1e-9
        met += math.isinf(wanted) or paid(problem, found.picked, prices) <= wanted * (1 + 1e-9)
    assert met > 0.9 * len(SEEDS)


def test_copies_that_are_drawn_together_leave_a_bound_that_is_no_lower():
    rose = 0
    for seed in SEEDS:
        problem = random_problem(seed)
        prices = some_prices(problem, seed)
        wanted = min((paid(problem, p, prices) for p, _, _ in every_plan(problem)), default=math.inf)
        if math.isinf(wanted):
            continue
        cut = CutOpen(problem)
        before = cut.minimise(prices).value
        plans = cut.draw(prices, math.inf)
        after = cut.minimise(prices).value
        assert before <= after + 1e-12 and after <= wanted * (1 + 1e-9) + 1e-9
        assert all(paid(problem, plan, prices) >= wanted * (1 - 1e-9) for plan in plans)
        rose += after > before + 1e-9
    assert rose > 5


@pytest.mark.parametrize("kind", [cut_open, wide])
@pytest.mark.parametrize("part", range(4))
def test_plans_within_a_limit_and_their_bounds(kind, part):
    near = total = 0
    for seed in range(60)[part::4]:
        problem = random_problem(seed)
        limit = a_limit(problem, seed)
        wanted = best(problem, limit)
        found = kind(problem).within(limit, 1e-6, math.inf)
        assert found.bound <= wanted * (1 + 1e-9) + 1e-9
        if math.isinf(wanted):
            assert found.best is None
            continue
        total += 1
        if found.best is not None:
            assert found.best.peak <= limit and found.best.cost >= wanted * (1 - 1e-9)
            near += found.best.cost <= wanted * 1.1
    assert near >= 0.8 * total


def test_the_same_problem_gets_the_same_plans():
    for seed in range(0, 60, 6):
        problem = random_problem(seed)
        limit = a_limit(problem, seed)
        for kind in (cut_open, wide):
            one, other = (kind(problem).within(limit, 1e-6, math.inf) for _ in range(2))
            assert (one.best and one.best.picked) == (other.best and other.best.picked) and one.bound == other.bound


def test_a_plan_from_elsewhere_is_one_to_start_from():
    for seed in range(20):
        problem = random_problem(seed)
        if math.isfinite(wanted := best(problem, limit := a_limit(problem, seed))):
            bounder = wide(problem)
            for picked, _, peak in every_plan(problem):
                if peak <= limit:
                    bounder.know(tuple(picked))
            assert bounder.within(limit, 1e-6, math.inf).best.cost == pytest.approx(wanted)


def coloured(seed: int, nodes: int = 60, colours: int = 3) -> Problem:
    """Neighbours of the same colour are forbidden; some colouring there is."""
    chosen = np.random.default_rng(seed)
    hidden, pairs = chosen.integers(colours, size=nodes), set[tuple[int, int]]()
    while len(pairs) < 2.2 * nodes:
        a, b = sorted(chosen.integers(nodes, size=2).tolist())
        if hidden[a] != hidden[b]:
            pairs.add((a, b))
    clash = np.where(np.eye(colours) > 0, math.inf, 0.0)
    own = tuple(Node(f"n{i}", chosen.uniform(0, 1, colours)) for i in range(nodes))
    return Problem(own, tuple(Edge(a, b, clash) for a, b in sorted(pairs)))


def test_the_large_search_goes_on_until_its_plan_is_an_allowed_one():
    for seed in range(12):
        problem = coloured(seed)
        assert math.isfinite(problem.cost(LargeProblem(problem, 0, math.inf).minimise().picked))


def test_a_search_that_finds_no_plan_says_so():
    clash = np.full((2, 2), math.inf)
    nodes = tuple(Node(name, np.zeros(2)) for name in "ab")
    sweep = FrontierSearch(Problem(nodes, (Edge(0, 1, clash),)), solve_settings(frontier_points=1), WHERE, SILENT)
    with pytest.raises(NothingFound, match="no plan was found that keeps to the constraints"):
        sweep.frontier(math.inf, lambda done, note="": None)


# ---- a model whose layers are all the same one


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.before(x)
        q, k, v = (
            p(y).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class OneBlock(nn.Module):
    """As ALBERT: the same block again and again."""

    def __init__(self, layers: int = 6, width: int = 16, vocabulary: int = 64) -> None:
        super().__init__()
        self.token, self.block = nn.Embedding(vocabulary, width), Block(width, 4)
        self.head, self.layers = nn.Linear(width, vocabulary, bias=False), layers

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(input_ids)
        for _ in range(self.layers):
            x = self.block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@functools.cache
def one_block():
    torch.manual_seed(0)
    tokens = torch.zeros(8, 8, dtype=torch.long)
    graph = trace(OneBlock(), {"input_ids": tokens, "labels": tokens.clone()})
    return graph, profile_graph(graph)


def problem_on(sizes: tuple[int, ...]):
    return build(workload_on(sizes))


def workload_on(sizes: tuple[int, ...]) -> Workload:
    return Workload(*one_block(), mesh(sizes), 2.0)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)])
def test_one_block_for_all_layers_is_planned_though_it_is_too_wide(sizes):
    problem, choices = problem_on(sizes)
    with pytest.raises(TooWide):
        Elimination(problem)
    log, said = logging.getLogger("tests.wide"), Lines()
    log.setLevel(logging.INFO)
    log.handlers, log.propagate = [said], False
    settings = solve_settings(search=Search.dp, gap=1e-3, frontier_points=3)
    sweep = FrontierSearch(problem, settings, WHERE, log)
    fastest = sweep.bounder.fastest
    assert (fastest.cost - sweep.bounder.floor) / fastest.cost < 1e-3
    budget = 0.97 * fastest.peak
    found = sweep.frontier(budget, lambda done, note="": None)
    room = sweep.bounder.smallest(math.inf).peak <= budget  # the fastest plan may be the smallest, too
    assert len(found) >= (3 if room else 1)
    for solution in found:
        assert solution.cost == problem.cost(solution.picked) and solution.peak == problem.peak(solution.picked)
        assert 0 < solution.proof.bound <= solution.cost and solution.proof.method == "cut elimination"
    assert not room or any(solution.peak <= budget and solution.proof.gap < 0.02 for solution in found)
    (line,) = said.lines
    assert line.startswith("INFO the graph is too wide for elimination") and "cut elimination" in line
    price = partial(price_point, workload_on(sizes), proof=NO_PROOF)
    rows = baselines(one_block()[0], choices, problem, price)
    assert {"DDP", "ZeRO-3", "tensor"} <= {row.name for row in rows}
    assert all(row.seconds >= sweep.bounder.floor for row in rows)


def test_the_large_search_by_hand():
    problem, _ = problem_on((2, 2))
    settings = solve_settings(search=Search.large, gap=1e-2, frontier_points=1)
    sweep = FrontierSearch(problem, settings, WHERE, SILENT)
    (fastest,) = sweep.frontier(math.inf, lambda done, note="": None)
    assert fastest.proof.method == "large search" and fastest.proof.gap < 0.01
    assert fastest.cost == pytest.approx(cut_open(problem).fastest.cost, rel=0.01)


@pytest.mark.long
def test_a_search_with_another_share_exposed_knows_the_plan_of_the_one_before():
    mesh_problem = MeshProblem(workload_on((2, 2)), solve_settings(search=Search.large), WHERE, SILENT)
    before = mesh_problem.sweep.bounder.fastest.picked
    mesh_problem._take(mesh_problem.share / 2, SILENT)
    assert before in mesh_problem.sweep.bounder.seen


def test_the_large_search_where_even_cut_elimination_would_be_too_wide():
    """A grid: wide everywhere, and no maker has far readers that could be cut off."""
    rows, columns, size = 18, 16, 5
    chosen = np.random.default_rng(0)
    nodes = tuple(
        Node(f"n{i}", chosen.uniform(0, 5, size), (Holding(i % LENGTH, LENGTH, chosen.uniform(0, 9, size)),))
        for i in range(rows * columns)
    )
    pairs = [(i, i + 1) for i in range(len(nodes)) if (i + 1) % columns]
    pairs += [(i, i + columns) for i in range(len(nodes) - columns)]
    problem = Problem(nodes, tuple(Edge(i, j, chosen.uniform(0, 1, (size, size))) for i, j in pairs))
    with pytest.raises(TooWide):
        CutOpen(problem)
    log, said = logging.getLogger("tests.wide"), Lines()
    log.setLevel(logging.INFO)
    log.handlers, log.propagate = [said], False
    sweep = FrontierSearch(problem, solve_settings(search=Search.dp, gap=1e-2, frontier_points=1), WHERE, log)
    (found,) = sweep.frontier(math.inf, lambda done, note="": None)
    assert found.proof.method == "large search" and found.proof.gap < 0.01
    assert found.cost == problem.cost(found.picked) >= found.proof.bound
    (line,) = said.lines
    assert "planned by large search" in line
    assert problem.cost(fastest(problem, 60)) <= found.cost * 1.01
