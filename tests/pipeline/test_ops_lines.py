"""Lines of named dims: what they allow, products and parts of dims, rules that a user registers."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace

import pytest

from shardwright.pipeline.ir.graph import Args, Op, OpGraph, Ref, Role, TensorType, Value
from shardwright.pipeline.ir.layout import S
from shardwright.pipeline.ops import factors, register
from shardwright.pipeline.ops.dims import check_line, local_factors, read_line, strategies
from shardwright.pipeline.ops.mesh import view_op
from shardwright.pipeline.ops.rule import OpRule, call
from shardwright.pipeline.ops.table import forget, own_rules, rule_of
from tests.one_op import check_rule, example, t


def texts(it, ranks: int, rule=None) -> dict[str, str]:
    options = strategies(rule or rule_of(it.op), it.view, ranks)
    return {s.name: f"{'; '.join(map(str, s.inputs))} -> {'; '.join(map(str, s.outputs))}" for s in options}


# ---- the hard places, as strategies; that they are exact is proved with all others


def test_the_vocabulary_of_an_embedding_and_of_a_loss_may_be_split() -> None:
    assert texts(example("aten.embedding.default", t(12, 4), t(6, high=12)), 2)["v"] == "S(0); R -> P"
    loss = example("aten.cross_entropy_loss.default", t(6, 12), t(6, high=12))
    assert texts(loss, 2)["c"] == "S(1); R -> R"
    assert texts(loss, 2)["n"] == "S(0); S(0) -> P"
    assert "c" not in texts(loss, 5), "12 classes on 5 ranks"


@pytest.mark.parametrize(
    ("kind", "tensors", "count"),
    [
        ("linear", (t(2, 3, 4), t(5, 4), t(5)), 2 * 6 * 4 * 5),
        ("mm", (t(3, 4), t(4, 5)), 2 * 3 * 4 * 5),
        ("addmm", (t(5), t(3, 4), t(4, 5)), 2 * 3 * 4 * 5),
        ("bmm", (t(2, 3, 4), t(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        ("baddbmm", (t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        ("matmul", (t(2, 3, 4), t(4, 5)), 2 * 2 * 3 * 4 * 5),
        ("mv", (t(3, 4), t(4)), 2 * 3 * 4),
        ("dot", (t(4), t(4)), 2 * 4),
    ],
)
def test_a_product_counts_a_multiplication_and_a_sum_for_each_pair(kind: str, tensors: tuple, count: int) -> None:
    it = example(f"aten.{kind}.default", *tensors)
    assert rule_of(it.op).flops(it.view) == count


def test_more_ranks_than_heads_of_keys() -> None:
    """Two heads of keys on four ranks: queries are split inside each group of heads, keys are read whole."""
    it = example("aten.scaled_dot_product_attention.default", t(2, 8, 6, 2), t(2, 2, 6, 2), t(2, 2, 6, 2), None, 0.0,
                 True, enable_gqa=True)  # fmt: skip
    assert texts(it, 2)["h"] == "S(1); S(1); S(1) -> S(1)"
    assert "h" not in texts(it, 4)
    assert texts(it, 4)["r"] == "S(1:2); B; B -> S(1:2)"
    check_rule(rule_of(it.op), it, 4)


def test_the_gradient_of_a_norms_weight_is_partial_under_a_sequence_split() -> None:
    it = example("aten.layer_norm.default", t(2, 6, 4), (4,), t(4), t(4))
    assert texts(it, 3)["dim1"] == "S(1); B; B -> S(1)"
    it = example("aten.rms_norm.default", t(2, 6, 4), (4,), t(4))
    assert texts(it, 3)["dim1"] == "S(1); B -> S(1)"


def test_experts_may_be_split_whole_or_inside() -> None:
    pytest.importorskip("transformers.integrations.moe", reason="the extra `hf` is not installed")
    ends = t(4, values=(1, 4, 4, 6), dtype="int32")
    it = example("transformers.grouped_mm_fallback.default", t(6, 4), t(4, 4, 8), ends)
    assert texts(it, 2)["e"] == "B; S(0); R -> P"
    assert texts(it, 2)["n"] == "B; S(2); R -> S(1)"
    assert texts(it, 2)["k"] == "S(1); S(1); R -> P"


def test_groups_of_a_convolution() -> None:
    it = example("aten.conv2d.default", t(2, 12, 4, 4), t(8, 3, 3, 3), t(8), (1, 1), (1, 1), (1, 1), 4)
    found = texts(it, 2)
    assert found["g"] == "S(1); S(0); S(0) -> S(1)"
    assert found["o"] == "B; S(0:4); S(0:4) -> S(1:4)"
    assert texts(it, 3)["c"] == "S(1:4); S(1); P -> P"


# ---- reading lines


@pytest.mark.parametrize(
    "line", ["b n, n -> b n", "* k+, n k+, n -> * n", "(h=8 d) s^ -> h s^ d", "->", "-> a", "a! ->"]
)
def test_a_line_is_read(line: str) -> None:
    check_line(line)


@pytest.mark.parametrize("line", ["b n", "a -> b -> c", "a? -> a", "(a -> a", "() -> a", "a{ -> a", "a=x -> a"])
def test_what_is_no_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        check_line(line)


def test_a_letter_with_two_sizes_is_refused() -> None:
    it = example("aten.add.Tensor", t(4, 6), t(6))
    with pytest.raises(ValueError, match="a is both 4 and 6"):
        read_line("a b, a -> a b", it.view)


def test_a_product_needs_to_know_what_lies_before_the_letter() -> None:
    it = example("aten.relu.default", t(12))
    rule = OpRule(it.op.target, "(a b) -> (a b)", call("F.relu"))
    assert set(texts(it, 2, rule)) == {"R", "B"}, "12 is 3 x 4 as well as 2 x 6"
    rule = replace(rule, dims="(a=3 b) -> (a b)")
    assert texts(it, 2, rule)["b"] == "S(0:3) -> S(0:3)"
    check_rule(rule, it, 2)


# ---- parts of dims, along the graph


def fused() -> OpGraph:
    """x @ w, taken apart into three, of which the second is read as heads."""
    types = {"x": (4, 8), "w": (24, 8), "y": (4, 24), "q": (4, 8), "k": (4, 8), "v": (4, 8), "heads": (4, 2, 4)}
    roles = {"x": Role.INPUT, "w": Role.PARAMETER}
    values = {n: Value(n, TensorType(s, "float64"), roles.get(n, Role.RESULT), n, True) for n, s in types.items()}
    ops = (
        Op("y", "aten.linear.default", Args((Ref("x"), Ref("w"))), ("y",), "", ""),
        Op("parts", "aten.split.Tensor", Args((Ref("y"), 8, 1)), ("q", "k", "v"), "", ""),
        Op("heads", "aten.view.default", Args((Ref("k"), (4, 2, 4))), ("heads",), "", ""),
    )
    return OpGraph(values, ops, "heads", (), ())


def test_parts_travel_back_to_the_projection() -> None:
    graph = fused()
    assert dict(view_op(graph, graph.op("y")).factors) == {"n": (3, 6)}, "heads of each, and what is inside them"
    options = {s.name: s for s in strategies(rule_of(graph.op("y")), view_op(graph, graph.op("y")), 2)}
    assert [x.states[0] for x in options["n:3"].inputs[1:]] == [S(0, 3)]
    assert options["n:3"].outputs[0].states == (S(1, 3),)
    (apart,) = (
        s for s in strategies(rule_of(graph.op("parts")), view_op(graph, graph.op("parts")), 2) if s.name == "d1"
    )
    assert apart.inputs[0] == options["n:3"].outputs[0]
    assert {x.states for x in apart.outputs} == {(S(1),)}


def test_factors_are_kept_once_per_graph_and_go_with_it() -> None:
    graph, other = fused(), fused()
    assert factors.factors_of(graph) is factors.factors_of(graph)
    found = factors.once_per_graph(lambda _: threading.Event())  # whatever can be watched
    seen = weakref.ref(found(graph))
    assert found(graph) is seen() and found(other) is not seen()
    del graph
    gc.collect()
    assert seen() is None


def test_half_of_a_dim_lies_in_half_as_many_parts() -> None:
    view = replace(example("aten.linear.default", t(8, 6), t(24, 6)).view, factors=(("n", (3, 4)), ("*0", (2,))))
    options = {s.name: s for s in strategies(rule_of(view.op), view, 2)}
    assert local_factors(view, options["n"], (2,)) == (("n", (2, 3)), ("*0", (2,)))
    assert local_factors(view, options["n:3"], (2,)) == view.factors
    assert local_factors(view, options["dim0"], (2,)) == (("n", (3, 4)),)
    assert local_factors(view, replace(options["n"], name="n,n"), (2, 2)) == (("n", (3,)), ("*0", (2,)))


# ---- rules of the user's own


@pytest.fixture
def own():
    yield "shardwright_tests.unknown.default"
    forget("shardwright_tests.unknown.default")


def test_a_registered_rule_is_used(own: str) -> None:
    register(own, "b n, n -> b n", linear=((0,),))
    op = Op("it", own, Args((Ref("a"), Ref("b"))), ("it",), "", "")
    rule = rule_of(op)
    assert rule is own_rules()[own] and rule.saves_output and rule.line is not None
    register(own, "b n^, n^ -> b n^")
    assert rule_of(op).dims == "b n^, n^ -> b n^", "the last word counts"


@pytest.mark.parametrize(
    ("target", "line", "told"),
    [
        ("aten.linear.default", "a -> a", "has a rule already"),
        ("mylib.op", "a -> a", "library.op.overload"),
        ("mylib.op.default", "a b", "'->'"),
    ],
)
def test_what_cannot_be_registered(target: str, line: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        register(target, line)
    assert target not in own_rules()
