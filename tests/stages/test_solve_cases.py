"""Plans that the literature knows, found by the solver without being asked for them: reconstructions of our own.

The shapes, links and speeds are chosen so that the known plan is the right one; that it wins is the solver's finding.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.plan import Baseline, FrontierPoint, Sharding
from shardwright.pipeline.ir.program import Convert
from shardwright.pipeline.sharding.lowering import lower
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.solve.answer.baselines import baselines
from shardwright.stages.solve.answer.saved import Saved, found_among
from shardwright.stages.solve.on_mesh import NO_PROOF, MeshProblem, price_point
from shardwright.stages.solve.problem.build import to_sharding
from tests.graphs import SILENT, mesh, solve_settings, trace


def on(graph: OpGraph, cluster: Cluster) -> MeshProblem:
    """With Adam, whose state is two copies of the parameters."""
    settings = solve_settings(frontier_points=1)
    return MeshProblem(Workload(graph, profile_graph(graph), cluster, 2.0), settings, "conf/solve/test.yaml", SILENT)


def best(planned: MeshProblem, budget: float = float("inf")) -> FrontierPoint:
    """The fastest plan within the budget, without recompute."""
    if budget >= planned.sweep.bounder.fastest.peak:
        return planned.points(budget, lambda done, note="": None)[0]
    found = planned.sweep.within(budget)
    sharding = to_sharding(planned.graph, planned.choices, planned.left.expand(found.picked))
    return price_point(planned.workload, sharding, found.proof)


def rows(planned: MeshProblem) -> dict[str, Baseline]:
    """With their memory as the search has it."""

    def price(sharding: Sharding) -> FrontierPoint:
        point = price_point(planned.workload, sharding, NO_PROOF)
        saved = Saved("", planned.cluster.sizes, point.sharding)
        picked = found_among(saved, planned.graph, planned.problem, planned.choices)
        return replace(point, peak_bytes=round(planned.problem.peak(picked)))

    return {row.name: row for row in baselines(planned.graph, planned.choices, planned.problem, price)}


def conversions(graph: OpGraph, sharding: Sharding) -> dict[str, list[str]]:
    """Value -> the layouts that it is converted through, wherever it is."""
    found: dict[str, list[str]] = {}
    program = lower(graph, sharding)
    for step in (step for steps in (program.prologue, program.shared, *program.links) for step in steps):
        if isinstance(step, Convert):
            found.setdefault(step.source.value, [str(step.source.layout)]).append(str(step.target.layout))
    return found


# ------------------------------------------------------------------------------------------------ Megatron


class WideMLP(nn.Module):
    """The feed-forward half of a transformer's layer; the norm after it needs whole rows."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(self.down(F.gelu(self.up(x)))).square().mean()


def test_a_wide_mlp_on_fast_links_becomes_megatrons_columns_and_rows():
    """Columns of the first weight, rows of the second, over all 2 x 4 devices, and one sum between them and the norm.

    The batch could be split over the axis of two; the gradients of the weights are what makes that slower.
    """
    graph = trace(WideMLP(256, 4096), {"x": torch.zeros(2, 256)})
    fast = mesh((2, 4), link_gbytes_per_s=50, latency_us=0.5, matmul_gflops=500, memory_gbytes_per_s=100)
    planned = on(graph, fast)
    plan = best(planned)
    assert plan.proof.gap < 1e-6
    storage = {name: str(layout) for name, layout in plan.sharding.storage.items()}
    assert storage["up.weight"] == storage["up.bias"] == "S(0),S(0)" and storage["down.weight"] == "S(1),S(1)"
    up, gelu, down = (plan.sharding.strategies[op.name] for op in graph.ops[:3])
    assert [str(x) for x in (up.inputs[0], up.outputs[0], gelu.outputs[0])] == ["R,R", "S(1),S(1)", "S(1),S(1)"]
    assert [str(x) for x in (down.inputs[0], down.outputs[0])] == ["S(1),S(1)", "P,P"]
    moved = conversions(graph, plan.sharding)
    assert moved.pop("p_model_down_bias")[-1] == "P,P"  # added once: one device keeps it, without a message
    assert moved == {graph.ops[2].outputs[0]: ["P,P", "P,R", "R,R"]}  # the all-reduce, axis by axis
    assert not lower(graph, plan.sharding).reduced  # no gradient is summed
    known = rows(planned)
    assert all(plan.seconds <= row.seconds * (1 + 1e-9) for row in known.values())
    assert plan.seconds < 0.6 * min(known[name].seconds for name in ("DDP x tensor", "ZeRO-1 x tensor", "ZeRO-3"))


def test_the_same_mlp_with_many_rows_on_slow_links_becomes_data_parallel():
    graph = trace(WideMLP(64, 128), {"x": torch.zeros(4096, 64)})
    slow = mesh((2, 4), link_gbytes_per_s=1, latency_us=5, matmul_gflops=100, memory_gbytes_per_s=100)
    plan = best(on(graph, slow)).sharding
    assert {str(layout) for layout in plan.inputs.values()} == {"S(0),S(0)"}
    assert {str(layout) for layout in plan.storage.values()} == {"R,R"}


# ------------------------------------------------------------------------------------------------ ZeRO


class Classifier(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, y):
        return F.cross_entropy(self.down(F.gelu(self.up(x))), y)


def slow_links() -> Cluster:
    """Where a reduce-scatter is an all-reduce of which a part is kept, as with gloo: ZeRO-1 costs more than DDP."""
    cluster = mesh((4,), link_gbytes_per_s=2, latency_us=20, matmul_gflops=1000, memory_gbytes_per_s=1000)
    axes = (replace(axis, links={**axis.links, "reduce_scatter": axis.links["all_reduce"]}) for axis in cluster.axes)
    return replace(cluster, axes=tuple(axes))


@pytest.fixture(scope="module")
def classifier() -> tuple[OpGraph, MeshProblem]:
    graph = trace(Classifier(512, 2048), {"x": torch.zeros(8192, 512), "y": torch.zeros(8192, dtype=torch.int64)})
    return graph, on(graph, slow_links())


def is_data_parallel(graph: OpGraph, plan: Sharding) -> bool:
    """Whether every op works on its rows alone, with whole weights."""
    used = [(op, plan.strategies[op.name]) for op in graph.ops]
    rows_alone = all(str(s.inputs[0]) == "S(0)" and all(str(x) == "B" for x in s.inputs[1:]) for _, s in used[:-1])
    return rows_alone and {str(layout) for layout in plan.inputs.values()} == {"S(0)"}


def test_with_memory_to_spare_it_is_plain_data_parallelism(classifier):
    graph, planned = classifier
    plan = best(planned)
    assert is_data_parallel(graph, plan.sharding)
    assert {str(layout) for layout in plan.sharding.storage.values()} == {"R"} and not plan.sharding.state
    assert len(lower(graph, plan.sharding).reduced) == 4
    assert plan.seconds == pytest.approx(rows(planned)["DDP"].seconds, rel=1e-9)


def test_optimizer_state_that_does_not_fit_is_sharded(classifier):
    """Half way from DDP to ZeRO-1: the state of one weight is enough, and everything else stays as it was."""
    graph, planned = classifier
    known = rows(planned)
    plan = best(planned, (known["ZeRO-1"].peak_bytes + known["DDP"].peak_bytes) / 2)
    assert is_data_parallel(graph, plan.sharding)
    assert {str(layout) for layout in plan.sharding.storage.values()} == {"R"}
    assert {str(layout) for layout in plan.sharding.state.values()} == {"S(0)"}
    assert len({"up.weight", "down.weight"} & set(plan.sharding.state)) == 1
    assert known["DDP"].seconds < plan.seconds < known["ZeRO-1"].seconds


def test_what_zero1_needs_is_spent_at_least_as_well(classifier):
    """State or parameters are sharded, whichever is faster; nothing is split as tensor parallelism does."""
    graph, planned = classifier
    known = rows(planned)["ZeRO-1"]
    plan = best(planned, known.peak_bytes)
    assert is_data_parallel(graph, plan.sharding) and plan.seconds <= known.seconds
    owned = {name: plan.sharding.state.get(name, layout) for name, layout in plan.sharding.storage.items()}
    assert any(str(owned[name]) == "S(0)" for name in ("up.weight", "down.weight"))


def test_parameters_that_do_not_fit_either_are_stored_in_shards_and_gathered(classifier):
    """Of two layers ZeRO-3 has both copies at once, as the second is gathered ahead of time: ZeRO-2 needs the least."""
    graph, planned = classifier
    known = rows(planned)
    assert known["ZeRO-2"].peak_bytes < known["ZeRO-3"].peak_bytes
    plan = best(planned, known["ZeRO-2"].peak_bytes)
    assert is_data_parallel(graph, plan.sharding)
    assert {str(layout) for layout in plan.sharding.storage.values()} == {"S(0)"}
    moved = conversions(graph, plan.sharding)
    assert all(moved[value.name] == ["S(0)", "B"] for value in graph.of_role(Role.PARAMETER))
