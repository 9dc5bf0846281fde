"""Frozen dataclasses to JSON and back, whatever they hold; what does not fit the type is refused with its place."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.pipeline.ir.cluster import (
    COLLECTIVES,
    Axis,
    Cluster,
    Compute,
    Curve,
    Group,
    Host,
    LinkCost,
    Measured,
    Mesh,
    Overlap,
    Split,
)
from shardwright.pipeline.ir.codec import CodecError, decode, encode
from shardwright.pipeline.ir.graph import ITEM_SIZE, Args, Link, Op, OpGraph, Ref, Role, TensorType, Torch, Value
from shardwright.pipeline.ir.layout import Layout, S, State
from shardwright.pipeline.ir.names import look_up, pattern
from shardwright.pipeline.ir.plan import (
    Alternative,
    Baseline,
    Event,
    Frontier,
    FrontierPoint,
    Partition,
    Plan,
    Prediction,
    Proof,
    Region,
    Sharding,
    Strategy,
    Timeline,
    Total,
)
from shardwright.pipeline.ir.profile import Kernel, Kernels, LinkKernels, OpCost, Profile, Share, Step
from shardwright.pipeline.ir.report import Report

FEW = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

names = st.text(min_size=1, max_size=8)
seconds = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**70)
sizes = st.integers(0, 2**40)
layouts = st.lists(st.one_of(st.sampled_from("RBP").map(State), st.integers(0, 7).map(S)), min_size=1, max_size=3).map(
    lambda states: Layout(tuple(states))
)


def tuples(items, **limits):
    return st.lists(items, max_size=2, **limits).map(tuple)


def tables(values):
    return st.dictionaries(names, values, max_size=2)


arguments = st.recursive(
    st.one_of(
        st.none(), st.booleans(), counts, st.floats(allow_nan=False), st.text(max_size=6), names.map(Ref),
        st.sampled_from([Torch("dtype", "float32"), Torch("device", "any"), Torch("layout", "strided")]),
    ),
    lambda inner: tuples(inner),
    max_leaves=5,
)  # fmt: skip
words = st.sampled_from(["dim", "keepdim", "dtype", "x_1"])
named = st.dictionaries(words, arguments, max_size=4).map(lambda found: tuple(found.items()))
args = st.builds(Args, tuples(arguments), named)
types = st.builds(TensorType, tuples(sizes), st.sampled_from(sorted(ITEM_SIZE)))
values = st.builds(Value, names, types, st.sampled_from(Role), names, st.booleans())
ops = st.builds(Op, names, names, args, tuples(names), names, names)
links = st.builds(Link, tuples(names), st.none() | names, names, counts)
graphs = st.builds(
    OpGraph,
    st.lists(values, max_size=4, unique_by=lambda v: v.name).map(lambda found: {v.name: v for v in found}),
    tuples(ops), names, tuples(names), tuples(links),
)  # fmt: skip
strategies = st.builds(Strategy, names, tuples(layouts), tuples(layouts), st.text(max_size=4))
shardings = st.builds(Sharding, tables(strategies), tables(layouts), tables(layouts))
proofs = st.builds(Proof, names, names, seconds, seconds, seconds, counts, counts, counts)
plan_points = st.builds(FrontierPoint, shardings, seconds, counts, counts, proofs, counts)
regions = st.recursive(
    st.builds(Region, counts, counts, st.booleans(), st.just(())),
    lambda inner: st.builds(Region, counts, counts, st.booleans(), tuples(inner)),
    max_leaves=6,
)
predictions = st.builds(Prediction, seconds, counts, counts, seconds, seconds, seconds, seconds)
alternatives = st.builds(Alternative, names, st.none() | seconds, counts, names, st.none() | counts)
plan_axes = tuples(st.tuples(names, counts))
partitions = st.builds(Partition, counts, counts, plan_axes, shardings, tuples(regions), counts, counts, seconds)
events = st.builds(Event, names, counts, counts, counts, st.none() | counts, seconds, seconds, st.none() | counts)
totals = st.builds(Total, counts, names, seconds)
timelines = st.builds(Timeline, tuples(events), tuples(totals), names)
plans = st.builds(
    Plan,
    names,
    counts,
    tuples(partitions),
    predictions,
    tuples(alternatives),
    counts,
    names,
    counts,
    timelines,
)
kernels = st.builds(
    Kernel, names, seconds, counts, counts, names, tuples(tuples(counts)), names, st.booleans(), counts, names,
    st.booleans(), st.booleans(),
)  # fmt: skip
shares = st.builds(Share, names, counts)
steps = st.builds(
    Step, counts, counts, counts, names, names, tuples(shares), tuples(shares), tuples(counts), tuples(counts),
    tables(tuples(counts)),
)  # fmt: skip
profiles = st.builds(
    Profile,
    names, names, names,
    tables(st.builds(
        OpCost, seconds, seconds, counts, counts, tuples(names), counts, st.booleans(), counts, counts, counts, counts
    )),
    tables(names), counts, counts, counts, tables(names),
    st.none() | steps,
    st.none() | st.builds(
        Kernels, tuples(kernels), tuples(st.builds(LinkKernels, tuples(kernels), tuples(kernels))), tuples(counts),
        tuples(kernels),
    ),
)  # fmt: skip
positive = st.floats(1e-9, 1e18)
curves = st.integers(1, 4).flatmap(
    lambda n: st.builds(
        Curve,
        st.lists(positive, min_size=n, max_size=n).map(lambda found: tuple(sorted(found))),
        st.lists(positive, min_size=n, max_size=n).map(tuple),
    )
)
points = st.lists(positive, max_size=3, unique=True).map(lambda found: tuple((n, n) for n in sorted(found)))
links = st.builds(LinkCost, st.floats(0, 1e9), positive, points)
link_tables = st.fixed_dictionaries({name: links for name in COLLECTIVES})
axes = tuples(st.builds(Axis, names, counts, link_tables, st.booleans()))
meshes = tuples(st.builds(Mesh, axes))
baselines = tuples(st.builds(Baseline, names, seconds, counts, counts))
frontiers = st.builds(Frontier, counts, seconds, meshes, tuples(plan_points), baselines, tuples(plan_points), counts)
ranks = st.lists(counts, max_size=3, unique=True).map(tuple)
flat_groups = st.builds(Group, names, ranks, positive, seconds, st.none() | positive)
groups = flat_groups | st.builds(lambda group: replace(group, members=(group,)), flat_groups)
clusters = st.builds(
    Cluster, names, names, counts, counts,
    st.builds(
        Compute, curves, positive, seconds, seconds, matmul_by_dtype=tables(curves), processors=st.none() | counts
    ),
    axes,
    tuples(st.builds(Host, names, ranks, names, counts)), st.none() | groups, ranks, meshes,
    tuples(st.builds(Split, ranks, links, tables(meshes))),
    st.none() | st.builds(Measured, seconds, counts, counts, counts, seconds, seconds),
    st.builds(Overlap, names, seconds),
)  # fmt: skip
reports = st.builds(
    Report, counts, counts, tuples(seconds), tuples(seconds), seconds, seconds, tuples(counts), seconds, counts,
    st.booleans(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "made"),
    [
        (OpGraph, graphs), (Plan, plans), (Frontier, frontiers), (Profile, profiles), (Cluster, clusters),
        (Report, reports),
    ],
    ids=lambda item: item.__name__ if isinstance(item, type) else "",
)  # fmt: skip
def test_round_trip(cls, made):
    @FEW
    @given(made)
    def check(value):
        text = json.dumps(encode(value), allow_nan=False)
        assert decode(cls, json.loads(text)) == value

    check()


@pytest.mark.parametrize("number", [float("inf"), float("-inf")])
def test_numbers_that_json_lacks_survive_as_arguments(number):
    found = Args((number,), (("value", (number, 1)),))
    assert decode(Args, json.loads(json.dumps(encode(found), allow_nan=False))) == found


def test_nan_survives_as_an_argument():
    (number,) = decode(Args, json.loads(json.dumps(encode(Args((float("nan"),))), allow_nan=False))).positional
    assert number != number


@dataclass(frozen=True)
class Inner:
    number: int
    share: float


@dataclass(frozen=True)
class Outer:
    name: str
    flag: bool
    inner: tuple[Inner, ...]
    pair: tuple[str, int]
    table: dict[str, Inner]
    role: Role
    maybe: int | None
    layout: Layout


RIGHT = {
    "name": "x", "flag": True, "inner": [{"number": 1, "share": 0.5}], "pair": ["a", 2],
    "table": {"k": {"number": 1, "share": 2}}, "role": "input", "maybe": None, "layout": "S(0),R",
}  # fmt: skip


def test_the_right_form_is_read():
    found = decode(Outer, RIGHT)
    assert found.table == {"k": Inner(1, 2.0)} and isinstance(found.table["k"].share, float)
    assert found.layout == Layout((S(0), State("R"))) and found.role is Role.INPUT
    assert decode(Outer, {**RIGHT, "maybe": 3}).maybe == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": 3}, "body.name: expected str, found '3'"),
        ({"name": None}, "body.name"),
        ({"flag": 1}, "body.flag: expected bool"),
        ({"flag": "true"}, "body.flag"),
        ({"inner": [{"number": 1, "share": 0.5}, {"number": True, "share": 1}]}, "body.inner[1].number: expected int"),
        ({"inner": [{"number": 1.0, "share": 0.5}]}, "body.inner[0].number"),
        ({"inner": [{"number": 1, "share": True}]}, "body.inner[0].share: expected float"),
        ({"inner": [{"number": 1, "share": "0.5"}]}, "body.inner[0].share"),
        ({"inner": [{"number": 1}]}, "body.inner[0]: keys of Inner differ (unknown [], missing ['share'])"),
        ({"inner": [{"number": 1, "share": 1, "x": 2}]}, "unknown ['x']"),
        ({"inner": {}}, "body.inner: expected a list"),
        ({"inner": "ab"}, "body.inner: expected a list"),
        ({"inner": [[]]}, "body.inner[0]: expected an object"),
        ({"pair": ["a"]}, "body.pair: expected 2 items"),
        ({"pair": ["a", 2, 3]}, "body.pair: expected 2 items"),
        ({"pair": [2, "a"]}, "body.pair[0]: expected str"),
        ({"pair": "ab"}, "body.pair: expected a list"),
        ({"table": []}, "body.table: expected an object"),
        ({"table": {"k": 1}}, "body.table.k: expected an object"),
        ({"role": "king"}, "body.role"),
        ({"role": []}, "body.role"),
        ({"maybe": "3"}, "body.maybe: expected int"),
        ({"maybe": False}, "body.maybe"),
        ({"layout": "S(x)"}, "body.layout: cannot read the state 'S(x)'"),
        ({"layout": 7}, "body.layout: expected a layout"),
    ],
)
def test_a_wrong_form_is_refused_with_its_place(change, told):
    with pytest.raises(CodecError) as refusal:
        decode(Outer, {**RIGHT, **change})
    assert told in str(refusal.value)


@pytest.mark.parametrize("data", [None, 7, [], "x", True])
@pytest.mark.parametrize("cls", [OpGraph, Plan, Frontier, Profile, Cluster, Report, Args])
def test_something_else_is_refused(cls, data):
    with pytest.raises(CodecError):
        decode(cls, data)


@pytest.mark.parametrize(
    "data",
    [
        {"positional": "ab", "named": {}},
        {"positional": [], "named": []},
        {"positional": []},
        {"positional": [], "named": {}, "more": 1},
        {"positional": [{}], "named": {}},
        {"positional": [{"ref": "a", "torch": ["a", "b"]}], "named": {}},
        {"positional": [{"ref": []}], "named": {}},
        {"positional": [{"torch": "ab"}], "named": {}},
        {"positional": [{"torch": ["a"]}], "named": {}},
        {"positional": [{"float": "much"}], "named": {}},
    ],
)
def test_wrong_arguments_are_refused(data):
    with pytest.raises(CodecError):
        decode(Args, data, "ops[0].args")


def test_what_is_no_json_value_is_refused():
    with pytest.raises(TypeError, match="cannot encode set"):
        encode({"a": {1}})


@FEW
@given(plans, st.randoms(use_true_random=False))
def test_a_damaged_plan_is_refused_or_equal_in_form(plan, chosen):
    """Whatever value is put at a random place: the plan is read as its type says, or CodecError, never another."""
    data = json.loads(json.dumps(encode(plan)))
    places = []

    def collect(node, path):
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            places.append((node, key))
            collect(value, (*path, key))

    collect(data, ())
    node, key = chosen.choice(places)
    node[key] = chosen.choice([None, True, -1, 0.5, "", "R", [], {}, [1], {"a": 1}])
    try:
        found = decode(Plan, data)
    except CodecError as error:
        assert str(error).startswith("body")
    else:
        assert decode(Plan, json.loads(json.dumps(encode(found)))) == found


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("layers.3.up.weight", "layers.*.up.weight"),
        ("a.0.b.12.c", "a.*.b.*.c"),
        ("weight", "weight"),
        ("h2.w", "h2.w"),
        ("3", "*"),
    ],
)
def test_patterns(name, wanted):
    assert pattern(name) == wanted
    assert look_up({wanted: "by pattern"}, name) == "by pattern"
    assert look_up({wanted: "by pattern", name: "own"}, name) == "own"
    assert look_up({}, name) is None
