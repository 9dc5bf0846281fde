"""Who may import whom: read from the source with `ast`, so that an import inside a function counts as well."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwright.pipeline.ops.table import FAMILIES

PROJECT = Path(__file__).parents[2]
ROOMS = ("pipeline", "stages", "shardwright/api")
REACH_ACROSS = {"stages.command_line", "stages.check", "stages.commands", "stages.summary"}
OF_MLFLOW = {"pipeline.tracking.sender", "pipeline.tracking.store"}
SLOW = {"omegaconf", "pyomo", "mlflow", "dvc"}
LIGHT = (
    "pipeline.ir",
    "pipeline.ops",
    "pipeline.cost",
    "pipeline.runtime",
    "pipeline.rates",
    "pipeline.sharding",
)
LIGHT_FILES = ("stages.checkpoint.recompute.rotor", "stages.cluster.probe", "stages.cluster.join")


@dataclass(frozen=True)
class Import:
    target: str  # the module, or the module and a name of it
    top: bool  # runs when the module is imported
    line: int


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file of every module of pipeline, stages and shardwright/api, without `shardwright`."""
    found = {}
    for path in sorted(path for room in ROOMS for path in root.glob(f"{room}/**/*.py")):
        parts = tuple(_ours(".".join(path.relative_to(root).with_suffix("").parts)).split("."))
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path) -> list[Import]:
    tree = ast.parse(path.read_text())
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend(Import(_ours(alias.name), top, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*parents, *([base] if base else [])])
                found.extend(Import(_ours(f"{base}.{alias.name}"), top, child.lineno) for alias in child.names)
            elif _dynamic(child):
                found.append(Import(_ours(_dynamic(child)), top, child.lineno))
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, top and not inside and not _only_for_types(child))

    visit(tree, True)
    return found


def _ours(target: str) -> str:
    return target.removeprefix("shardwright.")


def _dynamic(node: ast.AST) -> str:
    """`importlib.import_module("constant")` or `f"constant{...}"`: the constant part."""
    if not (isinstance(node, ast.Call) and node.args and _last_word(node.func).endswith("import_module")):
        return ""
    argument = node.args[0]
    if isinstance(argument, ast.JoinedStr) and argument.values and isinstance(argument.values[0], ast.Constant):
        argument = argument.values[0]
    return str(argument.value).rstrip(".") if isinstance(argument, ast.Constant) else ""


def _last_word(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def resolve(target: str, known: dict[str, Path]) -> str:
    """The module of ours that an import means: `pipeline.ir.graph.Op` -> `pipeline.ir.graph`; else the target."""
    name = target
    while name:
        if name in known:
            return name
        name = name.rpartition(".")[0]
    return target


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def check(root: Path) -> list[str]:
    known = modules(root)
    graph = {name: imports(name, path) for name, path in known.items()}
    return sorted(
        {
            *_directions(graph, known),
            *_cycles(graph, known),
            *_mlflow(graph),
            *_standard_library(graph, known),
            *_runtime(graph, known),
            *_light(graph, known),
        }
    )


def _directions(graph, known):
    for name, found in graph.items():
        for item in found:
            target = resolve(item.target, known)
            if within(name, "pipeline") and within(target, "stages"):
                yield f"{name}:{item.line} pipeline imports {target}"
            if not within(name, "api") and within(target, "api"):
                yield f"{name}:{item.line} imports {target}, which is for users"
            if not within(name, "stages") or not within(target, "stages"):
                continue
            own, other = [*name.split("."), ""][1], [*target.split("."), ""][1]
            if name in REACH_ACROSS:
                deep = target.count(".") > 1 or known.get(target, Path()).name == "__init__.py"
                if item.top and deep and target != "stages":
                    yield f"{name}:{item.line} imports {target} before it is needed"
            elif own != other:
                yield f"{name}:{item.line} stage {own} imports {target}"


def _cycles(graph, known):
    edges = {
        name: {resolve(i.target, known) for i in found if i.top} & set(known) - {name}
        for name, found in graph.items()
        if within(name, "pipeline")
    }
    done: set[str] = set()

    def walk(name, path):
        if name in path:
            yield "cycle " + " -> ".join([*path[path.index(name) :], name])
            return
        if name in done:
            return
        for target in sorted(edges.get(name, ())):
            yield from walk(target, [*path, name])
        done.add(name)

    for name in sorted(edges):
        yield from walk(name, [])


def _mlflow(graph):
    for name, found in graph.items():
        if name not in OF_MLFLOW:
            yield from (f"{name}:{i.line} imports mlflow" for i in found if within(i.target, "mlflow"))


def _standard_library(graph, known):
    for name, found in graph.items():
        if within(name, "pipeline.ir"):
            for item in found:
                first = item.target.split(".")[0]
                if first not in sys.stdlib_module_names and not within(resolve(item.target, known), "pipeline.ir"):
                    yield f"{name}:{item.line} pipeline.ir imports {item.target}"


def _runtime(graph, known):
    """A generated program needs torch and pipeline.runtime: that brings nothing else along."""
    ours = ("pipeline.runtime", "pipeline.ir", "pipeline.ops")
    for name, found in graph.items():
        if within(name, "pipeline.runtime"):
            for item in found:
                allowed = item.target.split(".")[0] in {"torch", *sys.stdlib_module_names}
                if not allowed and not any(within(resolve(item.target, known), room) for room in ours):
                    yield f"{name}:{item.line} pipeline.runtime imports {item.target}"


def _light(graph, known):
    """Also through other modules of ours; importing `pipeline.a.b` runs `pipeline.a` too."""
    for name in graph:
        if not any(within(name, part) for part in LIGHT) and name not in LIGHT_FILES:
            continue
        seen: set[str] = set()
        todo = [name]
        while todo:
            here = todo.pop()
            if here in seen or here not in graph:
                continue
            seen.add(here)
            for item in graph[here]:
                if item.target.split(".")[0] in SLOW:
                    yield f"{name} reaches {item.target.split('.')[0]} through {here}:{item.line}"
                target = resolve(item.target, known)
                todo += [target, *(target[:i] for i, letter in enumerate(target) if letter == ".")]


def test_the_project_keeps_the_rules():
    assert check(PROJECT) == []


def test_every_module_is_looked_at():
    known = modules(PROJECT)
    assert {"pipeline.ir.graph", *OF_MLFLOW, "stages.solve.search.backends.glpk", "stages.commands"} <= set(known)
    assert sum(len(imports(name, path)) for name, path in known.items()) > 200


GOOD = {
    "pipeline/__init__.py": "",
    "pipeline/ir/__init__.py": "",
    "pipeline/ir/graph.py": "import json\nfrom pipeline.ir import names\n",
    "pipeline/ir/names.py": "",
    "pipeline/cost.py": "from pipeline.ir.graph import Op\n",
    "pipeline/tracking/sender.py": "def go():\n    import mlflow\n",
    "pipeline/tracking/store.py": "def go():\n    from mlflow.tracking import MlflowClient\n",
    "pipeline/config.py": "import omegaconf\n",
    "stages/__init__.py": "",
    "stages/command_line.py": "from stages import commands\ndef go():\n    from stages.solve.run import run\n",
    "stages/commands.py": "",
    "stages/solve/__init__.py": "",
    "stages/solve/run.py": "from pipeline.ir.graph import Op\nfrom . import model\n",
    "stages/solve/search/integer_program.py": "import pyomo.environ as pyo\n",
    "stages/trace/__init__.py": "",
    "stages/trace/run.py": "from pipeline import config\n",
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_tree_that_keeps_the_rules_passes(tmp_path):
    assert check(write(tmp_path, GOOD)) == []


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("pipeline/cost.py", "from stages.solve import run\n", "pipeline imports stages.solve.run"),
        ("pipeline/cost.py", "def f():\n    import stages.solve.run\n", "pipeline imports stages.solve.run"),
        (
            "pipeline/cost.py",
            "import importlib\ndef f(x):\n    importlib.import_module(f'stages.{x}')\n",
            "pipeline imports stages",
        ),
        ("stages/trace/run.py", "from stages.solve.run import run\n", "stage trace imports stages.solve.run"),
        ("stages/trace/run.py", "def f():\n    from stages.solve import run\n", "stage trace imports stages.solve.run"),
        ("stages/trace/run.py", "from ..solve import run\n", "stage trace imports stages.solve.run"),
        ("stages/trace/run.py", "from stages import solve\n", "stage trace imports stages.solve"),
        ("stages/trace/run.py", "from stages import commands\n", "stage trace imports stages.commands"),
        ("stages/trace/run.py", "from shardwright.api.plan import Plan\n", "imports api.plan.Plan, which is for users"),
        ("stages/commands.py", "from stages.solve.run import run\n", "before it is needed"),
        ("stages/commands.py", "import stages.solve\n", "before it is needed"),
        (
            "pipeline/ir/names.py",
            "from pipeline.ir.graph import Op\n",
            "cycle pipeline.ir.graph -> pipeline.ir.names -> pipeline.ir.graph",
        ),
        ("pipeline/cost.py", "def f():\n    import mlflow.pyfunc\n", "pipeline.cost:2 imports mlflow"),
        ("pipeline/tracking_more.py", "import mlflow\n", "pipeline.tracking_more:1 imports mlflow"),
        ("stages/trace/run.py", "from mlflow import log_metric\n", "stages.trace.run:1 imports mlflow"),
        ("pipeline/ir/names.py", "import numpy as np\n", "pipeline.ir imports numpy"),
        ("pipeline/ir/names.py", "def f():\n    from pipeline.cost import x\n", "pipeline.ir imports pipeline.cost"),
        ("pipeline/runtime/a.py", "from pipeline.config import Config\n", "pipeline.runtime imports pipeline.config"),
        ("pipeline/runtime/a.py", "def f():\n    import numpy\n", "pipeline.runtime imports numpy"),
        ("pipeline/cost.py", "def f():\n    from pyomo import environ\n", "pipeline.cost reaches pyomo"),
        ("pipeline/cost.py", "from pipeline.config import Config\n", "pipeline.cost reaches omegaconf through"),
        ("stages/checkpoint/recompute/rotor.py", "import dvc\n", "stages.checkpoint.recompute.rotor reaches dvc"),
    ],
)
def test_the_checker_finds(tmp_path, path, text, told):
    problems = check(write(tmp_path, {**GOOD, path: text}))
    assert any(told in problem for problem in problems), problems


def test_an_import_for_types_alone_makes_no_cycle(tmp_path):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pipeline.ir.graph import Op\n"
    assert check(write(tmp_path, {**GOOD, "pipeline/ir/names.py": text})) == []


def test_plans_are_made_without_torch() -> None:
    """It takes seconds to import, which is most of what solve takes for one device."""
    modules = ("pipeline.base.stage", "stages.solve.run", "stages.checkpoint.run", "stages.train.run")
    names = ", ".join(f"shardwright.{module}" for module in modules)
    rules = "from shardwright.pipeline.ops.table import table; table()"
    told = f"import sys, {names}; {rules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_file_with_rules_is_in_the_table() -> None:
    found = {path.stem for path in (PROJECT / "pipeline/ops").rglob("*.py") if "\nRULES" in path.read_text()}
    assert found == set(FAMILIES)
