"""The generated program: the same bytes for the same plan, clean text, one function per block."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.stage import Inputs
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import Layout, R, S
from shardwright.pipeline.ir.names import look_up
from shardwright.pipeline.ir.plan import Sharding
from shardwright.pipeline.ir.program import Convert
from shardwright.pipeline.ops.dims import strategies
from shardwright.pipeline.ops.mesh import view_op
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.runtime.compiler.compiled import use_kernels_of
from shardwright.pipeline.runtime.programs.source import load_program
from shardwright.pipeline.runtime_names import NAMES
from shardwright.pipeline.sharding.conversions import gathered_together
from shardwright.pipeline.sharding.lowering import lower
from shardwright.stages.codegen.block import statement
from shardwright.stages.codegen.module import write_module
from shardwright.stages.codegen.run import run
from tests import plans, storage_plans
from tests.graphs import GRAPHS, SILENT, frontier_of, gpt_graph, mlp_graph, plan_of, trace
from tests.programs import ODD, functions, load, nested, odd, odd_graph, plan_for, uniform, write

ROOT = Path(__file__).parents[2]
RULES = "E,F,I,UP,B,RUF"


def ruff(folder: Path) -> str:
    """What it finds, and what it would write otherwise."""
    shared = ["--isolated", "--no-cache", "--line-length", "120", "--target-version", "py311"]
    found = ""
    for command in (["check", "--output-format", "concise", "--select", RULES], ["format", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *shared, str(folder)], capture_output=True, text=True
        )
        found += "" if done.returncode == 0 else done.stdout + done.stderr
    return found


# ------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("name", ["mlp", "gpt_tied"])
def test_the_same_plan_gives_the_same_bytes(name):
    graph, plan = GRAPHS[name](), plan_of(name)
    assert write(graph, plan) == write(graph, plan) == write(trace(*odd(name)), plan_of(name))


PRINT_DIGEST = "from tests.stages.test_codegen import digest_of_texts; print(digest_of_texts())"


def digest_of_texts() -> str:
    graph = mlp_graph()
    found = [write(graph, plan_of("mlp")), write(graph, plan_of("mlp", recompute="full"))]
    for name in ("gpt", "names", "frozen", "stateful", "unet"):
        graph = odd_graph(name)
        found.append(write(graph, plan_for(graph, uniform(graph, 2), 2, nested(graph))))
    return hashlib.sha256("".join(found).encode()).hexdigest()


def test_the_same_plan_gives_the_same_bytes_in_every_process():
    """Sets of strings have another order in each: in this one, and in one with another seed."""
    seed = "12345" if os.environ.get("PYTHONHASHSEED") != "12345" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-W", "ignore", "-c", PRINT_DIGEST]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest_of_texts()


def test_the_header_names_the_plan_and_how_to_write_it_again(tmp_path):
    """The digest is that of plan.json, and the one by which the module is checked."""
    plan = artifacts.make("plan", plan_of("mlp"), [], {})
    inputs = Inputs(tmp_path, {"graph": artifacts.make("graph", mlp_graph(), [], {}), "plan": plan}, SILENT, None)
    made = artifacts.make("module", run(inputs, None).body, inputs.artifacts.values(), {})
    recorded = json.loads(artifacts.save(plan, tmp_path).read_text())["digest"]
    text = artifacts.save(made, tmp_path).read_text()
    assert recorded == plan.digest
    assert f"# shardwright input plan {recorded}\n" in text
    docstring = ast.get_docstring(ast.parse(text))
    assert f"The plan's digest is {recorded}." in docstring and "`dvc repro codegen`" in docstring
    assert ruff(tmp_path / "runs" / "codegen") == ""
    assert max(map(len, text.splitlines())) <= 120
    assert artifacts.load("module", tmp_path) == made


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
    (tmp_path / "bad.py").write_text("import os\n\n\nx = f( 1)\n")
    found = ruff(tmp_path)
    assert "F401" in found and "+x = f(1)" in found


def test_every_text_compiles_and_no_line_is_too_long(written):
    for name, text in written.items():
        compile(text, name, "exec")
        assert max(map(len, text.splitlines())) <= 120, name
        assert text.endswith("\n") and not text.endswith("\n\n")


def test_calls_are_public(written):
    """Those of torch at least: an op of a library of its own has no other name."""
    assert [name for name, text in written.items() if "torch.ops.aten" in text] == []


def test_what_is_imported_is_offered_by_the_runtime(written):
    for text in written.values():
        (node,) = (
            n
            for n in ast.parse(text).body
            if isinstance(n, ast.ImportFrom) and n.module == "shardwright.pipeline.runtime"
        )
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


class Turned(nn.Module):
    """Each layer makes its own view of a table that is there before the chain, as rotary embeddings do."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x):
        table = torch.arange(4.0).cos()
        for layer in self.layers:
            x = torch.tanh(layer(x)) * table.unsqueeze(0) + table.exp().unsqueeze(0)
        return x.square().mean()


def test_layers_that_each_have_their_own_view_of_a_table_share_a_function():
    found = []
    for layers in (2, 6):
        graph = trace(Turned(layers), {"x": torch.zeros(4, 4)})
        found.append(write(graph, plan_for(graph, uniform(graph, 2), 2)))
    assert functions(found[0]) == functions(found[1])


def test_each_block_is_called_with_its_own_parameters():
    graph = gpt_graph(2)
    text = write(graph, plan_for(graph, uniform(graph, 2), 2))
    calls = re.findall(r"^        x = (\w+)\((.*)\)  # (layers\.\d+)", text, re.M)
    assert [(name, scope) for name, _, scope in calls] == [
        (f"layers_{letter}", f"layers.{i}") for i in range(2) for letter in "ab"
    ]
    assert all(f"self.{scope.replace('.', '_')}" in arguments for _, arguments, scope in calls)


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
    table = load(write_module(graph, plan_for(graph, sharding, 2)))["PARAMETERS"]
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


def test_a_cpu_that_is_faster_without_onednn_is_told(tmp_path, monkeypatch):
    graph, plan = mlp_graph(), plan_of("mlp")
    assert "ONEDNN" not in write(graph, plan)
    (tmp_path / "module.py").write_text(write(graph, replace(plan, onednn=False)))
    assert not ruff(tmp_path)
    program = load_program(str(tmp_path / "module.py"))
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    use_kernels_of(object())
    assert torch.backends.mkldnn.enabled
    use_kernels_of(program)
    assert not torch.backends.mkldnn.enabled


def test_inputs_and_mesh_are_told():
    graph = mlp_graph()
    point = frontier_of("mlp").points[0]
    found = load(write(graph, plan_for(graph, point.sharding, 2)))
    assert found["MESH"] == {"d0": 2} and found["DEVICE"] == torch.device("cpu") and found["MICRO_BATCHES"] == 1
    assert found["INPUTS"] == {name: str(layout) for name, layout in point.sharding.inputs.items()}


# ----------------------------------------------------------------------------------------------- micro-batches


class Tied(nn.Module):
    """Two links read one weight; names are those that the program uses itself."""

    def __init__(self):
        super().__init__()
        self.copies = nn.Linear(4, 4)

    def forward(self, x, p):
        y = torch.tanh(self.copies(x)) * p
        return (torch.tanh(self.copies(y)) - x).square().mean()


def test_what_links_share_is_made_once_for_all_micro_batches(tmp_path):
    graph = trace(Tied(), {"x": torch.zeros(4, 4), "p": torch.zeros(4, 4)})
    sharding = uniform(graph, 2)
    sharding = replace(sharding, storage={name: Layout((S(0),)) for name in sharding.storage})
    plan = plan_for(graph, sharding, 2, nested(graph))
    one, three = write(graph, plan), write(graph, replace(plan, micro_batches=3))
    assert "def copies(self)" not in one and "\nMICRO_BATCHES = 1 " in one and "\nMICRO_BATCHES = 3 " in three
    assert 'self.copies = scope(tensors, "copies")' not in three, "it would hide the method"
    made, _, forward = three.partition("    def copies(self)")[2].partition("    def forward(self, **batch: Tensor)")
    assert made.count("all_gather(") == 2 and "all_gather(" not in forward
    (returned,) = re.findall(r"return \{(.*)\}", made)
    names = re.findall(r'"(\w+)": (\w+)', returned)
    assert len(names) == 2
    for key, name in names:
        assert key == name and f'{name} = batch["{name}"]' in forward
    assert one.count("all_gather(") == 2
    for number, text in enumerate((one, three)):
        (tmp_path / f"{number}.py").write_text(text)
    assert ruff(tmp_path) == ""


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


# -------------------------------------------------------------------------------------------------- loss, ZeRO-3


def test_the_sum_of_the_loss_is_the_last_line_and_alone_is_last():
    graph, plan = plans.graph_of("gpt"), storage_plans.plan_named("gpt", "ddp")
    text = write_module(graph, plan)
    (line,) = (line for line in text.splitlines() if "is_last=True" in line)
    before_class = text[: text.index("class Program")].rstrip().splitlines()
    assert before_class[-2] == line and "all_reduce(" in line and "P -> R []" in line


def test_targets_are_counted_before_the_first_link():
    graph, plan = plans.graph_of("gpt"), storage_plans.plan_named("gpt", "ddp")
    text = write_module(graph, plan)
    forward = text[text.index("def forward") :].splitlines()
    (place,) = (n for n, line in enumerate(forward) if "count_targets(" in line)
    (target,) = re.findall(r"count_targets\((\w+), axis=\"\w+\"\)  #", forward[place])
    first = next(n for n, line in enumerate(forward) if line.strip().startswith("x = "))
    assert any(line.strip().startswith(f"{target} =") for line in forward[:place]) and place < first
    split = plans.megatron(graph, 2)
    assert "count_targets" not in write_module(graph, split), "all ranks have all targets"


@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3_on_both", "ddp_zero3", "zero3_tp"])
def test_a_function_gathers_its_parameters_together(name, tmp_path):
    """Before all else, one collective for each axis; each parameter on a line with its layouts."""
    plan = storage_plans.plan_named("gpt8" if "_" in name else "gpt", name)
    graph = plans.graph_of("gpt8" if "_" in name else "gpt")
    program = lower(graph, plan.sharding)
    text = write_module(graph, plan)
    parameters = {value.name for value in graph.of_role(Role.PARAMETER) if name == "zero2"}
    for steps in program.links:
        gathers = [isinstance(s, Convert) and (s.again or s.source.value in parameters) for s in steps]
        assert gathers == sorted(gathers, reverse=True)
        assert {step.target for run in gathered_together(graph, steps, plan.sizes) for step in run} <= {
            step.target for step, first in zip(steps, gathers, strict=True) if first
        }
    blocks = [ast.unparse(node) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    function = "all_gather_together(" if name == "zero2" else "regather_together("
    together = [block for block in blocks if function in block]
    assert together and all(block.count(function) <= len(plan.sizes) for block in together)
    layer = next(block for block in together if "up.weight" in block)
    assert re.search(r"\(p\['up.weight'\], 0(, \d+)?\)", layer)
    assert re.search(r'    \(p\["up.weight"\], 0.*\),  # .*S\(0.* -> .*B.* \[\d+, \d+\]', text)
    (tmp_path / "module.py").write_text(text)
    assert ruff(tmp_path) == ""
