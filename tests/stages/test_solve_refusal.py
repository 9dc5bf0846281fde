"""A budget that nothing fits: the refusal names the least there is, the largest part of it, and what helps."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.base.stage import Inputs
from shardwright.pipeline.config import Checkpoint, Config, Only, Recompute, load_config
from shardwright.pipeline.cost.resident import Kept, budget_of, resident_parts, total_of
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Frontier
from shardwright.pipeline.ir.verify import verify_sharding
from shardwright.pipeline.sharding.sharded import Sharded
from shardwright.stages.checkpoint.choose import choose, evaluate
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.solve import run as stage
from shardwright.stages.solve.search.elimination import least_resident
from tests.graphs import GRAPHS, SILENT, frontier_of, plan_of, preset, solve_settings, trace
from tests.problems import every_plan, random_problem

PROJECT = Path(__file__).parents[2]


class Headed(nn.Module):
    """Nearly all of it is in the head; an odd table cannot be split on two devices."""

    def __init__(self):
        super().__init__()
        self.odd = nn.Parameter(torch.zeros(5, 3))
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 512, bias=False)

    def forward(self, x, y):
        return F.cross_entropy(self.head(F.relu(self.body(x))), y) + self.odd.square().sum()


HEAD, BODY, ODD = 4 * 16 * 512, 4 * 17 * 16, 4 * 15  # bytes


@functools.cache
def headed() -> OpGraph:
    torch.manual_seed(0)
    return trace(Headed(), {"x": torch.zeros(8, 16), "y": torch.zeros(8, dtype=torch.int64)})


@functools.cache
def loaded() -> Config:
    return load_config(PROJECT)


def inputs(graph: OpGraph, cluster: Cluster) -> Inputs:
    bodies = {"graph": graph, "profile": replace(profile_graph(graph), optimizer_copies=2.0), "cluster": cluster}
    return Inputs(PROJECT, {kind: artifacts.make(kind, body, [], {}) for kind, body in bodies.items()}, SILENT, None)


def run(budget: float, graph: OpGraph | None = None, cluster: Cluster | None = None, **asked: object) -> Frontier:
    settings = solve_settings(memory_budget_gb=budget / 1e9, frontier_points=1, **asked)
    return stage.run(inputs(graph or headed(), cluster or preset(2)), replace(loaded(), solve=settings)).body


def refused(budget: float, **asked: object) -> str:
    with pytest.raises(SolveError) as refusal:
        run(budget, **asked)
    line = refusal.value.line()
    assert "\n" not in line and "memory_budget_gb: no plan fits" in line
    return line


def in_bytes(line: str, before: str) -> int:
    """The number of gigabytes that stands after these words."""
    return round(float(re.search(re.escape(before) + r" (\S+?),? ", f"{line} ")[1]) * 1e9)


def test_where_nothing_is_forbidden_more_devices_or_less_state_help():
    line = refused(10_000)
    least = 4 * (HEAD + BODY) // 2 + 4 * ODD
    assert in_bytes(line, "alone need") == pytest.approx(least, rel=1e-3)
    assert "the largest part is the optimizer state of head.weight" in line and "split over all 2 devices" in line
    assert in_bytes(line, "without any state it is") == pytest.approx(least / 2, rel=1e-3)
    assert f"use about {-(-2 * (least - 4 * ODD) // (10_000 - 4 * ODD))} devices" in line
    assert "ZeRO" not in line and "drop" not in line
    assert run(in_bytes(line, "raise memory_budget_gb above")).points


def test_the_optimizer_state_of_data_parallelism_is_sent_to_zero1():
    whole = 4 * (HEAD + BODY + ODD)
    line = refused(0.8 * whole, only=Only.data)
    assert in_bytes(line, "alone need") == pytest.approx(whole, rel=1e-3)
    assert "optimizer state of head.weight" in line and "whole on 2 devices because of `only: data`" in line
    needs = in_bytes(line, "try ZeRO-1 (allowed by `only: zero`), which needs")
    assert needs == pytest.approx(3 * (HEAD + BODY) + 4 * ODD, rel=1e-3)
    found = run(needs, only=Only.zero)
    assert min(point.resident_bytes for point in found.points) <= needs


def test_where_zero1_is_not_enough_zero3_is_named():
    line = refused(0.6 * 4 * (HEAD + BODY + ODD), only=Only.data)
    needs = in_bytes(line, "try ZeRO-3 (allowed by `only: zero`), which needs")
    assert needs == pytest.approx(2 * (HEAD + BODY) + 4 * ODD, rel=1e-3) and "ZeRO-1" not in line
    assert run(needs, only=Only.zero).points


def test_a_constraint_on_the_largest_parameter_is_named():
    asked = {"head.weight": "R", "body.weight": "R"}
    line = refused(3.3 * HEAD, constraints=asked)
    assert "the largest part is the optimizer state of head.weight with 6.554e-05 GB" in line
    assert "whole on 2 devices because of `constraints.head.weight: R`" in line
    needs = in_bytes(line, "try ZeRO-1 (`constraints.head.weight: zero1`), which needs")
    assert run(needs, constraints={**asked, "head.weight": "zero1"}).points
    line = refused(2.5 * HEAD, constraints=asked)
    needs = in_bytes(line, "drop `constraints.head.weight`, which needs")
    assert run(needs, constraints={"body.weight": "R"}).points


def test_settings_that_only_together_stand_in_the_way():
    line = refused(2.2 * HEAD, constraints={"head.weight": "R"}, only=Only.data)
    assert run(in_bytes(line, "drop `constraints` and `only`, which needs")).points


def test_what_does_not_divide_is_told():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(3, 3))

        def forward(self, x):
            return (x @ self.table.T).square().mean()

    graph = trace(Odd(), {"x": torch.zeros(8, 3)})
    told = re.escape("table with 7.2e-08 GB, whole on 2 devices because no dim of 3 x 3 divides")
    with pytest.raises(SolveError, match=told):
        run(100, graph)


def test_a_plan_that_keeps_less_than_the_frontier_is_found():
    """The sweep was not asked for small plans: what keeps least for good joins the frontier where nothing else fits."""
    (fastest,) = run(3e9, only=Only.zero).points
    found = run(fastest.resident_bytes - 1, only=Only.zero)
    smallest = 4 * (HEAD + BODY) // 2 + 4 * ODD
    assert [point.resident_bytes for point in found.points] == [fastest.resident_bytes, smallest]
    least = found.points[1]
    assert least.proof.bound <= least.seconds == pytest.approx(least.proof.objective, rel=1e-9)
    assert least.proof.bound >= fastest.seconds * (1 - 1e-6)


def test_the_plan_that_keeps_least_may_lie_on_another_mesh():
    asked = {"only": Only.zero, "frontier_meshes": 1, "cluster": preset(4)}
    (fastest,) = run(3e9, **asked).points
    found = run(HEAD + BODY + 4 * ODD, **asked)
    least = found.points[-1]
    assert least.resident_bytes == HEAD + BODY + 4 * ODD < fastest.resident_bytes
    verify_sharding(headed(), least.sharding, found.meshes[least.mesh].sizes)


@pytest.mark.parametrize("seed", range(40))
def test_the_least_is_that_of_all_plans(seed):
    problem = random_problem(seed)
    nodes = set(range(0, len(problem.nodes), 2))
    plans = list(every_plan(problem))
    picked = least_resident(problem, nodes, seconds=1e3)

    def for_good(choices):
        held = [(h, k) for i, k in enumerate(choices) if i in nodes for h in problem.nodes[i].holdings]
        pairs = [(edge, (choices[edge.first], choices[edge.second])) for edge in problem.edges if edge.first in nodes]
        made = [s for s in problem.shares if s.maker in nodes]
        pairs += [(share, (choices[share.maker], form)) for share in made for form in share.forms(choices)]
        held += [(h, at) for part, at in pairs for h in part.holdings]
        return sum(h.usages[k] for h, k in held if h.end == problem.length)

    if picked is None:
        assert not plans or not any(for_good(plan) for plan, _, _ in plans)
    else:
        least = min(for_good(plan) for plan, _, _ in plans)
        assert for_good(picked) == pytest.approx(least)
        assert problem.cost(picked) == pytest.approx(
            min(cost for plan, cost, _ in plans if for_good(plan) == pytest.approx(least)), rel=1e-6
        )


def test_the_parts_add_up_to_what_is_resident():
    for point in frontier_of("mlp").points:
        parts = resident_parts(Sharded(GRAPHS["mlp"](), point.sharding, (2,)), 2.0)
        assert sum(part.nbytes for part in parts) == point.resident_bytes
        assert total_of(parts, Kept.values) == total_of(parts, Kept.gradients)
        assert [part.nbytes for part in parts] == sorted((part.nbytes for part in parts), reverse=True)
    assert any(part.label == "values of hidden.*.weight (3 of them)" for part in parts)


@pytest.mark.parametrize("nbytes", [1, 999, 1000, 1001, 123_456_789, 10**12 + 1])
def test_a_budget_is_rounded_up(nbytes):
    named = float(budget_of(nbytes).removesuffix(" GB")) * 1e9
    assert nbytes <= named * (1 + 1e-12) <= nbytes * 1.002


# ------------------------------------------------------------------------------------------------ checkpoint


def test_the_checkpoint_stage_names_the_largest_of_what_is_resident():
    told = re.escape("(the largest part: optimizer state of hidden.*.weight (3 of them) with 9.728e-06 GB)")
    with pytest.raises(SolveError, match=told):
        plan_of("mlp", budget=1000)


def test_the_checkpoint_stage_names_the_link_whose_activations_are_largest():
    graph = trace(Headed(), {"x": torch.zeros(512, 16), "y": torch.zeros(512, dtype=torch.int64)})
    frontier = replace(run(3e9, graph), budget_bytes=1000)
    cluster = preset(2)
    found = evaluate(graph, profile_graph(graph), cluster, frontier, 0, Checkpoint(recompute=Recompute.optimal))
    told = r" and \S+ GB activations when link \d \(.+\) runs backward"
    with pytest.raises(SolveError, match=told):
        choose([found], cluster, frontier, "conf/solve/test.yaml")


def test_recompute_is_advised_where_it_was_off():
    with pytest.raises(SolveError) as refusal:
        plan_of("mlp", budget=1000, recompute="off")
    needs = in_bytes(refusal.value.line(), "set `recompute: optimal`, which needs")
    assert plan_of("mlp", budget=needs).prediction.peak_bytes <= needs
