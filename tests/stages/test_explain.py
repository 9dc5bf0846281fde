"""Explanations: items add up to the price, options cost what re-pricing says, reasons are the right ones."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import Artifact
from shardwright.pipeline.config import Checkpoint, Recompute, Solve, load_config
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.codec import encode
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.plan import Frontier, Plan, Sharding
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.sharding.lowering import with_paths
from shardwright.stages.checkpoint.choose import choose, evaluate
from shardwright.stages.command_line import main
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.solve.explain import run as explain_command
from shardwright.stages.solve.explain.diff import CostChange, explain_diff
from shardwright.stages.solve.explain.one import Subject, SubjectKind, explain_one, find_subject
from shardwright.stages.solve.explain.options import Options, OptionVerdict
from shardwright.stages.solve.explain.priced_run import ExplainError, ItemKind, PlannedRun, planned
from shardwright.stages.solve.explain.run import text_of
from shardwright.stages.solve.explain.whole import explain_module, explain_whole
from shardwright.stages.solve.search.elimination import Elimination
from shardwright.stages.solve.search.restricted import restrict
from tests.graphs import GRAPHS, SILENT, frontier_of, plan_of, preset, profile_of, solve_settings, trace
from tests.pipeline_plans import plan_with_pipelines, with_submeshes

PROJECT = Path(__file__).parents[2]
WHERE = "conf/solve/test.yaml"


def made(
    graph: OpGraph, profile: Profile, cluster: Cluster, frontier: Frontier, plan: Plan, **config: str
) -> dict[str, Artifact]:
    """As the stages write them: each knows those above it."""
    found: dict[str, Artifact] = {}
    bodies = {"graph": graph, "profile": profile, "cluster": cluster, "frontier": frontier, "plan": plan}
    above = {"graph": (), "cluster": (), "profile": ("graph",), "frontier": ("graph", "profile", "cluster")}
    for kind in ("graph", "profile", "cluster", "frontier", "plan"):
        parents = above.get(kind, tuple(found))
        found[kind] = artifacts.make(kind, bodies[kind], [found[parent] for parent in parents], config)
    return found


def run_of(
    name: str, devices: int = 2, point: int = 0, budget: int | None = None, recompute: str = "optimal", **config: str
) -> dict[str, Artifact]:
    plan = plan_of(name, devices, budget, recompute, slice(point, point + 1))
    frontier = replace(frontier_of(name, devices), budget_bytes=plan.budget_bytes)
    return made(GRAPHS[name](), profile_of(name), preset(devices), frontier, plan, **config)


def planned_of(name: str, **how) -> PlannedRun:
    return planned(run_of(name, **how))


def options_of(plan: PlannedRun, part: int = 0, solve: Solve | None = None, recompute: str = "optimal") -> Options:
    settings = Checkpoint(recompute=Recompute(recompute))
    return Options(plan, plan.parts[part], solve or solve_settings(), settings, evaluate, WHERE, SILENT)


def with_sharding(plan: PlannedRun, sharding: Sharding) -> PlannedRun:
    """The same run with another plan, predicted as the checkpoint stage would."""
    point = replace(plan.frontier.points[0], sharding=with_paths(plan.graph, sharding, plan.parts[0].cluster))
    frontier = replace(plan.frontier, points=(point,))
    found = evaluate(plan.graph, plan.profile, plan.cluster, frontier, 0, Checkpoint())
    other = choose([found], plan.cluster, frontier, WHERE)
    return planned(made(plan.graph, plan.profile, plan.cluster, frontier, other))


def repriced(plan: PlannedRun, sharding: Sharding) -> float:
    part = plan.parts[0]
    sharding = with_paths(plan.graph, replace(sharding, paths={}), part.cluster)
    return part.with_sharding(sharding).step.seconds


# -------------------------------------------------------------------------------------------------------- the items


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["gpt_tied", "ladder", "mlp"]), st.integers(0, 5), st.sampled_from([1, 3]))
def test_items_add_up_to_the_price_of_the_step(name, point, micro_batches):
    frontier = frontier_of(name)
    sharding = frontier.points[point % len(frontier.points)].sharding
    plan = replace(plan_of(name), micro_batches=micro_batches)
    only = replace(plan.partitions[0], sharding=sharding)
    run = made(GRAPHS[name](), profile_of(name), preset(), frontier, replace(plan, partitions=(only,)))
    (part,) = planned(run).parts
    items = part.items()
    assert sum(item.seconds for item in items) == pytest.approx(part.step.seconds, rel=1e-12)
    ops = [item.name for item in items if item.kind is ItemKind.op]
    assert sorted(ops) == sorted(op.name for op in part.graph.ops)


def test_a_conversion_belongs_to_the_op_that_reads_it():
    plan = planned_of("gpt", point=2)
    conversions = [item for item in plan.parts[0].items() if item.kind is ItemKind.conversion]
    assert conversions
    for item in conversions:
        assert not item.op or item.value in plan.graph.op(item.op).inputs


# ------------------------------------------------------------------------------------------------------ the options


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_changed_strategy_costs_what_re_pricing_says(name):
    plan = planned_of(name)
    assert not plan.plan.sharding.regathered
    options, now = options_of(plan), repriced(plan, plan.plan.sharding)
    assert options.now.seconds == pytest.approx(plan.plan.prediction.step_seconds, rel=1e-12)
    for op in [op.name for op in plan.graph.ops if "linear" in op.name or "norm" in op.name][:2]:
        by_words = {options._words(op, k): s for k, s in enumerate(options.choices.ops[op])}
        found, more = options.of(op, 1000)
        assert more == 0 and len(found) == len(by_words)
        for option in found:
            strategies = {**plan.plan.sharding.strategies, op: by_words[option.choice]}
            changed = replace(plan.plan.sharding, strategies=strategies)
            if option.seconds is not None:
                assert option.seconds == pytest.approx(repriced(plan, changed) - now, abs=1e-15)


def test_another_storage_costs_what_re_pricing_says():
    plan = planned_of("mlp")
    options, sharding = options_of(plan), plan.plan.sharding
    now = repriced(plan, sharding)
    checked = 0
    for value in plan.graph.of_role(Role.PARAMETER):
        ways = {str(way): way for way in options.choices.storage[value.name]}
        for option in options.of(value.name, 1000)[0]:
            way = ways[option.choice]
            if option.seconds is None or way.way.value == "regathered":
                continue
            state = {k: v for k, v in sharding.state.items() if k != value.origin}
            state |= {value.origin: way.state} if way.state != way.layout else {}
            changed = replace(sharding, storage={**sharding.storage, value.origin: way.layout}, state=state)
            assert option.seconds == pytest.approx(repriced(plan, changed) - now, abs=1e-15)
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_the_chosen_is_the_best_of_what_fits(name):
    plan = planned_of(name)
    options = options_of(plan)
    for node in [*list(options.choices.storage)[:2], *list(options.choices.ops)[2:5], *options.choices.inputs]:
        found, _ = options.of(node, 6)
        assert found[0].verdict is OptionVerdict.chosen and found[0].seconds == 0
        assert all(option.verdict is not OptionVerdict.faster for option in found)
        known = [option.seconds for option in found if option.seconds is not None]
        assert known == sorted(known)


def test_the_budget_rules_out_what_the_checkpoint_stage_refuses():
    budget = plan_of("mlp", points=slice(-1, None), recompute="off").prediction.peak_bytes
    last = len(frontier_of("mlp").points) - 1
    plan = planned_of("mlp", point=last, budget=budget, recompute="off")
    options = options_of(plan, recompute="off")
    over = 0
    for value in plan.graph.of_role(Role.PARAMETER):
        for option in options.of(value.name, 100)[0]:
            if option.peak_bytes is None:
                continue
            assert (option.verdict is OptionVerdict.over_budget) == (option.peak_bytes > 0)
            if option.verdict is OptionVerdict.over_budget:
                over += 1
                assert option.seconds is None
                assert f"by {option.peak_bytes / 1e9:.4g} GB" in option.why and "optimizer state" in option.why
                assert " link " in option.why or "what the optimizer takes" in option.why
    assert over


def test_a_setting_rules_out():
    plan = planned_of("mlp")
    name = next(value for value in plan.graph.of_role(Role.PARAMETER) if len(value.type.shape) == 2)
    stored = plan.plan.sharding.storage[name.origin]
    solve = solve_settings(constraints={name.origin: str(stored)})
    if plan.plan.sharding.state.get(name.origin, stored) != stored:
        solve = solve_settings(constraints={name.origin: "zero1"})
    found, _ = options_of(plan, solve=solve).of(name.name, 100)
    others = [option for option in found[1:] if option.verdict is not OptionVerdict.neighbours]
    assert others and {option.verdict for option in others} == {OptionVerdict.setting}
    assert all(f"constraints.{name.origin}" in option.why for option in others)


def test_solved_again_is_the_optimum_with_that_choice():
    plan = planned_of("mlp")
    options = options_of(plan)
    value = next(value for value in plan.graph.of_role(Role.PARAMETER) if len(value.type.shape) == 2)
    node = options.choices.index[value.name]
    ways = [str(way) for way in options.choices.storage[value.name]]
    now = options.problem.cost(options.picked)
    solved = 0
    for option in options.of(value.name, 100, again=10.0)[0][1:]:
        kept = [tuple(range(len(own.costs))) for own in options.problem.nodes]
        kept[node] = (ways.index(option.choice),)
        best = Elimination(restrict(options.problem, tuple(kept)).problem).minimise().value
        if math.isfinite(best):
            assert option.solved_seconds == pytest.approx(best - now, abs=1e-6 * now)
            assert option.seconds is None or option.solved_seconds <= option.seconds
            solved += 1
    assert solved > 1


# ------------------------------------------------------------------------------------------- what is not offered


class Odd(nn.Module):
    """Sizes that 2 does not divide, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(7, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)).square().mean()


@pytest.fixture(scope="module")
def odd() -> PlannedRun:
    graph = trace(Odd(), {"x": torch.randn(4, 7)})
    profile, cluster = profile_graph(graph), preset(2)
    from shardwright.stages.solve.answer.frontier import FrontierSearch
    from shardwright.stages.solve.on_mesh import price_point
    from shardwright.stages.solve.problem.build import build, to_sharding

    problem, choices = build(Workload(graph, profile, cluster, 2.0))
    best = FrontierSearch(problem, solve_settings(), WHERE, SILENT).frontier(math.inf, lambda done, note="": None)[0]
    sharding = to_sharding(graph, choices, best.picked)
    point = price_point(Workload(graph, profile, cluster, 2.0), sharding, best.proof)
    frontier = replace(frontier_of("mlp"), points=(point,))
    plan = choose([evaluate(graph, profile, cluster, frontier, 0, Checkpoint())], cluster, frontier, WHERE)
    return planned(made(graph, profile, cluster, frontier, plan))


def test_what_does_not_divide_and_what_no_rule_offers(odd):
    options = options_of(odd)
    weight = explain_one(odd, options, find_subject(odd.graph, "first.weight"), 10, None)
    assert [(n.dim, n.why) for n in weight.never] == [(1, "7 does not divide by 2")]
    norm = next(op.name for op in odd.graph.ops if "layer_norm" in op.target)
    told = explain_one(odd, options, Subject(SubjectKind.op, norm), 10, None)
    written = [n for n in told.never if n.tensor == norm]
    assert [n.dim for n in written] == [1] and written[0].why.startswith("not offered by its rule `")


# -------------------------------------------------------------------------------------------------------- names


def test_names_and_what_they_mean():
    graph = GRAPHS["gpt"]()
    assert find_subject(graph, "layers.0.up.weight").what is SubjectKind.parameter
    assert find_subject(graph, "p_model_layers_0_up_weight").what is SubjectKind.parameter
    assert find_subject(graph, "input_ids") == Subject(SubjectKind.input, "input_ids")
    assert find_subject(graph, "linear_4") == find_subject(graph, "op:linear_4") == Subject(SubjectKind.op, "linear_4")
    assert find_subject(graph, "layers.0.attention").what is SubjectKind.module
    assert find_subject(graph, "layers.*.up").what is SubjectKind.module


def test_a_name_that_is_both_is_the_module():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sum()

    graph = trace(Both(), {"x": torch.randn(4, 4)})
    assert find_subject(graph, "linear").what is SubjectKind.module
    assert find_subject(graph, "op:linear") == Subject(SubjectKind.op, "linear")


@pytest.mark.parametrize(("name", "near"), [("layers.0.up.wieght", "layers.0.up.weight"), ("lineer_4", "linear_4")])
def test_a_name_that_is_not_known(name, near):
    with pytest.raises(ExplainError) as refused:
        find_subject(GRAPHS["gpt"](), name)
    assert near in refused.value.line() and name in refused.value.line()


# --------------------------------------------------------------------------------------------------- plan and modules


def test_the_plan_in_words():
    plan = planned_of("gpt", budget=100_000)
    whole = explain_whole(plan)
    predicted = plan.plan.prediction
    assert sum(cost.seconds for cost in whole.parts) == pytest.approx(predicted.step_seconds)
    assert sum(held.nbytes for held in whole.memory) == predicted.peak_bytes == whole.peak_bytes
    once = predicted.step_seconds - predicted.recompute_seconds
    assert whole.priced_seconds == pytest.approx(once)
    assert sum(cost.count for cost in whole.ops) == len(plan.graph.ops)
    assert sum(cost.count for cost in whole.parameters) == len(plan.plan.sharding.storage)


def test_modules_and_patterns_add_up():
    plan = planned_of("gpt")
    layers = [explain_module(plan, f"layers.{number}") for number in (0, 1)]
    both = explain_module(plan, "layers.*")
    assert both.seconds == pytest.approx(sum(layer.seconds for layer in layers))
    assert sum(row.count for row in both.rows) == sum(len(layer.rows) for layer in layers)
    assert any(one.name == "layers.*.up.weight" and one.count == 2 for one in both.parameters)
    assert len(layers[0].parameters) == 16


# ------------------------------------------------------------------------------------------------------ two plans


def test_two_plans_and_what_accounts_for_the_time():
    before = planned_of("gpt")
    sharding = before.plan.sharding
    up = [name for name in sharding.storage if name.endswith("up.weight")]
    layout = Layout.parse("R")
    other = Layout.parse("S(0)") if sharding.storage[up[0]] == layout else layout
    storage = {**sharding.storage, **dict.fromkeys(up, other)}
    state = {name: own for name, own in sharding.state.items() if name not in up}
    after = with_sharding(before, replace(sharding, storage=storage, state=state, paths={}))
    diff = explain_diff(before, after, ("a", "b"))
    assert [(one.name, one.count) for one in diff.parameters] == [("layers.*.up.weight", 2)]
    assert not diff.ops and not diff.inputs and not diff.settings and not diff.plan
    step = diff.seconds[0]
    assert step.difference and sum(one.difference for one in diff.causes) == pytest.approx(step.difference)
    assert all("up.weight" in one.name for one in diff.causes)
    back = explain_diff(after, before, ("b", "a"))
    assert [(one.before, one.after) for one in back.parameters] == [(o.after, o.before) for o in diff.parameters]


def test_recompute_accounts_for_its_time():
    before, after = planned_of("gpt"), planned_of("gpt", budget=100_000)
    diff = explain_diff(before, after, ("a", "b"))
    assert {one.name for one in diff.plan} == {"recompute", "budget"}
    assert [one.name for one in diff.causes] == ["recompute"]
    assert diff.causes[0].difference == pytest.approx(diff.seconds[0].difference)


def test_a_plan_and_itself():
    plan = planned_of("mlp")
    assert text_of(explain_diff(plan, plan, ("a", "b"))).endswith("nothing changed")


def test_sums_of_another_order_are_no_difference():
    assert CostChange("compute", 0.1 + 0.2, 0.3).difference == 0 < CostChange("compute", 0.3, 0.3000001).difference


# ------------------------------------------------------------------------------------------------------ a pipeline


@pytest.fixture(scope="module")
def piped() -> PlannedRun:
    cluster, frontier = with_submeshes("gpt")
    plan = plan_with_pipelines("gpt", pipeline="1f1b")
    assert plan.pipelined
    return planned(made(GRAPHS["gpt"](), profile_of("gpt"), cluster, frontier, plan))


def test_every_partition_is_priced_by_itself(piped):
    assert len(piped.parts) == len(piped.plan.partitions)
    for part in piped.parts:
        assert sum(i.seconds for i in part.items()) == pytest.approx(part.step.seconds)
    whole = explain_whole(piped)
    assert whole.partition == piped.busiest().number and "1f1b" in dict(whole.plan)["pipeline"]


def test_options_of_a_partition_are_priced_within_it(piped):
    part = piped.parts[-1]
    options = options_of(piped, part.number)
    op = next(op.name for op in part.graph.ops if op.target == "aten.linear.default")
    now = part.step.seconds
    by_words = {options._words(op, k): s for k, s in enumerate(options.choices.ops[op])}
    found = [option for option in options.of(op, 100)[0] if option.seconds is not None]
    assert len(found) > 2
    for option in found:
        changed = replace(part.sharding, strategies={**part.sharding.strategies, op: by_words[option.choice]}, paths={})
        changed = with_paths(part.graph, changed, part.cluster)
        assert option.seconds == pytest.approx(part.with_sharding(changed).step.seconds - now, abs=1e-15)


# -------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A project whose plan is made."""
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    (tmp_path / "pipeline" / "models").mkdir(parents=True)
    for artifact in run_of("gpt").values():
        artifacts.save(artifact, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "asked",
    [[], ["layers.0"], ["layers.*"], ["layers.0.up.weight"], ["linear_4", "--solve"], ["input_ids"], ["op:add"]],
)
def test_explanations_are_text_and_json(root, capsys, asked):
    assert main(["explain", *asked]) == 0
    text = capsys.readouterr().out
    assert text.strip() and max(map(len, text.splitlines())) <= 100
    assert main(["explain", "--json", *asked]) == 0
    assert json.loads(capsys.readouterr().out)


def test_two_folders_are_compared(root, capsys):
    (root / "kept").mkdir()
    shutil.move(root / "runs", root / "kept" / "a")
    for artifact in run_of("gpt", budget=100_000).values():
        artifacts.save(artifact, root)
    assert main(["explain", "--diff", "kept/a", "."]) == 0
    text = capsys.readouterr().out
    assert "recompute: nothing -> " in text and max(map(len, text.splitlines())) <= 100


def test_settings_are_told_by_value_while_their_files_are_there(tmp_path, monkeypatch, capsys):
    for name, text in (("a", "gap: 1e-3"), ("b", "gap: 1e-6")):
        shutil.copytree(PROJECT / "conf", tmp_path / name / "conf")
        file = tmp_path / name / "conf" / "solve" / "glpk.yaml"
        assert "gap: 1e-3" in file.read_text()
        file.write_text(file.read_text().replace("gap: 1e-3", text))
        for artifact in run_of("mlp", solve=load_config(tmp_path / name).digest("solve")).values():
            artifacts.save(artifact, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "--diff", "a", "b"]) == 0
    assert "solve.gap: 0.001 -> 1e-06" in capsys.readouterr().out
    file.write_text(file.read_text().replace("gap: 1e-6", "gap: 1e-2"))
    assert main(["explain", "--diff", "a", "b"]) == 0
    text = capsys.readouterr().out
    assert "solve.gap" not in text and "\n  solve: " in text


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["layers.0.upp.weight"], "did you mean layers.0.up.weight"),
        (["--diff", "runs", "nowhere"], "nowhere: there is no such folder"),
        (["--diff", "runs", "conf"], "there is no such file"),
    ],
)
def test_mistakes_are_one_line(root, capsys, asked, told):
    assert main(["explain", "-q", *asked]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and told in captured.err and captured.err.count("\n") == 1


def test_nothing_to_explain_says_what_to_run(root, capsys):
    (root / "runs" / "checkpoint" / "plan.json").unlink()
    for asked in ([], ["--diff", ".", "runs"]):
        assert main(["explain", *asked]) == 2
        assert "runs/checkpoint/plan.json: there is no such file; run `dvc repro checkpoint`" in capsys.readouterr().err


def test_the_run_of_a_revision_of_another_version_is_told(root, capsys, monkeypatch):
    def lay_out(root: Path, revision: str, files: list[str], folder: Path) -> None:
        shutil.copytree(root / "runs", folder / "runs")
        graph = folder / "runs/trace/graph.json"
        graph.write_text(re.sub(r'"version": \d+', '"version": 0', graph.read_text(), count=1))

    monkeypatch.setattr(explain_command, "lay_out", lay_out)
    assert main(["explain", "--diff", "v0", "."]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: v0: its run is of another version: graph.json: ") and error.count("\n") == 1


def test_facts_are_plain():
    plan = planned_of("mlp")
    assert json.dumps(encode(explain_whole(plan)), allow_nan=False)
