"""A saved plan: taken as it is or as the start of the search; what does not belong to this run is refused."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import KINDS, Artifact
from shardwright.pipeline.base.errors import ArtifactError, ConfigError, ShardwrightError, SolveError
from shardwright.pipeline.base.stage import Inputs
from shardwright.pipeline.config import Config, Only, PlanUse, Search, load_config
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Frontier, Plan, Prediction, Region, Sharding
from shardwright.pipeline.models.mlp import MLP
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.solve import run as stage
from tests.graphs import SILENT, frontier_of, mlp_batch, mlp_graph, plan_of, preset, profile_of, solve_settings, trace
from tests.unpipelined import whole_plan

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path) -> Path:
    """A project with its configuration alone."""
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    return tmp_path


def save(root: Path, body: object, kind: str = "plan", name: str = "mine", **inputs: Artifact) -> None:
    made = artifacts.save(artifacts.make(kind, body, inputs.values(), {}), root)
    shutil.copy(made, root / "conf" / "plan" / f"{name}.json")


def run(root: Path, graph: OpGraph | None = None, cluster: Cluster | None = None, **asked: object) -> Frontier:
    graph = graph or mlp_graph()
    profile = replace(profile_of("mlp") if graph is mlp_graph() else profile_graph(graph), optimizer_copies=2.0)
    bodies = {"graph": graph, "profile": profile, "cluster": cluster or preset(2)}
    made = {kind: artifacts.make(kind, body, [], {}) for kind, body in bodies.items()}
    return stage.run(Inputs(root, made, SILENT, None), config(**asked)).body


@functools.cache
def loaded() -> Config:
    return load_config(PROJECT)


def config(**asked: object) -> Config:
    return replace(loaded(), solve=solve_settings(**{"frontier_points": 1, "plan": "mine", **asked}))


def plan_with(sharding: Sharding, axes: tuple[tuple[str, int], ...] = (("d0", 2),)) -> Plan:
    """As the checkpoint stage writes it; what it was predicted to cost does not matter."""
    return whole_plan(axes, "cpu", 1, sharding, (Region(0, 0, False, ()),), Prediction(0.0, 0, 0, 0.0, 0.0, 0.0, 0.0))


def refused(root: Path, **asked: object) -> str:
    with pytest.raises(ShardwrightError) as refusal:
        run(root, **asked)
    assert isinstance(refusal.value, (ArtifactError, SolveError)) and refusal.value.remedy
    assert "\n" not in refusal.value.line()
    return refusal.value.line()


# ------------------------------------------------------------------------------------------------ as it is


def test_as_it_is_a_plan_costs_what_it_did(root):
    for point in frontier_of("mlp").points:
        save(root, plan_with(point.sharding))
        (found,) = run(root, plan_use=PlanUse.as_is, memory_budget_gb=point.resident_bytes / 1e9).points
        assert found.sharding == point.sharding
        assert (found.seconds, found.peak_bytes, found.resident_bytes) == (
            point.seconds,
            point.peak_bytes,
            point.resident_bytes,
        )
        assert found.proof.method == "given" and found.proof.objective == pytest.approx(point.seconds, rel=1e-9)
        # By the bound at its own size, not at the limit it was found for.
        assert 0 <= found.proof.gap <= point.proof.gap + 1e-6


def test_the_plan_of_the_checkpoint_stage_is_taken(root):
    plan = plan_of("mlp")
    save(root, plan)
    (found,) = run(root, plan_use=PlanUse.as_is).points
    assert found.seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-9)


def test_a_poor_plan_is_told_how_far_it_is_from_the_best(root):
    """Data parallelism where the links are so slow that it loses to running everything everywhere."""
    slow = preset(2, link_gbytes_per_s=1e-3, latency_us=100)
    poor = run(root, only=Only.data, plan=None).points[0].sharding
    best = run(root, cluster=slow, plan=None).points[0]
    save(root, plan_with(poor))
    (found,) = run(root, cluster=slow, plan_use=PlanUse.as_is).points
    assert found.seconds > best.seconds
    assert found.proof.bound == pytest.approx(best.seconds, rel=1e-6)
    assert found.proof.gap == pytest.approx(1 - best.seconds / found.seconds, rel=1e-4)


def test_a_frontier_is_taken_with_all_its_plans(root):
    frontier = frontier_of("mlp")
    save(root, frontier, "frontier")
    found = run(root, plan_use=PlanUse.as_is)
    unbeaten = stage._unbeaten(list(frontier.points))
    assert len(unbeaten) > 1
    assert [point.sharding for point in found.points] == [point.sharding for point in unbeaten]
    assert {point.proof.method for point in found.points} == {"given"}


def test_as_it_is_but_too_large(root):
    save(root, plan_with(run(root, only=Only.data, plan=None).points[0].sharding))
    line = refused(root, plan_use=PlanUse.as_is, memory_budget_gb=30e-6)
    assert "the saved plan does not fit 3e-05 GB" in line and "optimizer state of hidden.*.weight" in line
    assert "set `plan_use: start`" in line
    assert run(root, plan_use=PlanUse.start, memory_budget_gb=30e-6).points


# ------------------------------------------------------------------------------------------------ as a start


def test_the_search_is_never_worse_than_its_start(root):
    start = run(root, plan=None, only=Only.zero, frontier_points=3).points[-1]
    save(root, plan_with(start.sharding))
    asked = {"search": Search.dp, "only": Only.zero, "frontier_points": 1}
    assert all(point.peak_bytes > start.peak_bytes for point in run(root, plan=None, **asked).points)
    for budget in (start.peak_bytes, start.peak_bytes + 1, start.resident_bytes, 4e9):
        points = run(root, memory_budget_gb=budget / 1e9, **asked).points
        as_small = [p for p in points if p.peak_bytes <= start.peak_bytes and p.resident_bytes <= start.resident_bytes]
        assert min(point.seconds for point in as_small) <= start.seconds


def test_a_start_that_is_beaten_changes_nothing(root):
    save(root, plan_with(run(root, plan=None, only=Only.data).points[0].sharding))
    with_start, without = run(root, search=Search.dp), run(root, search=Search.dp, plan=None)
    assert [point.sharding for point in with_start.points] == [point.sharding for point in without.points]


def test_the_mesh_of_a_start_is_kept(root):
    """Whatever other meshes promise."""
    cluster = preset(4)
    assert len(cluster.mesh_candidates()) > 1
    for mesh in cluster.mesh_candidates():
        shape = dict(zip(("a", "b"), mesh.sizes, strict=False))
        sharding = run(root, cluster=cluster, plan=None, mesh=shape, only=Only.data).points[0].sharding
        save(root, plan_with(sharding, tuple(shape.items())))
        found = run(root, cluster=cluster, most_meshes=1, frontier_meshes=1)
        assert mesh.sizes in [own.sizes for own in found.meshes]
        alone = run(root, cluster=cluster, plan_use=PlanUse.as_is)
        assert [own.sizes for own in alone.meshes] == [mesh.sizes]


# ------------------------------------------------------------------------------------------------ errors


def written(root: Path, **changes: object) -> None:
    path = root / "conf/plan/mine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("use", PlanUse)
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda path: path.unlink(), "there is no such file"),
        (lambda path: path.write_text("{"), "it is not whole JSON"),
        (lambda path: path.write_text("{}"), "it is not an artifact of ours"),
        (lambda path: path.write_text(path.read_text().replace('"R"', '"S(0)"')), "does not match its digest"),
    ],
)
def test_a_file_that_is_no_plan(root, spoil, told, use):
    save(root, plan_of("mlp"))
    spoil(root / "conf/plan/mine.json")
    line = refused(root, plan_use=use)
    assert told in line and line.startswith("conf/plan/mine.json: ") and "copy runs/checkpoint/plan.json or" in line


def test_an_artifact_of_another_kind_or_version(root):
    save(root, mlp_graph(), "graph")
    assert "it is not a plan or frontier artifact" in refused(root)
    save(root, plan_of("mlp"))
    written(root, version=99)
    assert f"it has version 99, this program reads version {KINDS['plan'].version}" in refused(root)


def test_a_plan_of_another_graph(root):
    deeper = trace(MLP(features=12, width=32, classes=6, depth=4), mlp_batch())
    save(root, plan_of("mlp"))
    line = refused(root, graph=deeper)
    assert "the saved plan is of another model: which has op linear_4" in line or "has parameter hidden.3" in line
    assert line.startswith("conf/plan/mine.json: ") and "more; save one of this model" in line
    save(root, plan_with(run(root, graph=deeper, plan=None).points[0].sharding))
    assert "which has no op" in refused(root)


def test_a_plan_of_other_shapes(root):
    torch.manual_seed(0)
    odd = trace(MLP(features=12, width=33, classes=6, depth=3), mlp_batch())
    save(root, plan_with(frontier_of("mlp").points[-1].sharding))
    line = refused(root, graph=odd)
    assert "it would store hidden.1.weight of 33 x 33 as S(1), hidden.2.weight of 33 x 33 as S(0)" in line


def test_a_plan_of_another_batch_serves(root):
    """Names and layouts fit: what it costs is worked out anew."""
    batch = {name: torch.cat([tensor] * 2) for name, tensor in mlp_batch().items()}
    torch.manual_seed(0)
    larger = trace(MLP(features=12, width=32, classes=6, depth=3), batch)
    save(root, plan_of("mlp"))
    (found,) = run(root, graph=larger, plan_use=PlanUse.as_is).points
    assert found.sharding.storage == plan_of("mlp").sharding.storage


def test_a_plan_of_another_cluster(root):
    save(root, plan_of("mlp"))
    line = refused(root, cluster=preset(4))
    assert "is of another cluster: it is for a mesh of 2, this one has 4, 2 x 2" in line
    save(root, plan_of("mlp", 4))
    line = refused(root, cluster=preset(4), mesh={"dp": 2, "tp": 2})
    assert "it is for a mesh of 4, `mesh` asks for 2 x 2" in line


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"constraints": {"hidden.1.weight": "R"}}, "against `constraints.hidden.1.weight: R`, in hidden.1.weight"),
        ({"constraints": {"hidden.0.*": "S(0)", "hidden.2.*": "zero1"}}, "against `constraints.hidden.2.*: zero1`"),
        ({"only": Only.data}, "against `only: data`, in "),
        ({"shard_only": "hidden.0"}, "against `shard_only: hidden.0`, in "),
    ],
)
@pytest.mark.parametrize("use", PlanUse)
def test_a_plan_against_the_users_hand(root, asked, told, use):
    tensor = run(root, plan=None, constraints={"hidden.*.weight": "S(0)", "hidden.*.bias": "S(0)"}).points[0]
    save(root, plan_with(tensor.sharding))
    line = refused(root, plan_use=use, **asked)
    assert f"the saved plan goes {told}" in line and "yaml: plan: " in line


def test_a_strategy_that_is_not_known(root):
    sharding = plan_of("mlp").sharding
    name, strategy = next(iter(sharding.strategies.items()))
    changed = {**sharding.strategies, name: replace(strategy, name="x", body="no such body")}
    save(root, plan_with(replace(sharding, strategies=changed)))
    assert f"the saved plan has {name} run as 'x', which is not among" in refused(root)


# ------------------------------------------------------------------------------------------------ configuration


def write_settings(root: Path, text: str) -> None:
    path = root / "conf/solve/glpk.yaml"
    path.write_text(f"{path.read_text()}{text}\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("plan: main", "plan: there is no conf/plan/main.json; did you mean 'mine'? choose one of: mine, or save it"),
        ("plan: ../mine", "solve.plan: got '../mine', expected a name without folders or '.json'"),
        ("plan: 3", "expected the name of a saved plan, a file in conf/plan/, without its ending or null"),
        ("plan_use: as-is", "solve.plan_use: got 'as-is', expected one of start, as_is; did you mean 'as_is'?"),
    ],
)  # fmt: skip
def test_what_the_configuration_may_not_say(root, text, told):
    save(root, plan_of("mlp"))
    write_settings(root, text)
    with pytest.raises(ConfigError) as refusal:
        load_config(root)
    assert told in refusal.value.line() and "conf/solve/glpk.yaml:" in refusal.value.line()


def test_without_any_saved_plan_the_configuration_says_how_to_save_one(root):
    write_settings(root, "plan: mine")
    with pytest.raises(ConfigError, match=r"save it: `cp runs/checkpoint/plan.json conf/plan/mine.json`"):
        load_config(root)


def test_the_settings_are_read_and_dvc_watches_the_folder(root):
    save(root, plan_of("mlp"))
    write_settings(root, "plan: mine\nplan_use: as_is")
    settings = load_config(root).solve
    assert (settings.plan, settings.plan_use) == ("mine", PlanUse.as_is)
    assert "conf/plan" in yaml.safe_load((PROJECT / "dvc.yaml").read_text())["stages"]["solve"]["deps"]
