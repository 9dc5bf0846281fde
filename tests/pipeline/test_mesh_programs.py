"""Programs on a mesh: a conversion is the steps of its cheapest path, in what is printed and in what is priced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.codec import decode, encode
from shardwright.pipeline.ir.graph import Args, Link, Op, OpGraph, Ref, Role, Value
from shardwright.pipeline.ir.layout import Layout, R
from shardwright.pipeline.ir.plan import Prediction, Region, Sharding
from shardwright.pipeline.ir.program import Call, Convert, Step, Tensor
from shardwright.pipeline.sharding.conversions import gathered_share, gathered_together
from shardwright.pipeline.sharding.lowering import lower, with_paths
from shardwright.pipeline.sharding.paths import Paths
from shardwright.stages.codegen.module import write_module
from tests.graphs import gpt_graph, graph_strategies, mlp_graph, preset, profile_of
from tests.meshes import mesh
from tests.one_op import example, t
from tests.unpipelined import whole_plan

SIZES = (2, 2)
CLUSTER = replace(preset(), axes=mesh(*SIZES))


@cache
def options() -> dict:
    return graph_strategies(mlp_graph(), SIZES)


def sharded(storage: str = "R,R", inputs: str = "R,R") -> Sharding:
    """The MLP replicated, with another storage for its first matrix, or other inputs."""
    graph = mlp_graph()
    chosen = {name: next(s for s in found if s.name == "R,R") for name, found in options().items()}

    first = first_linear()[1]
    stored = {v.origin: Layout.parse(storage if v.name == first else "R,R") for v in graph.of_role(Role.PARAMETER)}
    given = {v.name: Layout.parse(inputs if len(v.type.shape) == 2 else "R,R") for v in graph.of_role(Role.INPUT)}
    return with_paths(graph, Sharding(chosen, stored, given), CLUSTER)


def write(sharding: Sharding) -> str:
    graph = mlp_graph()
    links = tuple(Region(i, i, False, ()) for i in range(len(graph.chain)))
    plan = whole_plan((("rows", 2), ("columns", 2)), "cpu", 0, sharding, links, Prediction(*[0] * 7))
    return write_module(graph, plan)


def calls(steps: tuple[Step, ...]) -> list[Call]:
    return [step for step in steps if isinstance(step, Call)]


def first_linear() -> tuple[str, str]:
    """An op and the weight it reads."""
    op = mlp_graph().ops[0]
    return op.name, op.inputs[1]


def test_a_conversion_is_printed_step_by_step() -> None:
    text = write(sharded("S(0),S(1)"))
    lines = [line.strip() for line in text.splitlines() if 'p["weight"]' in line or "weight_" in line]
    assert lines[:2] == [
        'weight_r_s1 = gather(p["weight"], axis="rows", dim=0)  # S(0),S(1) -> R,S(1) [32, 6]',
        'weight_r_r = gather(weight_r_s1, axis="columns", dim=1)  # R,S(1) -> R,R [32, 12]',
    ]
    assert "weight_r_r" in lines[2]


def test_the_outer_of_two_axes_leaves_a_factor_to_the_inner() -> None:
    text = write(sharded("S(0),S(0)"))
    assert 'weight_r_s0x2 = gather(p["weight"], axis="rows", dim=0)  # S(0),S(0) -> R,S(0:2) [16, 12]' in text
    assert 'weight_r_r = gather(weight_r_s0x2, axis="columns", dim=0, parts=2)  # R,S(0:2) -> R,R [32, 12]' in text
    swapped = write(sharded("S(0)',S(0)"))
    assert """weight_r_s0 = gather(p["weight"], axis="rows", dim=0)  # S(0)',S(0) -> R,S(0) [16, 12]""" in swapped


def test_factors_are_told_to_the_runtime() -> None:
    text = write(sharded("S(0:4),R"))
    assert 'weight_r_r = gather(p["weight"], axis="rows", dim=0, parts=4)  # S(0:4),R -> R,R [32, 12]' in text


def test_every_conversion_is_one_step_and_its_price_the_path_s() -> None:
    graph, sharding = mlp_graph(), sharded("S(0),S(1)", "S(0),S(1)")
    priced = Workload(graph, profile_of("mlp"), CLUSTER, 2.0).priced(sharding)
    program, home = priced.program, priced.sharded.home
    name, weight = first_linear()
    paths = Paths(CLUSTER.axes, CLUSTER.compute, gathered_share(graph, weight))
    (index,) = (i for i, link in enumerate(graph.chain) if name in link.ops)
    steps = [s for s in program.links[index] if isinstance(s, Convert) and s.source.value == weight]
    value = graph.values[weight]
    whole = paths.cheapest(home[weight], Layout((R, R)), value.type.shape, value.type.nbytes, True)
    assert [(s.source.layout, s.target.layout) for s in steps] == list(pairwise(whole.layouts)) and len(steps) == 2
    assert sum(priced.conversion(s).total for s in steps) == pytest.approx(whole.seconds.total)
    price, moved = priced.step, sum(priced.conversion(s).total for s in program.conversions())
    assert sum(link.communication.total for link in price.links) + price.outside.total == pytest.approx(moved)


def test_what_is_passed_on_the_way_is_not_made_again() -> None:
    """Two ops read one tensor, one in a layout that lies on the other's way."""
    graph = two_readers()
    home, between, far = (Layout.parse(text) for text in ("S(0),S(1)", "R,S(1)", "R,R"))
    found = graph_strategies(graph, SIZES)
    first = next(s for s in found["far"] if s.inputs[0] == far)
    second = next(s for s in found["near"] if s.inputs[0] == between)
    add = next(s for s in found["add"] if s.name == "R,R")
    chosen = {"far": first, "near": second, "add": add}
    sharding = with_paths(graph, Sharding(chosen, {}, {"x": home}), CLUSTER)
    steps = [(s.source, s.target) for s in lower(graph, sharding).conversions() if s.source.value == "x"]
    assert steps == [(Tensor("x", home), Tensor("x", between)), (Tensor("x", between), Tensor("x", far))]


def two_readers() -> OpGraph:
    """add(gelu(x), tanh(x)) as a chain of one link."""
    one = example("aten.gelu.default", t(8, 8))
    kind = one.graph.values["it"].type
    values = {"x": Value("x", kind, Role.INPUT, "x", True)}
    values |= {name: Value(name, kind, Role.RESULT, name, True) for name in ("far", "near", "add")}
    ops = (
        Op("far", "aten.gelu.default", Args((Ref("x"),)), ("far",), "", ""),
        Op("near", "aten.tanh.default", Args((Ref("x"),)), ("near",), "", ""),
        Op("add", "aten.add.Tensor", Args((Ref("far"), Ref("near"))), ("add",), "", ""),
    )
    return OpGraph(values, ops, "add", (), (Link(("far", "near", "add"), None, "add", 0),))


def test_a_conversion_without_its_path_is_refused() -> None:
    sharding = replace(sharded("S(0),S(1)"), paths={})
    with pytest.raises(ValueError, match="not one step"):
        write(sharding)


def test_one_axis_needs_no_paths() -> None:
    graph = mlp_graph()
    plain = graph_strategies(graph, (2,))
    stored = {v.origin: Layout.parse("S(0)") for v in graph.of_role(Role.PARAMETER)}
    given = {v.name: Layout((R,)) for v in graph.of_role(Role.INPUT)}
    sharding = Sharding({name: found[0] for name, found in plain.items()}, stored, given)
    assert with_paths(graph, sharding, preset()) == sharding


@pytest.mark.parametrize("again", [False, True])
def test_parameters_that_come_to_one_axis_by_different_ways_are_one_collective(again: bool) -> None:
    """The matrix over rows and then over columns, on which the bias lies: three gathers, by two collectives.

    Where they are made again the bias, as it is stored, is gathered ahead of time, and so apart from the matrix.
    """
    graph, sharding = mlp_graph(), sharded("S(0),S(1)")
    _, weight, bias = graph.ops[0].inputs
    origin = graph.values[bias].origin
    sharding = replace(sharding, storage={**sharding.storage, origin: Layout.parse("R,S(0)")})
    both = (graph.values[weight].origin, origin)
    sharding = with_paths(graph, replace(sharding, regathered=both if again else ()), CLUSTER)
    (steps,) = (steps for steps in lower(graph, sharding).links if any(s.op == graph.ops[0].name for s in calls(steps)))
    first = [step for step in steps if isinstance(step, Convert)]
    assert tuple(first) == steps[: len(first)] and len(first) == 3
    assert gathered_together(graph, steps, SIZES) == ([] if again else [tuple(first[1:])])
    joined = """    bias_r_r, weight_r_r = all_gather_together(
        (p["bias"], 0, "R"),  # R,S(0) -> R,R [32]
        (weight_r_s1, 1, "R"),  # R,S(1) -> R,R [32, 12]
        axis="columns",
    )
"""
    assert (joined in write(sharding)) is not again


def test_paths_are_part_of_the_artifact() -> None:
    sharding = sharded("S(0),S(1)")
    assert sharding.paths
    assert decode(Sharding, encode(sharding)) == sharding


def test_a_gradient_is_summed_once_whatever_else_reads_the_parameter() -> None:
    """Tied: an op that reads the weight whole masks its gradient, one that takes a shard pads it; nothing is moved."""
    graph, sizes = gpt_graph(tie=True), (2,)
    found = graph_strategies(graph, sizes)
    chosen = {name: next(s for s in options if s.name == "R") for name, options in found.items()}
    (table,) = (v.name for v in graph.of_role(Role.PARAMETER) if v.origin == "token.weight")
    (lookup, head) = (op for op in graph.ops if table in op.inputs)
    stored = {v.origin: Layout((R,)) for v in graph.of_role(Role.PARAMETER)}
    given = {v.name: Layout((R,)) for v in graph.of_role(Role.INPUT)}
    summed = next(s for s in found[head.name] if str(s.inputs[1]) == "B" and str(s.inputs[0]) == "S(0)")
    for other, step in (("R", "B -> R"), ("S(0)", "B -> S(0)")):
        reading = next(s for s in found[lookup.name] if str(s.inputs[0]) == other)
        sharding = Sharding({**chosen, head.name: summed, lookup.name: reading}, stored, given)
        program = lower(graph, sharding)
        assert program.reduced == {table: (0,)}
        ways = [f"{s.source.layout} -> {s.target.layout}" for s in program.conversions() if s.source.value == table]
        assert ways == [step]
