"""Blocks and boundaries as links, slices of a batch, meshes of a pipeline's submeshes, and who refuses a pipeline."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.errors import ArtifactError, SolveError
from shardwright.pipeline.base.stage import Inputs
from shardwright.pipeline.config import Checkpoint, Recompute, load_config
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.layout import Layout, S
from shardwright.pipeline.ir.plan import Region
from shardwright.pipeline.sharding.slices import fits, sliced, slices_of
from shardwright.stages.checkpoint.recompute.chain import Chain
from shardwright.stages.checkpoint.user_choices import block_runs, fixed_schedule
from shardwright.stages.solve import run as solve
from shardwright.stages.solve.answer.saved import read_saved
from shardwright.stages.solve.problem.meshes import meshes_of, submeshes_of
from tests.graphs import GRAPHS, SILENT, frontier_of, plan_of, preset, profile_of, solve_settings
from tests.pipeline_plans import plan_with_pipelines

PROJECT = Path(__file__).parents[2]
WHERE = "conf/solve/test.yaml"


# ------------------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ("abababc", [[(0, 1), (2, 3), (4, 5)]]),
        ("xababy", [[(1, 2), (3, 4)]]),
        ("xaaaay", [[(1, 1), (2, 2), (3, 3), (4, 4)]]),
        ("xaabaaby", [[(1, 3), (4, 6)]]),
        ("aaabcbcbc", [[(0, 0), (1, 1), (2, 2)], [(3, 4), (5, 6), (7, 8)]]),
        ("abc", [[(0, 0), (1, 1), (2, 2)]]),
    ],
)
def test_repeated_blocks(kinds: str, runs: list) -> None:
    assert block_runs([ord(kind) for kind in kinds]) == runs


def repeats(kinds: list[int]) -> bool:
    sizes = range(1, len(kinds) // 2 + 1)
    return any(kinds[b : b + n] == kinds[b + n : b + 2 * n] for n in sizes for b in range(len(kinds) - 2 * n + 1))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24))
def test_blocks_of_a_run_are_alike_and_nothing_repeats_between_runs(kinds: list[int]) -> None:
    runs = block_runs(kinds)
    if not repeats(kinds):
        assert runs == [[(link, link) for link in range(len(kinds))]]
        return
    ends = [-1]
    for run in runs:
        assert len(run) > 1 and all(before[1] + 1 == after[0] for before, after in pairwise(run))
        assert len({tuple(kinds[first : last + 1]) for first, last in run}) == 1
        assert run[0][0] > ends[-1] and not repeats(kinds[ends[-1] + 1 : run[0][0]])
        ends.append(run[-1][1])
    assert not repeats(kinds[ends[-1] + 1 :])


OF_EIGHT = Chain((1,) * 9, (1,) * 8, (1,) * 8, (1,) * 9, (0,) * 8, (0,) * 9)


@pytest.mark.parametrize(
    ("recompute", "more", "drawn"),
    [
        ("off", {}, "0 1 2 3 4 5 6 7 8"),
        ("never", {}, "0 1 2 3 4 5 6 7 8"),
        ("except_last", {}, "0 1 2 3 4 5 6 7 8"),
        ("full", {}, "(0) (1) (2) (3) (4) (5) (6) (7) 8"),
        ("always", {}, "(0 1 2 3 4 5 6 7) 8"),
        ("every", {}, "0 1 (2 3) (4 5) 6 7 8"),
        ("every", {"every_blocks": 2}, "0 1 (2 3 4 5) 6 7 8"),
        ("every", {"every_blocks": 9}, "0 1 (2 3 4 5) 6 7 8"),
    ],
)
def test_what_is_recomputed_without_a_pipeline(recompute: str, more: dict, drawn: str) -> None:
    """A GPT of two layers, of two links each."""
    settings = Checkpoint(recompute=Recompute(recompute), **more)
    assert str(fixed_schedule(GRAPHS["gpt"](), OF_EIGHT, settings, 1).regions) == drawn


def test_the_best_recompute_is_not_fixed() -> None:
    assert fixed_schedule(GRAPHS["gpt"](), OF_EIGHT, Checkpoint(recompute=Recompute.optimal), 4) is None


def test_per_block_recompute_holds_less_than_none_and_takes_a_forward_more() -> None:
    off, every, full = (plan_of("gpt", recompute=how) for how in ("off", "every", "full"))
    assert [r for r in every.regions if r.recompute] == [
        Region(2, 3, True, (Region(2, 2, False, ()), Region(3, 3, False, ()))),
        Region(4, 5, True, (Region(4, 4, False, ()), Region(5, 5, False, ()))),
    ]
    assert off.prediction.step_seconds < every.prediction.step_seconds
    assert off.prediction.step_seconds < full.prediction.step_seconds
    assert every.prediction.peak_bytes < off.prediction.peak_bytes


# ------------------------------------------------------------------------------------------------------------- slices


@pytest.mark.parametrize("name", list(GRAPHS))
def test_a_slice_of_the_batch_has_its_part_of_the_work(name: str) -> None:
    graph, profile = GRAPHS[name](), profile_of(name)
    q = next(q for q in (4, 3) if graph.batch % q == 0)
    small, costs = sliced(graph, profile, (graph.batch // q,) * q)
    for value in graph.values.values():
        after = small.values[value.name]
        if value.role in (Role.PARAMETER, Role.BUFFER):
            assert after == value
        else:
            assert after.type.numel in (value.type.numel, value.type.numel // q)
    for value in graph.of_role(Role.INPUT):
        assert small.values[value.name].type.shape == (value.type.shape[0] // q, *value.type.shape[1:])
    for op in graph.ops:
        whole, part = profile.ops[op.name], costs.ops[op.name]
        assert part.flops_forward in (whole.flops_forward, whole.flops_forward / q)
        assert whole.bytes_forward / q <= part.bytes_forward <= whole.bytes_forward
        assert part.kernels_forward == whole.kernels_forward and part.saves == whole.saves
    sharding, cluster = frontier_of(name).points[0].sharding, preset()
    one, many = (
        Workload(g, p, cluster, 2.0, n).priced(sharding).step for g, p, n in ((graph, profile, 1), (small, costs, q))
    )
    assert one.resident_bytes == many.resident_bytes and one.optimizer == many.optimizer
    for a, b in zip(one.links, many.links, strict=True):
        assert a.input_bytes / q - 1 <= b.input_bytes <= a.input_bytes
        assert b.forward <= a.forward * (1 + 1e-9) and q * b.forward >= a.forward * (1 - 1e-9)  # q launches for one
        assert b.memory.kept <= a.memory.kept


def test_weights_and_what_no_input_reaches_stay_whole() -> None:
    graph, profile = GRAPHS["gpt"](), profile_of("gpt")
    small, costs = sliced(graph, profile, (1,) * 4)
    positions = [op for op in graph.ops if op.module == "position"]
    assert positions and all(small.values[o].type == graph.values[o].type for op in positions for o in op.outputs)
    assert all(costs.ops[op.name] == profile.ops[op.name] for op in positions)
    (head,) = (op for op in graph.ops if op.module == "head")
    weight = sum(graph.values[n].type.nbytes for n in head.inputs if graph.values[n].role is Role.PARAMETER)
    whole, part = profile.ops[head.name], costs.ops[head.name]
    assert part.bytes_forward == weight + -(-(whole.bytes_forward - weight) // 4)
    assert part.bytes_backward == 2 * weight + -(-(whole.bytes_backward - 2 * weight) // 4)
    assert (part.flops_forward, part.flops_backward) == (whole.flops_forward / 4, whole.flops_backward / 4)


def test_an_unsliced_graph_is_the_same() -> None:
    graph, profile = GRAPHS["mlp"](), profile_of("mlp")
    assert sliced(graph, profile, ()) == sliced(graph, profile, (graph.batch,)) == (graph, profile)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 8))
def test_slices_differ_by_one_grain_at_most(batch: int, count: int, grain: int) -> None:
    slices = slices_of(batch, count, grain)
    if batch % grain or batch < count * grain:
        assert slices is None
        return
    assert slices is not None and len(slices) == count and sum(slices) == batch
    assert min(slices) > 0 and not any(samples % grain for samples in slices)
    assert list(slices) == sorted(slices, reverse=True) and slices[0] - slices[-1] in (0, grain)


def test_a_price_of_unequal_slices_has_the_work_of_all_and_the_bytes_of_the_largest() -> None:
    graph, profile = GRAPHS["gpt"](), profile_of("gpt")
    small, costs = sliced(graph, profile, (2, 1, 1))  # of 4 samples
    half, of_half = sliced(graph, profile, (2, 2))
    assert small == half
    for name, whole in profile.ops.items():
        part, larger = costs.ops[name], of_half.ops[name]
        assert part.flops_backward in (whole.flops_backward, whole.flops_backward / 3)
        assert part.bytes_forward <= larger.bytes_forward
        held = [(cost.extra_saved, cost.temporary_forward, cost.temporary_backward) for cost in (part, larger)]
        assert held[0] == held[1]


def test_a_split_batch_has_fewer_slices() -> None:
    graph = GRAPHS["gpt"]()  # of 4 samples
    sharding = frontier_of("gpt").points[0].sharding
    split = replace(sharding, inputs={name: Layout((S(0),)) for name in sharding.inputs})
    assert graph.batch == 4
    offered = ((4,), (2, 2), (1, 1, 1, 1), (2, 1, 1))
    assert [fits(graph, split, (2,), slices) for slices in offered] == [True, True, False, False]


# ---------------------------------------------------------------------------------------------- meshes of the submeshes


def test_a_mesh_with_partitions_is_that_of_a_submesh() -> None:
    cluster = preset(8)
    for mesh, sizes, names in (
        ({"pp": 2, "dp": 2, "tp": 2}, (2, 2), ["dp", "tp"]),
        ({"tp": 4, "pp": 2}, (4,), ["tp"]),
        ({"pp": 8}, (1,), ["d0"]),
        ({"pp": 4, "dp": 1, "tp": 2}, (2,), ["tp"]),
    ):
        settings = solve_settings(mesh=mesh)
        assert meshes_of(cluster, settings, WHERE) == ()
        (((size, (found,)),)) = submeshes_of(cluster, settings, WHERE).items()
        assert (found.sizes, [axis.name for axis in found.axes]) == (sizes, names) and size == 8 // mesh["pp"]
    alone = solve_settings(mesh={"pp": 1, "dp": 8})
    (whole,) = meshes_of(cluster, alone, WHERE)
    assert whole.sizes == (8,) and submeshes_of(cluster, alone, WHERE) == {}


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ({"pp": 3, "dp": 2}, "mesh: 3 x 2 is 6 devices, the cluster has 8"),
        ({"pp": 2, "dp": 2, "tp": 4}, "mesh: 2 x 2 x 4 is 16 devices, the cluster has 8"),
    ],
)
def test_meshes_with_partitions_that_the_cluster_does_not_have(mesh: dict, told: str) -> None:
    with pytest.raises(SolveError) as refused:
        submeshes_of(preset(8), solve_settings(mesh=mesh), WHERE)
    assert told in refused.value.line()


def test_the_solve_stage_plans_the_submeshes_of_a_fixed_pipeline(tmp_path: Path) -> None:
    bodies = {"graph": GRAPHS["mlp"](), "profile": profile_of("mlp"), "cluster": preset(4)}
    made = {kind: artifacts.make(kind, body, [], {}) for kind, body in bodies.items()}
    settings = solve_settings(mesh={"pp": 2, "dp": 2}, frontier_points=2)
    config = replace(load_config(PROJECT), solve=settings)
    result = solve.run(Inputs(tmp_path, made, SILENT, None), config)
    frontier = result.body
    assert frontier.points == () and frontier.submesh_points and [mesh.sizes for mesh in frontier.meshes] == [(2,)]
    assert frontier.meshes[0].axes[0].name == "dp" and result.figures["mesh"] == "dp 2"
    assert "| submesh | dp 2 |" in (tmp_path / "runs/solve/plans.md").read_text()


# ------------------------------------------------------------------------------------------ who refuses a pipeline


def test_a_saved_pipeline_is_refused(tmp_path: Path) -> None:
    plan = plan_with_pipelines("gpt", pipeline="1f1b")
    path = artifacts.save(artifacts.make("plan", plan, [], {}), tmp_path)
    (tmp_path / "conf/plan").mkdir(parents=True)
    path.rename(tmp_path / "conf/plan/mine.json")
    with pytest.raises(ArtifactError, match="the saved plan is a pipeline of"):
        read_saved("mine", tmp_path, GRAPHS["gpt"]())
