"""A generated program, loaded from its source."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import ModuleType

from pipeline.runtime.compiler.compiled import as_written
from pipeline.runtime.programs.evaluation import evaluating

_NUMBERS = count()


def load_program(
    path: str, *, compiles: bool = True, evaluates: bool = False, source: bytes | None = None
) -> ModuleType:
    """Always from its source: no bytecode beside it under runs/ that could be older than the plan.

    `evaluates`: as its model is after `model.eval()`, not to be trained with. `source`: what was read of the file.
    """
    module = ModuleType(f"shardwright_program_{next(_NUMBERS)}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # where torch.compile looks for what a block's functions call
    source = Path(path).read_bytes() if source is None else source
    with nullcontext() if compiles and not evaluates else as_written():
        written = evaluating(source, path) if evaluates else source
        exec(compile(written, path, "exec", dont_inherit=True), module.__dict__)
    return module
