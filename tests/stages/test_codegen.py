"""The generated program: the same bytes for the same plan, clean text, one function per block, and the same loss."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeline.ir.graph import OpGraph, Role
from pipeline.ir.layout import Layout, R, S
from pipeline.ir.names import look_up
from pipeline.ir.plan import Plan, Prediction, Region, Sharding
from pipeline.lowering import lower
from pipeline.ops.dims import strategies
from pipeline.ops.rule import view_op
from pipeline.ops.table import rule_of
from pipeline.runtime_names import NAMES
from stages.codegen.block import statement
from stages.codegen.module import write_module
from stages.trace.chain import find_chain
from tests.graphs import (
    GRAPHS,
    frontier_of,
    gpt,
    gpt_batch,
    gpt_graph,
    ladder_graph,
    mlp,
    mlp_batch,
    mlp_graph,
    plan_of,
    shared_graph,
    trace,
)
from tests.interpreter import run_graph
from tests.plans import random_regions
from tests.skips import SIZE, STEPS, Ladder, Shared, UNet, Weights, images, random_ops, sequences

RULES = "E,F,I,UP,B,RUF"


def ruff(folder: Path) -> str:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--output-format", "concise"]
    found = subprocess.run(
        [*command, "--select", RULES, "--line-length", "120", "--target-version", "py311", str(folder)],
        capture_output=True,
        text=True,
    )
    return "" if found.returncode == 0 else found.stdout + found.stderr


def kept(graph: OpGraph) -> tuple[Region, ...]:
    return tuple(Region(i, i, False, ()) for i in range(len(graph.chain)))


def nested(graph: OpGraph) -> tuple[Region, ...]:
    """All links but the loss in one region, those but the first in another inside it."""
    last = len(graph.chain) - 1
    if last < 2:
        return kept(graph)
    inner = (Region(0, 0, False, ()), Region(1, last - 1, True, tuple(Region(i, i, False, ()) for i in range(1, last))))
    return (Region(0, last - 1, True, inner), Region(last, last, False, ()))


def everything(graph: OpGraph) -> tuple[Region, ...]:
    """Every link but the loss in a region of its own."""
    last = len(graph.chain) - 1
    own = tuple(Region(i, i, True, (Region(i, i, False, ()),)) for i in range(last))
    return (*own, Region(last, last, False, ()))


def threes(graph: OpGraph) -> tuple[Region, ...]:
    """Three links in each region, the last two of them in one inside it."""
    last = len(graph.chain) - 1
    regions = []
    for first in range(0, last, 3):
        end = min(first + 2, last - 1)
        links = tuple(Region(i, i, False, ()) for i in range(first, end + 1))
        inner = (links[0], Region(first + 1, end, True, links[1:])) if end > first else links
        regions.append(Region(first, end, True, inner))
    return (*regions, Region(last, last, False, ()))


def deep(graph: OpGraph) -> tuple[Region, ...]:
    """A region for every link: it holds the region of the link before."""
    last = len(graph.chain) - 1
    inner: tuple[Region, ...] = ()
    for i in range(last):
        inner = (Region(0, i, True, (*inner, Region(i, i, False, ()))),)
    return (*inner, Region(last, last, False, ()))


SCHEDULES = {"kept": kept, "nested": nested, "everything": everything, "threes": threes, "deep": deep}


def plan_for(graph: OpGraph, sharding: Sharding, devices: int, regions=None) -> Plan:
    nothing = Prediction(0.0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    return Plan((("d0", devices),), "cpu", 0, sharding, regions or kept(graph), nothing, ())


def uniform(graph: OpGraph, devices: int, split: bool = True) -> Sharding:
    """Every op splits its first dim where it can, else it is replicated."""
    chosen = {}
    for op in graph.ops:
        options = strategies(rule_of(op), view_op(graph, op), devices)
        fitting = [s for s in options if split and op.inputs and str(s.inputs[0]) == "S(0)" and s.outputs[0] != R]
        chosen[op.name] = fitting[0] if fitting else options[0]
    return Sharding(
        chosen,
        {v.origin: Layout((R,)) for v in graph.of_role(Role.PARAMETER)},
        {v.name: Layout((R,)) for v in graph.of_role(Role.INPUT)},
    )


def write(graph: OpGraph, plan: Plan) -> str:
    return write_module(graph, plan, lower(graph, plan.sharding))


def load(text: str) -> dict:
    namespace: dict = {}
    exec(compile(text, "module.py", "exec"), namespace)
    return namespace


def functions(text: str) -> list[str]:
    return [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]


# ------------------------------------------------------------------------------------------------- odd models


class Names(nn.Module):
    """Inputs and modules called like the names that generated code uses itself."""

    def __init__(self):
        super().__init__()
        self.x, self.p, self.F, self.torch = (nn.Linear(6, 6) for _ in range(4))
        self.recompute, self.Tensor, self.scope = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, p, F, torch):
        y = self.x(x) + p
        y = self.p(y) * F
        y = self.F(y) + self.torch(x)
        y = self.scope(self.Tensor(self.recompute(y))).relu()
        return (y - x).square().mean() + (y * torch).sum()


class AutoEncoder(nn.Module):
    """Reads its input again at the end, under the name that `forward` uses for the activation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x):
        return F.mse_loss(self.layers(x), x)


class Bare(nn.Module):
    """No function of F, no module, no buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))

    def forward(self, x):
        return torch.tanh(x @ self.weight).sum()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.base.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x):
        return (self.head(F.silu(self.base(x))) * self.scale).mean()


class Unknown(nn.Module):
    """Ops without a rule, with several results, with infinite and text arguments."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, mask):
        first, second, third = self.linear(x).split(2, dim=-1)
        best, _ = torch.max(first, dim=-1)
        hidden = second.masked_fill(mask[:, :2], float("-inf")).logsumexp(-1).clamp(min=-10.0)
        smooth = F.gelu(third, approximate="tanh")
        return torch.cumsum(best, 0).mean() + hidden.mean() + smooth.to(torch.float64).mean().float()


class Stateful(nn.Module):
    """Statistics that change as it runs, changes in place, and a tensor made of numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x):
        y = self.norm(self.first(x))
        y += 1
        y[:, 0] = 0.5
        return self.last(y * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])).square().mean()


class ALongNameOfAModelThatSomebodyLikes(nn.Module):
    """Lines that would be longer than 120 columns."""

    def __init__(self):
        super().__init__()
        self.a_module_with_a_rather_long_and_descriptive_name = nn.ModuleDict(
            {f"another_part_of_the_model_number_{n}": nn.Linear(6, 6) for n in "abc"}
        )

    def forward(self, **inputs):
        total = sum(inputs.values())
        for layer in self.a_module_with_a_rather_long_and_descriptive_name.values():
            total = F.layer_norm(layer(total), (6,)) + sum(inputs.values())
        return total.square().mean()


def x(**more):
    generator = torch.Generator().manual_seed(5)
    return {"x": torch.randn(4, 6, generator=generator), **more}


def odd(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(2)
    other = {
        n: torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(["p", "F", "torch"])
    }
    long = {f"a_long_name_of_an_input_of_the_step_{i}": torch.randn(4, 6) for i in range(6)}
    return {
        "names": lambda: (Names(), x(**other)),
        "autoencoder": lambda: (AutoEncoder(), x()),
        "bare": lambda: (Bare(), x()),
        "frozen": lambda: (Frozen(), x()),
        "unknown": lambda: (Unknown(), x(mask=torch.tensor([[True, False] * 3] * 4))),
        "stateful": lambda: (Stateful(), x()),
        "long": lambda: (ALongNameOfAModelThatSomebodyLikes(), long),
        "gpt": lambda: (gpt(), gpt_batch()),
        "gpt_tied": lambda: (gpt(tie=True), gpt_batch()),
        "mlp": lambda: (mlp(), mlp_batch()),
        "ladder": lambda: (Ladder(), sequences()),
        "shared": lambda: (Shared(), sequences()),
        "ladder_dropout": lambda: (Ladder(dropout=0.3), sequences()),
        "shared_dropout": lambda: (Shared(dropout=0.3), sequences()),
        "unet": lambda: (UNet(), images()),
    }[name]()


ODD = ("names", "autoencoder", "bare", "frozen", "unknown", "stateful", "long", "unet")


@cache
def odd_graph(name: str) -> OpGraph:
    return GRAPHS[name]() if name in GRAPHS else trace(*odd(name))


# ------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("name", GRAPHS)
def test_the_same_plan_gives_the_same_bytes(name):
    graph, plan = GRAPHS[name](), plan_of(name)
    assert write(graph, plan) == write(graph, plan) == write(trace(*odd(name)), plan_of(name))


def texts() -> dict[str, str]:
    """Every point of the frontiers, tight budgets, and the odd models, whole and split, with regions in regions."""
    found = {}
    for name in GRAPHS:
        graph = GRAPHS[name]()
        for number, point in enumerate(frontier_of(name).points):
            found[f"{name}_{number}"] = write(graph, plan_for(graph, point.sharding, 2))
            found[f"{name}_{number}_nested"] = write(graph, plan_for(graph, point.sharding, 2, nested(graph)))
        found[f"{name}_full"] = write(graph, plan_of(name, recompute="full"))
    for name in ODD:
        graph = odd_graph(name)
        for devices in (1, 2):
            sharding = uniform(graph, devices)
            found[f"{name}_{devices}"] = write(graph, plan_for(graph, sharding, devices))
            found[f"{name}_{devices}_nested"] = write(graph, plan_for(graph, sharding, devices, nested(graph)))
    return found


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return texts()


def test_the_text_is_clean(written, tmp_path):
    for name, text in written.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert ruff(tmp_path) == ""


def test_ruff_is_really_asked(tmp_path):
    (tmp_path / "bad.py").write_text("import os\n")
    assert "F401" in ruff(tmp_path)


def test_every_text_compiles_and_no_line_is_too_long(written):
    for name, text in written.items():
        compile(text, name, "exec")
        assert max(map(len, text.splitlines())) <= 120, name
        assert text.endswith("\n") and not text.endswith("\n\n")


def test_what_is_imported_is_offered_by_the_runtime(written):
    for text in written.values():
        (node,) = (n for n in ast.parse(text).body if isinstance(n, ast.ImportFrom) and n.module == "pipeline.runtime")
        assert {alias.name for alias in node.names} <= set(NAMES)


# --------------------------------------------------------------------------------------------------- functions


def test_a_deep_gpt_has_no_more_functions_than_a_shallow_one():
    texts_ = []
    for layers in (2, 12):
        graph = gpt_graph(layers)
        texts_.append(write(graph, plan_for(graph, uniform(graph, 2), 2)))
    shallow, deep = texts_
    assert functions(shallow) == functions(deep)
    assert len(functions(deep)) == 7
    # a layer more is two calls more, and two lines that take its parameters
    assert len(deep.splitlines()) - len(shallow.splitlines()) <= 10 * 3


def test_each_block_is_called_with_its_own_parameters():
    graph = gpt_graph(2)
    text = write(graph, plan_for(graph, uniform(graph, 2), 2))
    calls = re.findall(r"^        x = (\w+)\((.*)\)  # (layers\.\d+)", text, re.M)
    assert [(name, scope) for name, _, scope in calls] == [
        (f"layers_{letter}", f"layers.{i}") for i in range(2) for letter in "ab"
    ]
    assert all(f"self.{scope.replace('.', '_')}" in arguments for _, arguments, scope in calls)


def test_common_values_are_returned_beside_x_and_passed_on():
    graph = shared_graph()
    text = write(graph, plan_for(graph, uniform(graph, 1), 1))
    forward = text[text.index("def forward") :]
    assert "        x, tanh, exp, gt = model_a(x, inputs, self.whole)\n" in forward
    for n in range(3):
        assert f"        x = layers(x, tanh, exp, gt, self.layers_{n})  # layers.{n}\n" in forward
    assert (
        "def model_a(x: Tensor, inputs: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:" in text
    )
    assert functions(text) == ["encoder", "model_a", "layers", "model_b"]


def test_links_that_read_different_skips_share_a_function():
    graph = ladder_graph()
    text = write(graph, plan_for(graph, uniform(graph, 1), 1))
    calls = re.findall(r"^        x = (\w+)\(x, (tanh\w*)\)$", text, re.M)
    assert [skip for _, skip in calls] == ["tanh_2", "tanh_1", "tanh"]
    assert len({function for function, _ in calls}) == 1


def test_a_region_takes_what_it_reads_and_returns_what_is_read_after_it():
    graph = shared_graph()
    inner = (Region(1, 2, True, tuple(Region(i, i, False, ()) for i in (1, 2))), Region(3, 3, False, ()))
    outer = Region(1, 3, True, inner)
    text = write(graph, plan_for(graph, uniform(graph, 1), 1, (kept(graph)[0], outer, *kept(graph)[4:])))
    assert "        x, tanh, exp, gt = recompute(self.links_1_to_3, x, inputs)\n" in text
    assert "    def links_1_to_3(self, x: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:\n" in text
    assert "        x, tanh, exp, gt = recompute(self.links_1_to_2, x, inputs)\n" in text
    readers = write(graph, plan_for(graph, uniform(graph, 1), 1, (*kept(graph)[:2], *everything(graph)[2:])))
    assert "        x = recompute(self.links_2_to_2, x, tanh, exp, gt)\n" in readers
    whole = write(graph, plan_for(graph, uniform(graph, 1), 1, nested(graph)))
    assert "        x = recompute(self.links_0_to_4, inputs)\n" in whole  # written and read inside


def test_a_layer_that_is_split_otherwise_has_functions_of_its_own():
    graph = gpt_graph(2)
    sharding = other_first_layer(graph)
    plain = functions(write(graph, plan_for(graph, uniform(graph, 2), 2)))
    assert len(functions(write(graph, plan_for(graph, sharding, 2)))) > len(plain)


# -------------------------------------------------------------------------------------------------- PARAMETERS


def other_first_layer(graph: OpGraph) -> Sharding:
    """As `uniform`, but layer 0 computes `up` by columns, and keeps its weights split."""
    sharding = uniform(graph, 2)
    (op,) = (op for op in graph.ops if op.module == "layers.0.up")
    (columns,) = (
        s for s in strategies(rule_of(op), view_op(graph, op), 2) if [str(i) for i in s.inputs[1:]] == ["S(0)", "S(0)"]
    )
    storage = {**sharding.storage, "layers.0.up.weight": Layout((S(0),)), "layers.0.up.bias": Layout((S(0),))}
    return Sharding({**sharding.strategies, op.name: columns}, storage, sharding.inputs)


def check_parameters(graph: OpGraph, sharding: Sharding) -> dict:
    program = lower(graph, sharding)
    table = load(write_module(graph, plan_for(graph, sharding, 2), program))["PARAMETERS"]
    for value in graph.of_role(Role.PARAMETER):
        stored = str(sharding.storage[value.origin])
        wanted = (stored, "d0" if value.name in program.reduced else "", str(sharding.state.get(value.origin, stored)))
        assert look_up(table, value.origin) == wanted, value.origin
    return table


@pytest.mark.parametrize("name", ["gpt", "mlp", "gpt_tied"])
def test_every_parameter_is_looked_up_right(name):
    for point in frontier_of(name).points:
        check_parameters(GRAPHS[name](), point.sharding)


def test_equal_layers_are_one_row_and_others_their_own():
    graph = gpt_graph(2)
    alike = check_parameters(graph, uniform(graph, 2))
    assert "layers.*.up.weight" in alike and "layers.0.up.weight" not in alike
    differing = check_parameters(graph, other_first_layer(graph))
    assert differing["layers.0.up.weight"][0] == "S(0)" and differing["layers.1.up.weight"][0] == "R"
    assert "layers.*.up.weight" not in differing and "layers.*.down.weight" in differing


def test_states_of_the_optimizer_have_their_own_layout():
    graph = gpt_graph(2)
    sharding = uniform(graph, 2)
    shards = {name: Layout((S(0),)) for name in sharding.storage}
    table = check_parameters(graph, replace(sharding, state=shards))
    assert table["layers.*.up.weight"] == ("R", "d0", "S(0)")
    spare = replace(next(graph.of_role(Role.PARAMETER)), name="spare", origin="spare")
    unread = replace(graph, values={**graph.values, "spare": spare})
    more = replace(
        sharding,
        storage={**sharding.storage, "spare": Layout((R,))},
        state={**shards, "spare": Layout((S(0),))},
    )
    rows = load(write(unread, plan_for(unread, more, 2)))
    assert rows["PARAMETERS"]["spare"] == ("R", "", "R"), "nothing updates what no op reads"


def test_inputs_and_mesh_are_told():
    graph = mlp_graph()
    point = frontier_of("mlp").points[0]
    found = load(write(graph, plan_for(graph, point.sharding, 2)))
    assert found["MESH"] == {"d0": 2} and found["DEVICE"] == torch.device("cpu")
    assert found["INPUTS"] == {name: str(layout) for name, layout in point.sharding.inputs.items()}


# --------------------------------------------------------------------------------------------------- execution


def check_program(model: nn.Module, batch: dict, graph: OpGraph, regions: tuple[Region, ...]) -> None:
    """Loss and gradients are those of the user's module, with the same random numbers; sums may be in another order."""
    program = load(write(graph, plan_for(graph, uniform(graph, 1), 1, regions)))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(3)
    wanted = model(**batch)
    gradients = torch.autograd.grad(wanted, parameters)
    torch.manual_seed(3)
    found = program["Program"](tensors).forward(**batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    again = torch.autograd.grad(found, parameters)
    exact = found.dtype == torch.float64
    torch.testing.assert_close(again, gradients, rtol=1e-10 if exact else 1e-6, atol=1e-12 if exact else 1e-7)


@pytest.mark.parametrize("regions", SCHEDULES)
@pytest.mark.parametrize("name", ["gpt", "gpt_tied", "mlp", "ladder", "shared", *ODD])
def test_on_one_rank_the_program_is_the_model(name, regions):
    """No conversion is needed."""
    graph = odd_graph(name)
    check_program(*odd(name), graph, SCHEDULES[regions](graph))


@pytest.mark.parametrize("regions", SCHEDULES)
@pytest.mark.parametrize("name", ["ladder_dropout", "shared_dropout"])
def test_recompute_draws_the_same_random_numbers(name, regions):
    graph = odd_graph(name)
    assert graph.common and sum(op.target == "aten.dropout.default" for op in graph.ops) > 2
    check_program(*odd(name), graph, SCHEDULES[regions](graph))


@cache
def t5() -> tuple[nn.Module, dict[str, torch.Tensor], OpGraph]:
    """In double precision, so that the order of a sum does not show."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    from tests.plans import batch_of, module_of

    model, batch = module_of("t5"), batch_of("t5")
    return model, batch, trace(model, batch)


@pytest.mark.parametrize("regions", SCHEDULES)
def test_t5_under_recompute(regions):
    model, batch, graph = t5()
    check_program(model, batch, graph, SCHEDULES[regions](graph))


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 1000))
def test_any_graph_under_any_recompute(steps, seed):
    """Skips of any length from anywhere to anywhere, regions around any of them."""
    ops = random_ops(steps)
    graph = find_chain(ops)
    draw = random.Random(seed)
    regions = random_regions(0, len(graph.chain) - 1, draw, draw.randint(0, 3))
    model = Weights(ops)
    batch = {"inputs": torch.randn(SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}
    program = load(write(graph, plan_for(graph, uniform(graph, 1), 1, regions)))
    wanted = run_graph(graph, model, batch)
    found = program["Program"](dict(model.named_parameters())).forward(**batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(wanted, parameters, allow_unused=True, materialize_grads=True)
    again = torch.autograd.grad(found, parameters, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(again, gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("regions", [kept, nested], ids=["kept", "nested"])
def test_statistics_change_once_a_step(regions):
    """A recompute region runs batch norm twice, its running statistics move as if it ran once."""
    model, batch = odd("stateful")
    graph = odd_graph("stateful")
    program = load(write(graph, plan_for(graph, uniform(graph, 1), 1, regions(graph))))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(2):
        program["Program"]({**dict(model.named_parameters()), **buffers}).forward(**batch).backward()
        model(**batch)
    assert buffers["norm.num_batches_tracked"] == 2
    torch.testing.assert_close(buffers, dict(model.named_buffers()), rtol=0, atol=0)


# -------------------------------------------------------------------------------------------------- statements


def test_a_short_statement_is_one_line():
    assert statement("y = F.relu(x)", "# R [1]") == ["y = F.relu(x)  # R [1]"]


def test_a_long_statement_is_wrapped():
    lines = statement(f"y = F.layer_norm(x, (128,), {'w' * 50}, {'b' * 30}, 1e-05)", "# S(0) [8, 64, 128]")
    assert lines[0] == "y = F.layer_norm(" and lines[-1] == ")  # S(0) [8, 64, 128]" and len(lines) == 3
    lines = statement(f"y = f({', '.join(['w' * 50] * 4)}, (1, 2))", "# R []")
    assert lines[1:-1] == [*[f"    {'w' * 50},"] * 4, "    (1, 2),"]
    assert "".join(lines).startswith("y = f(") and max(map(len, lines)) <= 108


def test_wrapping_does_not_change_what_is_called():
    text = f"y = {'a' * 60}.view(8, 64, 4, 32).transpose(1, 2).reshape(8, 64, 128).contiguous()"
    wrapped = "\n".join(statement(text, "# S(0) [8, 64, 128]"))
    assert ast.dump(ast.parse(wrapped)) == ast.dump(ast.parse(text))
    text = f"y = {'a' * 60} * f({'b' * 60}) + g(1)"
    assert ast.dump(ast.parse("\n".join(statement(text, "# R")))) == ast.dump(ast.parse(text))
