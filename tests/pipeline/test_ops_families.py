"""The ops of ten model families: each has a rule, and no valid split is missing but those named here."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from shardwright.pipeline.ir.graph import Op, OpGraph
from shardwright.pipeline.ir.layout import S
from shardwright.pipeline.ops.dims import read_line, strategies
from shardwright.pipeline.ops.discovery import discover
from shardwright.pipeline.ops.discovery.child import Attempt
from shardwright.pipeline.ops.mesh import view_op
from shardwright.pipeline.ops.rule import OpView, plain_view
from shardwright.pipeline.ops.table import rule_of
from tests.families import FAMILIES
from tests.programs import plan_for, uniform, write
from tests.stages.test_trace_families import graph_of

# Valid, and not in the table: op -> states -> why.
REVIEWED = {
    "aten.layer_norm.default": {
        "B; P; P -> P": "weights are never summands: a parameter is stored whole or split",
    },
}

HEAVY = ("linear", "addmm", "matmul", "mm", "bmm", "conv2d", "scaled_dot_product_attention", "layer_norm", "batch_norm",
         "embedding", "cross_entropy_loss", "grouped_mm_fallback")  # fmt: skip


@pytest.fixture(scope="module")
def graphs() -> dict[str, OpGraph]:
    return {build.__name__: graph_of(build) for build in FAMILIES}


def distinct_ops(
    graphs: dict[str, OpGraph], kind: Callable[[OpView], Hashable] = discover._signature
) -> list[tuple[OpGraph, Op]]:
    """One op of each kind."""
    found = {kind(plain_view(g, op)): (g, op) for g in graphs.values() for op in g.ops}
    return list(found.values())


def target_and_dims(view: OpView) -> Hashable:
    return view.op.target, tuple(len(t.shape) for t in view.inputs), view.input_grads


def test_every_op_has_a_rule(graphs) -> None:
    missing = {op.target for graph in graphs.values() for op in graph.ops if rule_of(op) is None}
    assert not missing


def test_programs_have_public_calls(graphs) -> None:
    """No overload of torch by its own name, whole or split."""
    for name, graph in graphs.items():
        for split in (False, True):
            text = write(graph, plan_for(graph, uniform(graph, 2, split=split), 2))
            assert "torch.ops.aten" not in text, name


def test_no_heavy_op_runs_whole(graphs) -> None:
    for name, graph in graphs.items():
        for op in graph.ops:
            if op.target.split(".")[1] in HEAVY and max(t.numel for t in graph.types(op.inputs)) > 64:
                options = strategies(rule_of(op), view_op(graph, op), 2)
                split = [s for s in options if any(x.states[0].kind == "S" for x in (*s.inputs, *s.outputs))]
                assert split, f"{name}: {op}"


@pytest.mark.parametrize("kind", [target_and_dims, pytest.param(discover._signature, marks=pytest.mark.long)])
def test_no_valid_split_is_missing(graphs, kind, monkeypatch) -> None:
    """What the oracle finds by running the op, against what the table says; and nothing is listed that is not found."""
    monkeypatch.setattr(
        discover, "attempt", lambda function, view: Attempt(function(view))
    )  # no op of theirs needs a child
    missing: dict[str, set[str]] = {}
    for graph, op in distinct_ops(graphs, kind):
        view = plain_view(graph, op)
        ours = {(s.inputs, s.outputs) for s in strategies(rule_of(op), view, 2)}
        for s in strategies(None, view, 2):
            if (s.inputs, s.outputs) not in ours:
                text = f"{'; '.join(map(str, s.inputs))} -> {'; '.join(map(str, s.outputs))}"
                missing.setdefault(op.target, set()).add(text)
    assert missing == {target: set(entries) for target, entries in REVIEWED.items()}


def test_every_line_tells_the_size_of_its_letters(graphs) -> None:
    for graph, op in distinct_ops(graphs):
        rule = rule_of(op)
        line = read_line(rule.line(view := plain_view(graph, op)), view)
        assert set(line.letters) <= set(line.sizes), f"{op.target}: {rule.line(view)}"


def test_a_fused_projection_is_split_by_heads(graphs) -> None:
    """GPT-2 writes q, k and v as one: the parts travel back from where they are taken apart to the weight."""
    graph = graphs["gpt2"]
    fused = next(
        op for op in graph.ops if op.target == "aten.addmm.default" and graph.types(op.outputs)[0].shape[1] == 96
    )
    options = {s.name: s for s in strategies(rule_of(fused), view_op(graph, fused), 2)}
    assert [layout.states[0] for layout in options["n:3"].inputs[2:]] == [S(1, 3)]
    assert options["n:3"].outputs[0].states == (S(1, 3),)
    assert options["m:4"].outputs[0].states == (S(0, 4),), "the sequence inside (batch sequence)"


def test_heads_run_through_attention_without_a_conversion(graphs) -> None:
    """From the fused projection to the attention's output there is one strategy after another on heads."""
    graph = graphs["gpt2"]
    start = next(op for op in graph.ops if op.target == "aten.addmm.default")
    at = {start.outputs[0]: S(1, 3)}
    for op in graph.ops[graph.ops.index(start) + 1 :]:
        known = [(i, at[name]) for i, name in enumerate(op.inputs) if name in at]
        if not known:
            continue
        fitting = [
            s
            for s in strategies(rule_of(op), view_op(graph, op), 2)
            if all(s.inputs[i].states[0] == x for i, x in known)
        ]
        assert fitting, f"{op.target} of {op.module} takes no {known}"
        at |= {name: layout.states[0] for name, layout in zip(op.outputs, fitting[0].outputs, strict=True)}
        if op.target == "aten.addmm.default":
            assert fitting[0].outputs[0].states[0].kind == "P"
            return
    raise AssertionError("the projection behind the attention was not reached")
