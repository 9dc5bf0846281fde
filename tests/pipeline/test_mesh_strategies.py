"""Strategies of an op on a mesh of several axes: each is run on simulated ranks against the unsplit op."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from shardwright.pipeline import runtime
from shardwright.pipeline.ir.layout import R
from shardwright.pipeline.ir.plan import Sharding, Strategy
from shardwright.pipeline.ir.program import Call
from shardwright.pipeline.ir.program import Tensor as Placed
from shardwright.pipeline.ops.mesh import _strategies, followers, op_strategies, signature, view_op
from shardwright.stages.codegen.block import BlockWriter, Outside
from tests.graphs import gpt_graph, graph_strategies, mlp_graph
from tests.meshes import check, distribute, mesh, run_threads
from tests.one_op import Example, example, run_unsplit, t
from tests.shards import FORWARD, GRADIENT

MESHES = [(2, 3), *(pytest.param(sizes, marks=pytest.mark.long) for sizes in ((2, 2), (3, 2)))]
INDEX = {"high": 12}
OPS = {
    "linear": ("aten.linear.default", t(6, 12, 6), t(12, 6), t(12)),
    "matmul": ("aten.matmul.default", t(6, 4, 12), t(6, 12, 6)),
    "add": ("aten.add.Tensor", t(6, 12), t(12)),
    "mul": ("aten.mul.Tensor", t(6, 12), t(6, 1)),
    "gelu": ("aten.gelu.default", t(12, 6)),
    "layer norm": ("aten.layer_norm.default", t(12, 6, 4), (4,), t(4), t(4)),
    "softmax": ("aten.softmax.int", t(12, 6, 12), 1),
    "flatten": ("aten.view.default", t(6, 4, 12), (24, 12)),
    "heads": ("aten.view.default", t(6, 24), (6, 12, 2)),
    "transpose": ("aten.transpose.int", t(6, 4, 12), 0, 2),
    "embedding": ("aten.embedding.default", t(12, 6), t(6, 12, **INDEX)),
    "cross entropy": ("aten.cross_entropy_loss.default", t(12, 12), t(12, high=12, sometimes=-100)),
    "mean": ("aten.mean.default", t(12, 6)),
    "mse": ("aten.mse_loss.default", t(12, 6), t(12, 6)),
}


def check_on_mesh(it: Example, strategy: Strategy, sizes: tuple[int, ...]) -> None:
    axes = mesh(*sizes)
    inputs = tuple(Placed(name, layout) for name, layout in zip(it.op.inputs, strategy.inputs, strict=True))
    output = Placed("it", strategy.outputs[0])
    named = tuple((axis.name, axis.size) for axis in axes)
    outside = {i: Outside(i.value, i.value) for i in inputs}
    writer = BlockWriter(it.graph, Sharding({"it": strategy}, {}, {}), named, "", outside)
    block = writer.write((Call("it", inputs, (output,)),), None, output)
    wanted = [it.graph.values[name].grad for name in it.op.inputs]
    whole = [x.clone().requires_grad_(grad) for x, grad in zip(it.tensors, wanted, strict=True)]
    expected = run_unsplit(it.op, tuple(whole))
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    held = [distribute(x, i.layout, sizes, FORWARD) for x, i in zip(it.tensors, inputs, strict=True)]
    given = distribute(gradient, output.layout, sizes, GRADIENT)

    def rank(at):
        own = [x[at].requires_grad_(grad) for x, grad in zip(held, wanted, strict=True)]
        names = {"torch": torch, "F": F, **{name: getattr(runtime, name) for name in runtime.__all__}}
        names |= {i.value: x for i, x in zip(inputs, own, strict=True)}
        exec("\n".join(block.lines), names)
        names[block.result[0]].backward(given[at])
        return names[block.result[0]].detach(), [x.grad for x in own]

    found = run_threads(rank, axes)
    check({at: y for at, (y, _) in found.items()}, expected.detach(), output.layout, sizes, FORWARD, "the output")
    for number, (layout, grad) in enumerate(zip(strategy.inputs, wanted, strict=True)):
        if grad:
            gradients = {at: g[number] for at, (_, g) in found.items()}
            check(gradients, whole[number].grad, layout, sizes, GRADIENT, f"the gradient of input {number}")


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_every_strategy_on_a_mesh_is_exact(name: str, sizes: tuple[int, ...]) -> None:
    it = example(*OPS[name])
    found = op_strategies(it.view, sizes)
    assert len(found) > 4
    check_all(it, found, sizes)


@pytest.mark.parametrize("name", ["embedding", "cross entropy", "mean"])
def test_local_forms_on_three_axes_are_exact(name: str) -> None:
    it = example(*OPS[name])
    found = [strategy for strategy in op_strategies(it.view, (2, 2, 2)) if strategy.body]
    check_all(it, random.Random(0).sample(found, min(40, len(found))), (2, 2, 2))


def check_all(it: Example, found: Sequence[Strategy], sizes: tuple[int, ...]) -> None:
    for strategy in found:
        try:
            check_on_mesh(it, strategy, sizes)
        except Exception as error:
            layouts = "; ".join(map(str, strategy.inputs))
            raise AssertionError(f"{strategy.name}: {layouts} -> {strategy.outputs[0]}: {error}") from error


def test_a_linear_layer_has_at_least_the_layouts_of_colossal_auto() -> None:
    it = example("aten.linear.default", t(4, 4, 4, 16), t(32, 16), t(32))
    found = op_strategies(it.view, (2, 2))
    assert len({(s.inputs, s.outputs) for s in found}) == len(found) >= 24
    texts = {"; ".join(map(str, (*s.inputs, *s.outputs))) for s in found}
    assert "S(0),S(0); B,B; B,B; S(0),S(0)" in texts  # both axes on the batch
    assert "S(0),B; B,S(0); B,S(0); S(0),S(3)" in texts  # batch and columns
    assert "S(0),S(3); B,S(1); B,P; S(0),P" in texts  # batch and rows
    assert "S(3),S(3); S(1),S(1); P,P; P,P" in texts


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 2, 2), (8, 8)], ids=str)
def test_strategies_fit_and_differ(sizes: tuple[int, ...]) -> None:
    graph = gpt_graph()
    distinct = {id(options): (name, options) for name, options in graph_strategies(graph, sizes).items()}
    for name, options in distinct.values():  # equal ops share theirs
        op = graph.op(name)
        assert len({(s.inputs, s.outputs) for s in options}) == len(options)
        assert any(all(s == R for x in (*o.inputs, *o.outputs) for s in x.states) for o in options)
        for strategy in options:
            assert len(strategy.name.split(",")) == len(sizes)
            assert not strategy.body or len(strategy.body.split(",")) == len(sizes)
            for value, layout in zip((*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs), strict=True):
                assert layout.fits(graph.values[value].type.shape, sizes), f"{name}: {layout}"
                assert layout == layout.normal(sizes)


def test_an_axis_of_one_rank_adds_nothing() -> None:
    it = example(*OPS["linear"])
    plain, more = op_strategies(it.view, (2,)), op_strategies(it.view, (2, 1))
    assert [f"{s.inputs[0]},R" for s in plain] == [str(s.inputs[0]) for s in more]


def test_a_mean_names_the_axes_that_it_is_over() -> None:
    bodies = {s.name: s.body for s in op_strategies(example(*OPS["mean"]).view, (2, 2))}
    assert bodies["d0,d0"] == "mean,mean" and bodies["d0,R"] == "mean," and bodies["R,d1"] == ",mean"
    assert bodies["R,R"] == bodies["P,B"] == ""


def test_equal_ops_are_asked_once() -> None:
    graph = gpt_graph(6)
    _strategies.cache_clear()
    options = graph_strategies(graph, (2, 2))
    asked = _strategies.cache_info().misses
    _strategies.cache_clear()
    graph_strategies(gpt_graph(2), (2, 2))
    assert asked == _strategies.cache_info().misses
    assert len({id(o) for o in options.values()}) == asked < len(graph.ops) / 3


def test_a_signature_holds_all_that_matters() -> None:
    view = view_op(gpt_graph(), next(op for op in gpt_graph().ops if op.target == "aten.linear.default"))
    same = signature(view)
    assert same == signature(replace(view, op=replace(view.op, name="other", module="m", source="s")))
    assert same != signature(replace(view, input_grads=(False,) * len(view.inputs)))
    assert same != signature(replace(view, op=replace(view.op, target="aten.mm.default")))
    texts = [signature(example("aten.add.Tensor", t(2), c).view) for c in (1, 1.0, True)]
    assert len(set(texts)) == 3


def test_followers_take_what_their_producer_gives() -> None:
    graph = gpt_graph()
    options = graph_strategies(graph, (2, 2))
    found = followers(graph, options)
    targets = {graph.op(name).target for name in found}
    assert {"aten.gelu.default", "aten.view.default", "aten.transpose.int"} <= targets
    assert "aten.linear.default" not in targets
    for name, producer in found.items():
        first = graph.op(name).inputs[0]
        assert first in graph.op(producer).outputs
        layouts = [s.inputs[0] for s in options[name]]
        assert len(set(layouts)) == len(layouts)
    first = mlp_graph().ops[0]
    assert first.name not in followers(mlp_graph(), graph_strategies(mlp_graph(), (2, 2))), "it reads an input"


@pytest.mark.parametrize(("groups", "channels"), [(2, 6), (2, 12), (4, 12), (3, 6)])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2), (3, 2), (4, 2)])
def test_axes_share_the_groups_of_a_norm(groups, channels, sizes):
    """However many axes split them, each rank has whole groups."""
    norm = example("aten.group_norm.default", t(4, channels, 3), groups, t(channels), t(channels), 1e-5)
    found = op_strategies(norm.view, sizes)
    assert any("g" in strategy.name for strategy in found) == any(groups % size == 0 for size in sizes)
    for strategy in found:
        ranks = math.prod(n for name, n in zip(strategy.name.split(","), sizes, strict=True) if name == "g")
        assert groups % ranks == 0
