"""Where compiled kernels of a copy of the project are found: beside the project's own source, where that is equal.

DVC runs experiments in fresh copies; without this every one of them would compile for half a minute. Numba takes the
class from its environment (pipeline/tracking/execution.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import InTreeCacheLocator

from pipeline.tracking.execution import ROOT

COPY = Path(__file__).resolve().parents[2]


class OfTheProject(InTreeCacheLocator):
    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> Any:
        file = Path(py_file).resolve()
        if not os.environ.get(ROOT) or not file.is_relative_to(COPY):
            return None
        own = Path(os.environ[ROOT]) / file.relative_to(COPY)
        same = own.is_file() and own.read_bytes() == file.read_bytes()
        return super().from_function(py_func, str(own)) if same else None  # type: ignore[no-untyped-call]
