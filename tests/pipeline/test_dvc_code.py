"""The code that dvc.yaml has a stage depend on is the code that the stage imports: an edit leaves no stale result."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.stage import STAGES

ROOT = Path(__file__).parents[2]
# How a stage is run, told and launched, whatever it computes.
HOW = """artifact_locations artifacts errors files garbage headline launch launch_failures lock log messages own_ops
place point processes rank rendezvous secrets signals soundness spool stage tracker tracking tracking_store
work_folder"""
USERS_OPS = {"pipeline/own_ops.py", "pipeline/instantiate.py"}  # how solve comes to know of them, before it begins
ALSO = {"train": ("stages/train/worker.py",)}  # what else is started


def is_how(path: Path) -> bool:
    return path.is_relative_to("pipeline/config") or (path.parent == Path("pipeline") and path.stem in HOW.split())


def file_of(module: str) -> Path | None:
    path = Path(*module.split("."))
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if (ROOT / found).exists()), None)


def imported_by(path: Path) -> Iterator[Path]:
    """Wherever the import stands; not for types alone."""
    tree = ast.parse((ROOT / path).read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        for name in names:
            found = file_of(name) if name.split(".")[0] in ("pipeline", "stages") else None
            if found is not None and id(node) not in for_types:
                yield found


def code_of(stage: str) -> set[str]:
    found: set[Path] = set()
    waiting = [Path(f"stages/{stage}/run.py"), *map(Path, ALSO.get(stage, ()))]
    while waiting:
        path = waiting.pop()
        if path not in found and not is_how(path):
            found.add(path)
            waiting += imported_by(path)
    return {str(path) for path in found}


def covers(dep: str, path: str) -> bool:
    return path == dep or path.startswith(f"{dep}/")


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_the_code_that_it_imports(stage):
    listed = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"][stage]["deps"]
    deps = {dep for dep in listed if dep.startswith(("pipeline", "stages"))}
    code = code_of(stage)
    assert len(code) > 3, "nothing was found to look at"
    forgotten = {path for path in code if not path.endswith("__init__.py") and not any(covers(d, path) for d in deps)}
    needless = {dep for dep in deps - USERS_OPS if not any(covers(dep, path) for path in code)}
    assert not forgotten and not needless
