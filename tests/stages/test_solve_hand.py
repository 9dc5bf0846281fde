"""What the user asks of a plan, the kinds of plan that have names, and the searches beside the integer program."""

from __future__ import annotations

import math
from functools import partial

import pytest

from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.config import Only, Search
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.plan import Baseline, Sharding
from shardwright.pipeline.sharding.lowering import lower
from shardwright.stages.solve.answer.baselines import baselines
from shardwright.stages.solve.answer.frontier import FrontierSearch
from shardwright.stages.solve.on_mesh import NO_PROOF, price_point
from shardwright.stages.solve.problem.build import build, to_sharding
from shardwright.stages.solve.problem.constraints import UserConstraints
from shardwright.stages.solve.problem.families import Families, named
from shardwright.stages.solve.problem.storage import Way, storage_choices
from shardwright.stages.solve.search.elimination import Elimination
from shardwright.stages.solve.search.restricted import restrict
from tests.graphs import SILENT, gpt_graph, mesh, mlp_graph, preset, profile_of, solve_settings

WHERE = "conf/solve/test.yaml"


def silent(done, note=""):
    pass


def workload_of(name: str, cluster) -> Workload:
    return Workload({"gpt": gpt_graph, "mlp": mlp_graph}[name](), profile_of(name), cluster, 2.0)


def problem_of(name: str, cluster):
    workload = workload_of(name, cluster)
    return workload.graph, *build(workload)


def rows_of(name: str, cluster) -> dict[str, Baseline]:
    graph, problem, choices = problem_of(name, cluster)
    price = partial(price_point, workload_of(name, cluster), proof=NO_PROOF)
    return {row.name: row for row in baselines(graph, choices, problem, price)}


def fastest(name: str, cluster=None, **asked) -> Sharding:
    """The fastest plan of what the user's settings leave."""
    cluster = cluster or preset(2)
    graph, problem, choices = problem_of(name, cluster)
    hand = UserConstraints(graph, tuple(axis.name for axis in cluster.axes), solve_settings(**asked), WHERE)
    left = restrict(problem, hand.kept(choices))
    picked = left.expand(Elimination(left.problem).minimise().picked)
    assert math.isfinite(problem.cost(picked))
    return to_sharding(graph, choices, picked)


# ------------------------------------------------------------------------------------------------ constraints


def test_a_parameter_is_stored_as_it_was_asked():
    asked = {"head.weight": "S(0) on d0", "layers.*.up.weight": "R", "layers.1.down.weight": "zero3"}
    plan = fastest("gpt", constraints=asked)
    storage = {name: str(layout) for name, layout in plan.storage.items()}
    assert storage["head.weight"] == "S(0)" and storage["layers.0.up.weight"] == storage["layers.1.up.weight"] == "R"
    assert "layers.1.down.weight" in plan.regathered and storage["layers.1.down.weight"].startswith("S")


def test_a_module_is_not_split_on_an_axis():
    graph = gpt_graph()
    plan = fastest("gpt", constraints={"layers.0.attention": "R on d0"})
    inside = [op.name for op in graph.ops if op.module.startswith("layers.0.attention")]
    assert inside
    for name in inside:
        strategy = plan.strategies[name]
        assert all(state.kind != "S" for x in (*strategy.inputs, *strategy.outputs) for state in x.states)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_forbidden_axis_splits_nothing(axis):
    def used(sharding: Sharding, number: int) -> int:
        strategies = sharding.strategies.values()
        layouts = [x for s in strategies for x in (*s.inputs, *s.outputs)]
        layouts += [*sharding.storage.values(), *sharding.state.values(), *sharding.inputs.values()]
        return sum(layout.states[number].kind == "S" for layout in layouts)

    slow = mesh((2, 2), matmul_gflops=0.01)
    free, asked = fastest("gpt", slow), fastest("gpt", slow, constraints={"*": f"R on d{axis}"})
    assert used(free, 0) and used(free, 1)
    assert used(asked, axis) == 0 and used(asked, 1 - axis)


def test_one_module_alone_is_split():
    graph = gpt_graph()
    plan = fastest("gpt", shard_only="layers.1")
    for op in graph.ops:
        if not op.module.startswith("layers.1"):
            strategy = plan.strategies[op.name]
            assert all(state.kind != "S" for x in (*strategy.inputs, *strategy.outputs) for state in x.states)
    whole = [name for name in plan.storage if not name.startswith("layers.1.")]
    assert whole and all(str(plan.storage[name]) == "R" and name not in plan.state for name in whole)


@pytest.mark.parametrize("only", [Only.data, Only.zero, Only.tensor])
def test_only_one_way_of_working_in_parallel(only):
    plan = fastest("mlp", only=only)
    inputs = {str(layout) for layout in plan.inputs.values()}
    if only is Only.tensor:
        assert inputs == {"R"} and any(layout.states[0].kind == "S" for layout in plan.storage.values())
    else:
        assert inputs == {"S(0)"}
    if only is Only.data:
        assert {str(layout) for layout in plan.storage.values()} == {"R"} and not plan.state


def test_only_a_split_sequence():
    """Everything between the blocks is split along it, though a plan without is faster here."""
    graph, plan = gpt_graph(), fastest("gpt", only=Only.sequence)
    between = [op for op in graph.ops if op.target.split(".")[1] in ("layer_norm", "add")]
    assert len(between) == 10
    assert {str(plan.strategies[op.name].outputs[0]) for op in between} == {"S(1)"}
    taken = {str(step.source.layout) + str(step.target.layout) for step in lower(graph, plan).conversions()}
    assert {"PS(1)", "S(1)B"} <= taken and not {"PR", "PB"} & taken
    assert fastest("gpt", only=Only.tensor) != plan


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"constraints": {"hed.weight": "R"}}, "is called 'hed.weight'; did you mean 'head.weight'?"),
        ({"constraints": {"head.weight": "S(0) on tp"}}, "there is no axis 'tp'; the mesh has d0"),
        ({"constraints": {"head.weight": "split"}}, "cannot read 'split'; write for instance 'S(0) on tp'"),
        ({"constraints": {"head.weight": "P"}}, "P is no way to store anything"),
        ({"constraints": {"head.weight": "S(0)", "head.*": "R"}}, "and constraints.head.*: R leave no way to store"),
        ({"constraints": {"head.weight": "S(7)"}}, "constraints.head.weight: S(7) leaves no way to store head.weight"),
        ({"constraints": {"head.weight": "S(0)"}, "only": Only.data}, "only: data leave no way to store head.weight"),
        ({"shard_only": "encoder"}, "no parameter or module is called 'encoder'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(asked, said):
    with pytest.raises(SolveError) as refusal:
        fastest("gpt", **asked)
    assert said in refusal.value.line() and WHERE in refusal.value.line() and "\n" not in refusal.value.line()


@pytest.mark.parametrize(("name", "devices"), [("mlp", 2), ("gpt", 7)])
def test_a_sequence_that_is_not_there_or_does_not_divide(name, devices):
    with pytest.raises(SolveError, match=f"only: sequence: nothing .* split along the sequence in {devices} on d0"):
        fastest(name, preset(devices), only=Only.sequence)
    assert "tensor + sequence" not in rows_of(name, preset(devices))


# ------------------------------------------------------------------------------------------------ storage


def test_the_ways_to_store_a_parameter_fit_and_refine():
    graph, _, choices = problem_of("gpt", mesh((2, 2)))
    for value in graph.of_role(Role.PARAMETER):
        ways = choices.storage[value.name]
        assert len(set(ways)) == len(ways) and ways[0].way is Way.as_it_lies
        for way in ways:
            assert way.layout.fits(value.type.shape, (2, 2)) and way.state.fits(value.type.shape, (2, 2))
            assert way.state.shards((2, 2)) >= way.layout.shards((2, 2))
            assert (way.way is Way.zero1) == (way.state != way.layout)


def test_a_parameter_that_does_not_divide_is_whole():
    (way,) = storage_choices((7, 3), [], (2, 2), shards=True)
    assert str(way) == "R,R as it lies"


# ------------------------------------------------------------------------------------------------ baselines


def test_baselines_stand_beside_the_fastest_plan():
    cluster = mesh((2, 2))
    _, problem, _ = problem_of("gpt", cluster)
    rows = rows_of("gpt", cluster)
    best = problem.cost(Elimination(problem).minimise().picked)
    assert {"DDP", "ZeRO-1", "ZeRO-3", "tensor", "tensor + sequence", "DDP x tensor", "ZeRO-1 x sequence"} <= set(rows)
    assert all(row.seconds >= best - 1e-15 for row in rows.values())
    assert rows["ZeRO-3"].peak_bytes < rows["ZeRO-1"].peak_bytes < rows["DDP"].peak_bytes


def of_family(name: str) -> tuple[OpGraph, Sharding]:
    """The fastest plan of one of the kinds that have names, on one axis."""
    graph, problem, choices = problem_of("gpt", preset(2))
    left = restrict(problem, Families(graph, choices).kept(named(1)[name]))
    return graph, to_sharding(graph, choices, left.expand(Elimination(left.problem).minimise().picked))


def test_data_parallelism_does_not_split_what_has_no_batch():
    """A table of positions is read whole: its dim 0 is not the batch's, and its gradient is summed with the others."""
    graph, plan = of_family("DDP")
    (table,) = (op for op in graph.ops if op.module == "position")
    assert str(plan.strategies[table.name].outputs[0]) == "B"
    moved = [step for step in lower(graph, plan).conversions() if step.source.value != graph.output]
    assert not moved


def test_tensor_parallelism_splits_the_vocabulary():
    """Megatron's: the head's logits stay split, and the loss is that of split classes."""
    graph, plan = of_family("tensor")
    (loss,) = (op for op in graph.ops if op.outputs[0] == graph.output)
    assert str(plan.storage["head.weight"]) == "S(0)"
    assert str(plan.strategies[loss.name].inputs[0]) == "S(1)" and plan.strategies[loss.name].body
    logits = graph.values[loss.inputs[0]].name
    assert logits not in {step.source.value for step in lower(graph, plan).conversions()}


def test_one_device_has_no_baselines():
    assert rows_of("mlp", preset(1)) == {}


# ------------------------------------------------------------------------------------------------ searches


def test_the_searches_agree_within_their_gaps():
    _, problem, _ = problem_of("mlp", preset(2))
    bounder = FrontierSearch(problem, solve_settings(), WHERE, SILENT).bounder
    smallest, largest = bounder.smallest(math.inf).peak, bounder.fastest.peak
    limit = (smallest + largest) / 2
    settings = [solve_settings(search=search, time_limit_s=600.0) for search in Search]  # kernels are compiled
    found = {own.search: FrontierSearch(problem, own, WHERE, SILENT).within(limit) for own in settings}
    exact = found[Search.ilp]
    assert exact.proof.gap < 1e-6
    for search, solution in found.items():
        assert solution.peak <= limit and solution.proof.bound <= exact.cost * (1 + 1e-9), search
        assert exact.cost * (1 - 1e-9) <= solution.cost <= 1.5 * exact.cost, search
