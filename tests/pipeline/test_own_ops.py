"""Rules for ops of the user's own, in conf/model: checked when the file is read, and again against the graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.op_rules import coverage
from shardwright.pipeline.base.errors import ConfigError
from shardwright.pipeline.config import Config, load_config
from shardwright.pipeline.ir.graph import Args, Op, OpGraph, Ref, Role, TensorType, Value
from shardwright.pipeline.ops.table import forget, own_rules
from shardwright.pipeline.user.own_ops import know_own_ops
from tests.graphs import gpt_graph

ROOT = Path(__file__).parents[2]
FILE = "conf/model/gpt_small.yaml"
OP = "shardwright_tests.own.default"


@pytest.fixture(autouse=True)
def forgotten():
    yield
    forget(OP)


def config_with(text: str) -> Config:
    return load_config(ROOT, changed={FILE: (ROOT / FILE).read_bytes() + text.encode()})


def graph_of(target: str) -> OpGraph:
    """x and w, of 4 x 6 and 6 numbers, into one op."""
    types = {"x": (4, 6), "w": (6,), "it": (4, 6)}
    values = {n: Value(n, TensorType(s, "float32"), Role.INPUT, n, True) for n, s in types.items()}
    return OpGraph(values, (Op("it", target, Args((Ref("x"), Ref("w"))), ("it",), "", ""),), "it", (), ())


def test_a_line_in_the_file_is_a_rule() -> None:
    know_own_ops(config_with(f"ops:\n  {OP}: b n, n -> b n\n"), graph_of(OP))
    assert own_rules()[OP].dims == "b n, n -> b n"


def test_without_the_key_there_are_none() -> None:
    know_own_ops(load_config(ROOT), gpt_graph())
    assert OP not in own_rules()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ops: {}\n", "nothing in it"),
        ("ops: linear\n", "a mapping from an op"),
        ("ops:\n  linear: a -> a\n", "is not the name of an op"),
        (f"ops:\n  {OP}: a b\n", "'->'"),
        (f"ops:\n  {OP}: 3\n", "expected a line of dims"),
        (f"ops:\n  {OP}: a? -> a\n", "is not a dim"),
    ],
)
def test_what_is_no_rule_is_told_with_its_place(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(text)
    assert told in caught.value.line() and FILE in caught.value.line() and "ops" in caught.value.line()


@pytest.mark.parametrize("line", ["b n -> b n", "b, n -> b n", "b n, b -> b n"])
def test_a_line_that_does_not_fit_the_graph_is_told_with_its_place(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        know_own_ops(config_with(f"ops:\n  {OP}: {line}\n"), graph_of(OP))
    assert f"{FILE}: ops.{OP}" in caught.value.line()


def test_an_op_of_the_table_has_its_rule_already() -> None:
    with pytest.raises(ConfigError, match="has a rule already"):
        know_own_ops(config_with("ops:\n  aten.linear.default: a -> a\n"), None)


def test_the_benchmark_counts_where_strategies_come_from() -> None:
    found = coverage(gpt_graph(), 2)
    assert found.table and not found.discovered and not found.replicated and not found.heavy_replicated
    found = coverage(graph_of("aten.nextafter.default"), 2)
    assert found.discovered | found.replicated == {"aten.nextafter.default"}
    assert coverage(graph_of("shardwright_tests.not_there.default"), 2).replicated
