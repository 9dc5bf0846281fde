"""A generated program, loaded from its source."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

from pipeline.runtime.compiled import as_written


def load_program(path: str, *, compiles: bool = True) -> ModuleType:
    """Always from its source: no bytecode beside it under runs/ that could be older than the plan."""
    module = ModuleType("shardwright_program")
    module.__file__ = path
    with nullcontext() if compiles else as_written():
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), module.__dict__)
    return module
