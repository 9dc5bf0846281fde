"""How the source is built, in counts: `python -m benchmarks.architecture`.

Of pipeline/ and stages/: lines, class names with several meanings, circles of imports (those inside functions too, not
those for types), files in a folder, folders without a README, code that a stage imports and dvc.yaml does not name,
the longest function and the most parameters of one (`self` is none). For each the worst places, so that one sees where
to begin. The last line is one JSON object; the exit status says whether all bars are met.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SOURCE = ("pipeline", "stages")
BARS = {
    "source_lines": 40_000,
    "duplicate_class_names": 8,
    "circles": 0,
    "most_files_in_a_folder": 16,
    "folders_without_readme": 0,
    "dvc_dependencies_missing": 0,
    "longest_function": 60,
    "most_parameters": 7,
}
SHOWN = 5
# How a stage is run, reported and launched, whatever it computes: dvc.yaml names none of it.
HOW = ("pipeline/base", "pipeline/config", "pipeline/launch", "pipeline/tracking", "pipeline/user/own_ops.py")
STARTED = {"train": ("stages/train/worker.py",)}  # what a stage starts beside what it imports


def main() -> int:
    found = figures()
    for name, (count, where) in found.items():
        met = "" if count <= BARS[name] else "   NOT MET"
        print(f"{name:26}{count:8,}   at most {BARS[name]:,}{met}")
        for line in where[:SHOWN]:
            print(f"{'':10}{line}")
    print(json.dumps({name: count for name, (count, _) in found.items()}))
    return 0 if all(count <= BARS[name] for name, (count, _) in found.items()) else 1


def figures() -> dict[str, tuple[int, list[str]]]:
    """Of each bar its figure, and the places that make it, the worst first."""
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in files()}
    classes = _classes()
    several = {name: places for name, places in classes.items() if len(places) > 1}
    folders = Counter(path.parent for path in files() if path.name != "__init__.py")
    bare = [str(folder) for folder in sorted(folders) if not (ROOT / folder / "README.md").exists()]
    missing = [f"{stage}: {path}" for stage, paths in missing_dependencies().items() for path in sorted(paths)]
    functions = [(path, node) for path in files() for node in ast.walk(tree(path)) if isinstance(node, FUNCTION)]
    lengths = {f"{p}: {f.name}": f.end_lineno - f.lineno + 1 for p, f in functions if f.end_lineno is not None}
    parameters = {f"{path}: {node.name}": _parameters(node) for path, node in functions}
    found_circles = circles()
    return {
        "source_lines": (sum(lines.values()), _worst({str(path): n for path, n in lines.items()})),
        "duplicate_class_names": (len(several), _worst({f"{k}: {', '.join(v)}": len(v) for k, v in several.items()})),
        "circles": (len(found_circles), [" ".join(map(str, sorted(circle))) for circle in found_circles]),
        "most_files_in_a_folder": (max(folders.values()), _worst({str(path): n for path, n in folders.items()})),
        "folders_without_readme": (len(bare), bare),
        "dvc_dependencies_missing": (len(missing), missing),
        "longest_function": (max(lengths.values()), _worst(lengths)),
        "most_parameters": (max(parameters.values()), _worst(parameters)),
    }


FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def files() -> list[Path]:
    return [path.relative_to(ROOT) for folder in SOURCE for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def _worst(counts: Mapping[str, int]) -> list[str]:
    return [f"{count:6,} {name}" for name, count in sorted(counts.items(), key=lambda each: -each[1])]


def _classes() -> dict[str, list[str]]:
    found = defaultdict(list)
    for path in files():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path))
    return found


def _parameters(node: Any) -> int:
    given = node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


# ----------------------------------------------------------------------------------------------------------- imports


@cache
def imports(path: Path) -> tuple[Path, ...]:
    """The files of ours that a file imports, wherever the import stands; not for types alone."""
    for_types = {
        id(inner)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    every: list[Path] = []
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            within = [f"{node.module}.{each.name}" for each in node.names]
            names = within if all(_file_of(name) for name in within) else [node.module, *within]
        found = {_file_of(name) for name in names if id(node) not in for_types}
        every += sorted(each for each in found if each is not None)
    return tuple(every)


def _file_of(module: str) -> Path | None:
    path = Path(*module.removeprefix("shardwright.").split("."))
    if path.parts[0] not in SOURCE:
        return None
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if (ROOT / found).exists()), None)


def circles() -> list[set[Path]]:
    """Groups of files each of which imports, by others, every other one (Tarjan's strongly connected components)."""
    edges = {path: [each for each in imports(path) if each != path] for path in files()}
    order: dict[Path, int] = {}
    low: dict[Path, int] = {}
    stack: list[Path] = []
    found: list[set[Path]] = []

    def visit(path: Path) -> None:
        order[path] = low[path] = len(order)
        stack.append(path)
        for other in edges[path]:
            if other not in order:
                visit(other)
            if other in stack:
                low[path] = min(low[path], low[other])
        if low[path] == order[path]:
            group = set(stack[stack.index(path) :])
            del stack[stack.index(path) :]
            if len(group) > 1:
                found.append(group)

    for path in edges:
        if path not in order:
            visit(path)
    return sorted(found, key=len, reverse=True)


# ---------------------------------------------------------------------------------------------------------- dvc.yaml


def missing_dependencies() -> dict[str, set[str]]:
    """Of each stage the code that it imports and that dvc.yaml does not name."""
    return {
        stage: {path for path in code_of(stage) if not any(covers(dep, path) for dep in deps)}
        for stage, deps in dependencies().items()
    }


def dependencies() -> dict[str, set[str]]:
    """Of each stage the code that dvc.yaml names."""
    stages: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    return {
        name: {dep for dep in stage["deps"] if dep.startswith(SOURCE)}
        for name, stage in stages.items()
        if (ROOT / f"stages/{name}/run.py").exists()
    }


def code_of(stage: str) -> set[str]:
    found: set[Path] = set()
    waiting = [Path(f"stages/{stage}/run.py"), *map(Path, STARTED.get(stage, ()))]
    while waiting:
        path = waiting.pop()
        if path not in found and not _is_how(path):
            found.add(path)
            waiting += imports(path)
    return {str(path) for path in found if path.name != "__init__.py"}


def covers(dep: str, path: str) -> bool:
    return path == dep or path.startswith(f"{dep}/")


def _is_how(path: Path) -> bool:
    return path.stem != "instantiate" and any(path.is_relative_to(part) for part in HOW)


if __name__ == "__main__":
    sys.exit(main())
