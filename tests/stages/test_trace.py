"""The traced graph is the user's module: it computes the same loss and gradients, and it is cut where it may be."""

from __future__ import annotations

import importlib.util
import json
import operator
import random
from collections import UserDict
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

from pipeline.config import DType, Precision, TensorSpec, load_config
from pipeline.errors import TraceError
from pipeline.ir.graph import Op, OpGraph, Ref, Role, Value
from pipeline.ir.verify import RULES, InvalidGraph, verify_graph
from stages.trace.build import fake_mode, sample_batch
from stages.trace.chain import find_chain
from stages.trace.common import LONGEST_RESIDUAL, products_in_a_row
from stages.trace.export import pick_loss
from stages.trace.run import figures, run
from tests.graphs import gpt, gpt_batch, gpt_graph, ladder_graph, mlp, mlp_batch, mlp_graph, shared_graph, trace
from tests.interpreter import run_graph
from tests.skips import KINDS, NEAR, STEPS, UNet, images, random_ops

X = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}


# ------------------------------------------------------------------------------------------- the graph alone


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return (self.inner(x) * self.scale).square().mean()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.head, self.spare = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 6)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.head(F.silu(self.base(x))).pow(2).sum()


class Many(nn.Module):
    """Ops with several results, a detached branch, integer work, and an op that no rule knows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        first, second, _ = self.linear(x).split(2, dim=-1)
        weight = torch.softmax(second, -1).detach()
        best, _ = torch.max(first, dim=-1)
        return (first * weight).cumsum(0).mean() + torch.logsumexp(best, 0) + x[:, 0].sum()


def pairs():
    torch.manual_seed(3)
    return {
        "gpt": (gpt(), gpt_batch(), gpt_graph()),
        "gpt_tied": (gpt(tie=True), gpt_batch(), gpt_graph(tie=True)),
        "mlp": (mlp(), mlp_batch(), mlp_graph()),
        "dropout": (model := Dropout(), X, trace(model, X)),
        "frozen": (model := Frozen(), X, trace(model, X)),
        "many": (model := Many(), X, trace(model, X)),
    }


@pytest.fixture(scope="module")
def traced():
    return pairs()


@pytest.mark.parametrize("name", ["gpt", "gpt_tied", "mlp", "dropout", "frozen", "many"])
def test_the_graph_alone_computes_loss_and_gradients_bit_for_bit(traced, name):
    model, batch, graph = traced[name]
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def run(loss):
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return [None if g is None else g.clone() for g in found]

    torch.manual_seed(11)
    wanted = model(**batch)
    wanted_gradients = run(wanted)
    torch.manual_seed(11)
    found = run_graph(graph, model, batch)
    assert torch.equal(found, wanted)
    for parameter, have, want in zip(parameters, run(found), wanted_gradients, strict=True):
        assert (have is None) == (want is None), parameter
        assert have is None or torch.equal(have, want), parameter


# ----------------------------------------------------------------------------------------------- values and ops


def by_origin(graph: OpGraph, role: Role) -> dict[str, Value]:
    found = list(graph.of_role(role))
    assert len({v.origin for v in found}) == len(found)
    return {v.origin: v for v in found}


@pytest.mark.parametrize(("graph", "model"), [(gpt_graph, gpt), (mlp_graph, mlp)])
def test_every_parameter_is_a_value_of_its_own_name(graph, model):
    found = by_origin(graph(), Role.PARAMETER)
    wanted = dict(model().named_parameters())
    assert {n: v.type.shape for n, v in found.items()} == {n: tuple(p.shape) for n, p in wanted.items()}
    assert all(v.grad and v.type.dtype == "float32" for v in found.values())
    assert figures(graph())["parameters"] == sum(p.numel() for p in wanted.values())


def test_tied_weights_are_one_value_with_two_uses():
    graph = gpt_graph(tie=True)
    parameters = by_origin(graph, Role.PARAMETER)
    assert "token.weight" in parameters and "head.weight" not in parameters
    users = graph.consumers()[parameters["token.weight"].name]
    assert [op.target for op in users] == ["aten.embedding.default", "aten.linear.default"]


def test_frozen_parameters_are_buffers_and_unused_ones_stay(traced):
    _, _, graph = traced["frozen"]
    assert set(by_origin(graph, Role.BUFFER)) == {"base.weight", "base.bias"}
    assert set(by_origin(graph, Role.PARAMETER)) == {"head.weight", "head.bias", "spare.weight", "spare.bias"}
    users = graph.consumers()
    assert users[by_origin(graph, Role.PARAMETER)["spare.weight"].name] == []
    assert [graph.op(n).target for n in graph.prologue] == ["aten.linear.default", "aten.silu.default"]


def test_detached_values_carry_no_gradient(traced):
    _, _, graph = traced["many"]
    (detach,) = (op for op in graph.ops if op.target == "aten.detach.default")
    assert not graph.values[detach.outputs[0]].grad
    (best,) = (op for op in graph.ops if op.target == "aten.max.dim")
    values, indices = (graph.values[name] for name in best.outputs)
    assert values.grad and not indices.grad and indices.type.dtype == "int64"


def test_a_broadcast_of_equal_shapes_is_no_op():
    """F.mse_loss calls it; it would be an op that no rule knows."""

    class Net(Wide):
        def forward(self, x, y):
            return F.mse_loss(self.linear(x), y)

    batch = {**X, "y": torch.randn(4, 2)}
    model = Net(None)
    graph = trace(model, batch)
    assert [op.target for op in graph.ops] == ["aten.linear.default", "aten.mse_loss.default"]
    assert torch.equal(run_graph(graph, model, batch), model(**batch))
    batch["y"] = torch.randn(1, 2)
    assert "aten.broadcast_tensors.default" in {op.target for op in trace(model, batch).ops}


def test_ops_know_their_module_and_line():
    places = {op.module: op.source for op in gpt_graph().ops}
    assert places["layers.1.attention.query"].startswith("gpt.py:")
    assert places[""].startswith("gpt.py:")


class Wide(nn.Module):
    """Returns its loss in a form of one's choosing, beside work that the loss does not need."""

    def __init__(self, form):
        super().__init__()
        self.linear, self.form = nn.Linear(6, 2), form

    def forward(self, x, unread=None):
        y = self.linear(x)
        loss = y.square().mean()
        return self.form(loss, torch.exp(y))


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


class ModelOutput(dict):
    @property
    def loss(self):
        return self["loss"]


FORMS = {
    "tensor": lambda loss, y: loss,
    "one element": lambda loss, y: loss.reshape(1),
    "dict": lambda loss, y: {"logits": y, "loss": loss},
    "mapping": lambda loss, y: UserDict(logits=y, loss=loss),
    "tuple": lambda loss, y: (loss, y),
    "list": lambda loss, y: [loss, y],
    "attribute": lambda loss, y: Output(y, loss),
    "model output": lambda loss, y: ModelOutput(loss=loss, logits=y),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_found_and_other_outputs_are_dropped(form):
    graph = trace(Wide(FORMS[form]), {**X, "unread": torch.zeros(3)})
    assert "aten.exp.default" not in {op.target for op in graph.ops}
    assert [v.name for v in graph.of_role(Role.INPUT)] == ["x", "unread"]
    assert graph.values[graph.output].grad and graph.values[graph.output].type.numel == 1


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (lambda loss, y: y, "found a tensor of shape (4, 2)"),
        (lambda loss, y: {"logits": y}, "found NoneType"),
        (lambda loss, y: (), "found tuple"),
        (lambda loss, y: None, "found NoneType"),
        (lambda loss, y: (y, loss), "found a tensor of shape (4, 2)"),
        (lambda loss, y: 3.0, "found float"),
        (lambda loss, y: y.argmax(), "found a tensor of shape ()"),
    ],
)
def test_no_loss(form, told):
    with pytest.raises(TraceError, match="holds no scalar loss") as refusal:
        trace(Wide(form), X)
    assert told in refusal.value.line() and refusal.value.remedy


def test_pick_loss_does_not_copy():
    loss = torch.tensor(1.0)
    assert pick_loss({"loss": loss}) is loss


@pytest.mark.parametrize("form", [lambda loss, y: loss.detach(), lambda loss, y: torch.ones(()) * 2])
def test_a_loss_that_depends_on_no_parameter(form):
    with pytest.raises(TraceError, match="the loss depends on no trainable parameter"):
        trace(Wide(form), X)


def test_a_loss_of_frozen_parameters_alone():
    with pytest.raises(TraceError, match="the loss depends on no trainable parameter"):
        trace(Wide(FORMS["tensor"]).requires_grad_(False), X)


# ----------------------------------------------------------------------------------------------- their mistakes

USER = """
import torch
from torch import nn


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, x):
        y = self.linear(x).mean()
        if y > 0:  # line 13
            return y
        return -y


class Shapes(Branch):
    def forward(self, x):
        y = self.linear(x)
        return (y @ y).mean()  # line 21


class Raises(Branch):
    def forward(self, x):
        raise KeyError("my own")  # line 26
"""


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    path = tmp_path_factory.mktemp("users") / "their_model.py"
    path.write_text(USER)
    spec = importlib.util.spec_from_file_location("their_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("Branch", 13, "the model cannot be exported"),
        ("Shapes", 21, "the model cannot be exported"),
        ("Raises", 26, "KeyError: 'my own'"),
    ],
)
def test_a_model_that_cannot_be_used_is_told_with_file_and_line(users, name, line, told):
    with pytest.raises(TraceError) as refusal:
        trace(getattr(users, name)(), X)
    assert f"their_model.py:{line}: " in refusal.value.line()
    assert told in refusal.value.line() and "\n" not in refusal.value.line()


class Constant(nn.Module):
    """Makes a tensor out of numbers while it runs, and reads a parameter where no gradient is wanted."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.count = count

    def forward(self, x):
        with torch.no_grad():
            scale = self.layer.weight.abs().mean() + torch.tensor([float(n) for n in range(self.count)]).mean()
        return (self.layer(x) * scale).mean()


def test_constants_and_regions_without_gradient_are_part_of_the_graph():
    model = Constant(4)
    graph = trace(model, X)
    (wanted,) = torch.autograd.grad(model(**X), model.layer.weight)
    loss = run_graph(graph, model, X)
    (found,) = torch.autograd.grad(loss, model.layer.weight)
    assert torch.equal(loss, model(**X)) and torch.equal(found, wanted)


def test_a_large_constant_made_in_forward_is_refused():
    with pytest.raises(TraceError, match="register it as a buffer"):
        trace(Constant(5000), X)


@pytest.mark.parametrize("batch", [{"y": X["x"]}, {}, {**X, "labels": X["x"]}])
def test_wrong_names_in_the_batch(users, batch):
    with pytest.raises(TraceError, match="check the batch's names and shapes"):
        trace(users.Shapes(), batch)


def test_a_batch_of_wrong_shape(users):
    with pytest.raises(TraceError, match="check the batch's names and shapes"):
        trace(users.Shapes(), {"x": torch.zeros(3, 7)})


def test_an_unsupported_dtype():
    with pytest.raises(TraceError, match="unsupported dtype 'complex128'"):
        trace(Wide(lambda loss, y: (y * torch.ones(1, dtype=torch.complex128)).abs().mean().float()), X)


def test_the_sample_batch_has_the_configured_types():
    batch = sample_batch({"a": TensorSpec([2, 3], DType.int64), "b": TensorSpec([4], DType.bool)}, fake_mode())
    assert {n: (tuple(t.shape), t.dtype) for n, t in batch.items()} == {
        "a": ((2, 3), torch.int64),
        "b": ((4,), torch.bool),
    }


# --------------------------------------------------------------------------------------------------- the chain


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


# ---------------------------------------------------------------------------------------------------- verifying


def changed(graph: OpGraph, name: str, **fields) -> OpGraph:
    return replace(graph, ops=tuple(replace(op, **fields) if op.name == name else op for op in graph.ops))


def renamed_output(graph: OpGraph, index: int, output: str) -> OpGraph:
    return changed(graph, graph.ops[index].name, outputs=(output,))


def swapped(items: tuple, a: int, b: int) -> tuple:
    found = list(items)
    found[a], found[b] = found[b], found[a]
    return tuple(found)


def relinked(graph: OpGraph, index: int, **fields) -> OpGraph:
    chain = list(graph.chain)
    chain[index] = replace(chain[index], **fields)
    return replace(graph, chain=tuple(chain))


def reading(op: Op, index: int, value: str) -> Op:
    positional = list(op.args.positional)
    positional[index] = Ref(value)
    return replace(op, args=replace(op.args, positional=tuple(positional)))


BROKEN = {
    "written once": [
        lambda g: renamed_output(g, 1, "not_a_value"),
        lambda g: renamed_output(g, 1, g.ops[0].outputs[0]),
        lambda g: replace(g, values={n: v for n, v in g.values.items() if n != g.ops[3].outputs[0]}),
    ],
    "read after written": [
        lambda g: replace(g, ops=swapped(g.ops, 0, 1)),
        lambda g: replace(g, ops=g.ops[:-1]),
        lambda g: replace(g, output="nothing"),
        lambda g: replace(g, ops=(g.ops[0], reading(g.ops[1], 0, "nothing"), *g.ops[2:])),
    ],
    "chain covers the ops": [
        lambda g: relinked(g, 0, ops=()),
        lambda g: replace(g, chain=g.chain[:-1]),
        lambda g: replace(g, chain=()),
        lambda g: replace(g, chain=swapped(g.chain, 1, 2)),
        lambda g: replace(g, prologue=(g.ops[0].name,)),
        lambda g: relinked(g, -1, output=g.chain[0].output),
    ],
    "links read one activation": [
        lambda g: relinked(g, 2, input=g.chain[0].output),
        lambda g: relinked(g, 0, input=g.chain[0].output),
        lambda g: relinked(g, 1, input=None),
        lambda g: replace(g, ops=(*g.ops[:4], reading(g.ops[4], 0, g.ops[0].outputs[0]), *g.ops[5:])),
        lambda g: relinked(ladder_graph(), 1, common=()),
    ],
    "common values are carried": [
        lambda g: relinked(g, 1, common=(g.chain[0].output,)),  # another link writes it
        lambda g: relinked(g, 0, common=(g.chain[0].output,)),  # it is carried already
        lambda g: relinked(g, 0, common=("nothing",)),
        lambda g: relinked(ladder_graph(), -1, common=(ladder_graph().output,)),  # nobody reads it
        lambda g: relinked(shared_graph(), 1, common=shared_graph().chain[1].common[::-1]),
        lambda g: relinked(shared_graph(), 1, common=shared_graph().chain[1].common * 2),
    ],
}


def test_a_whole_graph_is_accepted():
    verify_graph(mlp_graph())
    verify_graph(gpt_graph())


def test_every_rule_is_broken_by_some_graph():
    assert set(BROKEN) == set(RULES)


@pytest.mark.parametrize(("rule", "number"), [(rule, n) for rule, cases in BROKEN.items() for n in range(len(cases))])
def test_broken_graphs_are_refused(rule, number):
    graph = BROKEN[rule][number](mlp_graph())
    assert next(RULES[rule](graph), None) is not None
    with pytest.raises(InvalidGraph):
        verify_graph(graph)


def test_the_order_of_ops_is_that_of_prologue_and_chain():
    for graph in (gpt_graph(), mlp_graph()):
        order = [*graph.prologue, *reduce(operator.add, (link.ops for link in graph.chain))]
        assert order == [op.name for op in graph.ops]


# ---------------------------------------------------------------------------------------------------- precision


def traced_in(precision: Precision) -> OpGraph:
    """A classifier with a cast of its own, through the stage."""
    config = load_config(Path(__file__).parents[2])
    batch = {"x": TensorSpec([4, 6], DType.float32), "y": TensorSpec([4], DType.int64)}
    model = replace(config.model, module={"_target_": f"{__name__}.Casting"}, batch=batch, precision=precision)
    return run(None, replace(config, model=model)).body


class Casting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x, y):
        return F.cross_entropy((self.layer(x) * self.scale).float(), y)


def types_of(graph: OpGraph) -> dict[str, str]:
    return {v.origin: v.type.dtype for v in graph.values.values() if v.role is not Role.RESULT}


def kinds_of(graph: OpGraph) -> list[str]:
    return [op.target.split(".")[1] for op in graph.ops]


def test_in_float32_a_cast_to_it_falls_away():
    graph = traced_in(Precision.fp32)
    assert types_of(graph) == {"layer.weight": "float32", "layer.bias": "float32", "scale": "float32"} | {
        "x": "float32",
        "y": "int64",
    }
    assert kinds_of(graph) == ["linear", "mul", "cross_entropy_loss"]


def test_in_bfloat16_weights_and_float_inputs_are_bfloat16():
    graph = traced_in(Precision.bf16)
    half = dict.fromkeys(("layer.weight", "layer.bias", "scale", "x"), "bfloat16")
    assert types_of(graph) == half | {"y": "int64"}
    assert kinds_of(graph) == ["linear", "mul", "to", "cross_entropy_loss"]
    assert graph.values[graph.output].type.dtype == "float32"


def test_for_autocast_weights_stay_and_casts_are_kept():
    graph = traced_in(Precision.amp)
    assert types_of(graph) == types_of(traced_in(Precision.fp32))
    assert kinds_of(graph) == ["linear", "mul", "to", "cross_entropy_loss"]
