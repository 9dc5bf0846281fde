"""The graph is cut where it may be: links, blocks of equal ones, and values that are common to many."""

from __future__ import annotations

import json
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

from shardwright.pipeline.ir.graph import Args, Op, OpGraph
from shardwright.pipeline.ir.verify import verify_graph
from shardwright.pipeline.tracing.chain import LONGEST_RESIDUAL, find_chain, products_in_a_row
from shardwright.stages.trace.run import figures
from tests.graphs import gpt, gpt_batch, gpt_graph, ladder_graph, mlp_graph, shared_graph, trace
from tests.skips import KINDS, NEAR, STEPS, UNet, images, random_ops

X = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}


def targets(graph: OpGraph, names: tuple[str, ...]) -> list[str]:
    return [graph.op(name).target.split(".")[1] for name in names]


ATTENTION = [
    "layer_norm", *["linear", "view", "transpose"] * 3, "scaled_dot_product_attention", "transpose", "reshape",
    "linear", "add",
]  # fmt: skip
FORWARD = ["layer_norm", "linear", "gelu", "linear", "add"]


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("tie", [False, True])
def test_the_chain_of_a_gpt(layers, tie):
    graph = gpt_graph(layers, tie) if layers != 4 or not tie else trace(gpt(4, True), gpt_batch())
    assert targets(graph, graph.prologue) == ["arange", "flatten"]
    assert [targets(graph, link.ops) for link in graph.chain] == [
        ["embedding"], ["embedding", "add"], *[ATTENTION, FORWARD] * layers, ["layer_norm"], ["linear", "flatten"],
        ["cross_entropy_loss"],
    ]  # fmt: skip
    assert [link.block for link in graph.chain] == [0, 1, *[2, 3] * layers, 4, 5, 6]


def test_the_chain_of_an_mlp():
    graph = mlp_graph()
    assert [targets(graph, link.ops) for link in graph.chain] == [
        *[["linear"], ["relu"]] * 3, ["linear"], ["cross_entropy_loss"],
    ]  # fmt: skip
    # the first layer reads the input, the last one is narrower: only the two in the middle are equal
    assert [link.block for link in graph.chain] == [0, 1, 2, 1, 2, 1, 3, 4]


class Skip(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))

    def forward(self, x):
        x = self.layers[0](x)
        start = x
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return (x + start).mean()


def test_a_skip_connection_is_not_cut():
    graph = trace(Skip(4), X)
    assert [targets(graph, link.ops) for link in graph.chain] == [
        ["linear"],
        ["linear", "tanh", "linear", "tanh", "linear", "tanh", "add"],
        ["mean"],
    ]


@pytest.mark.parametrize(("products", "carried"), [(6, False), (7, True)])
def test_a_skip_past_more_than_six_products_is_carried(products, carried):
    graph = trace(Skip(1 + products), X)
    assert bool(graph.common) is carried
    if carried:
        assert [targets(graph, link.ops) for link in graph.chain] == [
            ["linear", "linear"], *[["tanh"], ["linear"]] * (products - 1), ["tanh"], ["add"], ["mean"],
        ]  # fmt: skip
        assert [graph.reads_common(link) for link in graph.chain][-2:] == [graph.chain[0].common, ()]


def test_products_side_by_side_do_not_make_a_skip_long():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.experts = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(20))

        def forward(self, x):
            x = self.start(x)
            return (x + sum(expert(x) for expert in self.experts)).mean()

    graph = trace(Experts(), X)
    assert not graph.common and len(graph.chain) == 3


@pytest.mark.parametrize(
    ("target", "product"),
    [
        ("aten.linear.default", True),
        ("aten.conv_transpose3d.input", True),
        ("aten.scaled_dot_product_attention.default", True),
        ("transformers.grouped_mm_fallback.default", True),
        ("aten.layer_norm.default", False),
        ("aten.embedding.default", False),
        ("mylib.unknown.default", False),
    ],
)
def test_a_product_is_what_the_table_counts_flops_of(target, product):
    assert products_in_a_row([Op("op", target, Args(()), ("y",), "", "")]) == int(product)


def test_rungs_of_one_size_are_equal_links():
    graph = ladder_graph()
    found = [(targets(graph, link.ops), link.block, len(link.common), len(graph.reads_common(link)))
             for link in graph.chain]  # fmt: skip
    inside = ["linear", "tanh"] * 3 + ["add"] + ["linear", "tanh", "add"] * 2  # rungs of up to six products
    assert found == [
        (["linear"], 0, 0, 0), *[(["tanh", "linear"], 1, 1, 0)] * 3, (["tanh"], 2, 0, 0), (inside, 3, 0, 0),
        *[(["linear"], 4, 0, 0), (["tanh"], 2, 0, 0), (["add"], 5, 0, 1)] * 3, (["mse_loss"], 6, 0, 0),
    ]  # fmt: skip
    read = [name for link in graph.chain for name in graph.reads_common(link)]
    assert read == list(graph.common)[::-1]


def test_layers_that_read_the_same_values_are_equal_links():
    graph = shared_graph()
    assert [link.block for link in graph.chain] == [0, 1, 2, 2, 2, 3]
    common = graph.chain[1].common
    assert [targets(graph, (name,)) for name in common] == [["tanh"], ["exp"], ["gt"]]
    assert [graph.values[name].grad for name in common] == [True, True, False]
    assert [graph.reads_common(link) for link in graph.chain] == [(), (), common, common, common, ()]


def test_a_common_value_is_not_taken_for_one_of_the_prologue():
    """Two layers do the same, one to a mask that the batch gives and one to a mask that an activation gives."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(10))

        def forward(self, x):
            start = self.layers[0](x)
            given, own, y = x > 0, start > 0, start
            for layer in self.layers[1:]:
                y = torch.where(given, layer(y), 0.5)
            return torch.where(own, y, 0.5).mean()

    graph = trace(Net(), X)
    (own,) = graph.common
    where = [link.block for link in graph.chain if targets(graph, link.ops) == ["where"]]
    assert len(where) == 10 and len(set(where[:-1])) == 1 and where[-1] not in where[:-1]
    assert graph.reads_common(next(link for link in graph.chain if link.block == where[-1])) == (own,)


def test_a_unet_falls_into_its_levels():
    graph = trace(UNet(), images())
    writers = [number for number, link in enumerate(graph.chain) if link.common]
    readers = [number for number, link in enumerate(graph.chain) if graph.reads_common(link)]
    assert [targets(graph, graph.chain[n].ops) for n in writers] == [["relu", "max_pool2d"]] * 2
    assert [targets(graph, graph.chain[n].ops) for n in readers] == [["cat"]] * 2
    assert len(graph.chain) > 30 and max(len(link.ops) for link in graph.chain) == 8  # the lowest level is one link


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_the_chain_of_any_graph(steps):
    ops = random_ops(steps)
    graph = find_chain(ops)
    verify_graph(graph)
    assert sorted(op.name for op in graph.ops) == sorted(op.name for op in ops.ops)
    assert OpGraph.from_json(json.loads(json.dumps(graph.to_json()))) == graph
    order = [op.name for op in graph.ops]
    for name in graph.common:
        last = max(order.index(op.name) for op in graph.consumers()[name])
        assert products_in_a_row(graph.ops[order.index(name) + 1 : last]) > LONGEST_RESIDUAL
    kinds = {}
    for link in graph.chain:
        shape = (targets(graph, link.ops), len(link.common), len(graph.reads_common(link)))
        assert kinds.setdefault(link.block, shape) == shape


def test_random_graphs_have_common_values():
    """What the test above is worth."""
    draw = random.Random(0)
    drawn = [[(draw.choice(KINDS), draw.choice(NEAR), draw.randint(0, 30)) for _ in range(40)] for _ in range(30)]
    graphs = [find_chain(random_ops(steps)) for steps in drawn]
    assert sum(len(graph.common) > 1 and len(graph.chain) > 4 for graph in graphs) > 10
    assert any(not graph.values[name].grad for graph in graphs for name in graph.common)


def test_equal_links_need_equal_constants_and_equal_sharing():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            x = self.a(x)
            x = torch.softmax(x, 0)
            x = torch.softmax(x, 1)
            x = self.b(x)
            x = torch.softmax(x, 0)
            x = F.linear(x, self.c.weight) * F.linear(x, self.c.weight)  # one weight twice
            x = F.linear(x, self.c.weight) * F.linear(x, self.d.weight)  # two weights
            return x.mean()

    graph = trace(Net(), X)
    kinds = {}
    for link in graph.chain:
        kinds.setdefault(link.block, []).append(targets(graph, link.ops))
    assert all(len({str(found) for found in group}) == 1 for group in kinds.values())
    softmax = [link.block for link in graph.chain if targets(graph, link.ops) == ["softmax"]]
    assert softmax[0] == softmax[2] != softmax[1]
    twice, each_once = (link for link in graph.chain if targets(graph, link.ops) == ["linear", "linear", "mul"])
    assert twice.block != each_once.block
    assert figures(graph)["distinct_blocks"] == len(kinds)
