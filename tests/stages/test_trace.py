"""The traced graph is the user's module: the same loss and gradients; a mistake is told with its line."""

from __future__ import annotations

import importlib.util
from collections import UserDict
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.pipeline.base.errors import TraceError
from shardwright.pipeline.config import DType, Precision, TensorSpec, load_config
from shardwright.pipeline.ir.graph import OpGraph, Role, Value
from shardwright.pipeline.tracing.build import fake_mode, sample_batch
from shardwright.pipeline.user.loss import pick_loss
from shardwright.stages.trace.run import figures, run
from tests.graphs import gpt, gpt_batch, gpt_graph, mlp, mlp_batch, mlp_graph, trace
from tests.interpreter import run_graph

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


class Refused(nn.Module):
    def __init__(self, does) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(6, 8), does

    def forward(self, x):
        y = self.layer(x)
        return self.does(y) + y.square().mean()


def _branch(y):
    return y.sum() * 2 if y.sum() > 0 else y.sum()


def _ctc(y):
    logs = y.log_softmax(-1)[:, None].expand(len(y), 2, 8)
    return F.ctc_loss(logs, torch.ones(2, 1, dtype=torch.long), torch.full((2,), len(y)), torch.full((2,), 1))


def _experts(y):
    """Counts of a size that only checks read; as mixtures of experts balance their load."""
    counts = torch.bincount(y.argmax(-1), minlength=8).float()
    return (y.softmax(-1).mean(0) * counts).sum()


@pytest.mark.parametrize(
    ("does", "told", "remedy"),
    [
        (_branch, "cannot be exported: a branch on a tensor's value: ", "`torch.where`"),
        (_ctc, "cannot be exported: an op whose result has a size that depends on values: ", "an op of your own"),
        (lambda y: sum(y.split(y.argmax(-1).bincount(minlength=8).tolist())).sum(), "is used as a size", "shapes"),
        (
            lambda y: torch.distributions.Normal(y, 1.0, validate_args=True).log_prob(y).sum(),
            "inside the package torch (",
            "setting of torch",
        ),
        (lambda y: y[y[:, 0] > 0].sum(), "aten.index.Tensor makes a tensor whose size depends on values", "a mask"),
        (lambda y: y.argmax(-1).bincount().float().std(), "aten.bincount.default makes a tensor whose", "F.one_hot"),
        (lambda y: y.sum() * y.max().item(), "aten.item.default takes a number out of a tensor", "keep it in a tensor"),
    ],
)
def test_a_refusal_says_what_kind_of_thing_is_in_the_way(does, told, remedy) -> None:
    with pytest.raises(TraceError) as refusal:
        trace(Refused(does), X)
    line = refusal.value.line()
    assert "test_trace.py:" in line and told in line and remedy in line and "out-of-place" not in line


def test_a_branch_inside_an_installed_package_is_not_told_as_the_users(tmp_path, monkeypatch) -> None:
    package = tmp_path / "site-packages/their_layers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def doubled(y):\n    return y * 2 if y.sum() > 0 else y\n")
    monkeypatch.syspath_prepend(package.parent)
    their_layers = importlib.import_module("their_layers")
    with pytest.raises(TraceError) as refusal:
        trace(Refused(lambda y: their_layers.doubled(y).sum()), X)
    line = refusal.value.line()
    assert "test_trace.py:" in line and "inside the package their_layers (__init__.py:2)" in line
    assert "it is not in your code: look for a setting of their_layers" in line


def test_sizes_that_only_checks_read_are_dropped() -> None:
    graph = trace(Refused(_experts), X)
    counted = next(op for op in graph.ops if op.target == "aten.bincount.default")
    assert graph.values[counted.outputs[0]].type.shape == (8,)
    assert not any("sym_size" in op.target for op in graph.ops)


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
    with pytest.raises(TraceError, match="unsupported dtype 'float8_e4m3fn'"):
        trace(Wide(lambda loss, y: y.to(torch.float8_e4m3fn).float().mean()), X)


def test_the_sample_batch_has_the_configured_types():
    batch = sample_batch({"a": TensorSpec([2, 3], DType.int64), "b": TensorSpec([4], DType.bool)}, fake_mode())
    assert {n: (tuple(t.shape), t.dtype) for n, t in batch.items()} == {
        "a": ((2, 3), torch.int64),
        "b": ((4,), torch.bool),
    }


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


def test_under_autocast_weights_stay_and_results_have_their_types():
    graph = traced_in(Precision.amp)
    assert types_of(graph) == types_of(traced_in(Precision.fp32))
    assert kinds_of(graph) == ["linear", "mul", "cross_entropy_loss"]  # a product with a buffer of float32 is float32
    assert [kind.dtype for op in graph.ops for kind in graph.types(op.outputs)] == ["bfloat16", "float32", "float32"]


class Normed(nn.Module):
    """A norm as many models have it: in float32, and back in the type that came."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x):
        y = self.layer(x)
        normed = F.layer_norm(y, (5,))
        return (normed.float() * y.float().square().mean().rsqrt()).to(normed.dtype).square().float().mean()


X6 = {"x": torch.zeros(4, 6)}


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "bfloat16"), ("cuda", "float32")])
def test_a_cast_to_the_type_of_another_is_that_of_the_device(device, dtype):
    graph = trace(Normed(), X6, device, amp=True)
    casts = [op.args.positional[1].name for op in graph.ops if op.target == "aten.to.dtype"]
    (norm,) = (op for op in graph.ops if op.target.startswith("aten.layer_norm"))
    assert graph.types(norm.outputs)[0].dtype == dtype and ("bfloat16" in casts) == (dtype == "bfloat16")


class Region(nn.Module):
    """Autocast within forward()."""

    def __init__(self, device="cpu", enabled=False, dtype=torch.bfloat16):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.how = {"device_type": device, "enabled": enabled, "dtype": dtype}

    def forward(self, x):
        y = self.layer(x)
        with torch.autocast(**self.how):
            y = torch.relu(self.layer(y.float())).reshape(-1, 3, 2)
        return self.layer(y.flatten(1)).float().mean()


def test_what_a_module_computes_without_autocast_is_marked():
    for device in ("cpu", "cuda"):
        graph = trace(Region(device), X6, device, amp=True)
        exact = [op.target.split(".")[1] for op in graph.ops if op.exact]
        products = [graph.types(op.outputs)[0].dtype for op in graph.ops if op.target == "aten.linear.default"]
        assert exact == ["linear"] and products == ["bfloat16", "float32", "bfloat16"], device


def test_autocast_that_is_off_anyway_marks_nothing():
    graph = trace(Region(), X6)
    assert not any(op.exact for op in graph.ops) and kinds_of(graph).count("linear") == 3
    other = trace(Region("cuda"), X6, "cpu", amp=True)  # of a device that is not the plan's
    assert not any(op.exact for op in other.ops)


def test_autocast_to_bfloat16_within_autocast_changes_nothing():
    inside = trace(Region(enabled=True), X6, amp=True)
    assert not any(op.exact for op in inside.ops)
    products = [op.outputs[0] for op in inside.ops if op.target == "aten.linear.default"]
    assert [kind.dtype for kind in inside.types(products)] == ["bfloat16"] * 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("amp", "dtype"), [(False, torch.bfloat16), (True, torch.float16)])
def test_autocast_that_forward_turns_on_is_refused_with_its_line(device, amp, dtype):
    with pytest.raises(TraceError, match=f"turns autocast to {str(dtype)[6:]} on.*precision: amp") as refused:
        trace(Region(device, True, dtype), X6, device, amp=amp)
    assert "test_trace.py" in refused.value.where


def test_a_loss_that_autocast_refuses():
    def binary(x: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x))

    with pytest.raises(TraceError, match="binary_cross_entropy_with_logits"):
        trace(Refused(binary), X, "cuda", amp=True)


@pytest.mark.parametrize("projected", [0, 3])
def test_the_last_states_of_an_lstm_are_exported_in_their_shape(
    projected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch before 2.13 leaves a dim in them, as here."""
    from torch._decomp import decompositions

    plain = decompositions.one_layer_lstm

    def before(*given: object, **named: object) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        made, states = plain(*given, **named)
        return made, tuple(state.unsqueeze(0) for state in states)

    class LastState(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = nn.LSTM(6, 5, 2, proj_size=projected, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _, (hidden, cell) = self.core(x.double())
            return hidden[-1].square().mean() + cell[0].sum()

    monkeypatch.setattr(decompositions, "one_layer_lstm", before)
    graph = trace(LastState(), {"x": torch.randn(4, 3, 6)})
    (op,) = (op for op in graph.ops if op.target == "aten.lstm.input")
    assert [kind.shape for kind in graph.types(op.outputs)][1:] == [(2, 3, projected or 5), (2, 3, 5)]
