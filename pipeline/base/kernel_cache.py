"""Inner loops that numba compiles when they are first called, and keeps on disk beside their source.

DVC runs experiments in fresh copies of the project; without `OfTheProject` every one of them would compile for half a
minute. Numba takes the class from its environment (pipeline/tracking/execution.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from numba import njit
from numba.core.caching import IndexDataCacheFile, InTreeCacheLocator

from shardwright.pipeline.tracking.execution import ROOT

COPY = Path(__file__).resolve().parents[2]


def kernel(
    fastmath: bool | set[str] = False, inline: Literal["never", "always"] = "never"
) -> Callable[[Callable[..., Any]], Any]:
    """Settings as numba has them."""

    def compiled(function: Callable[..., Any]) -> Any:
        made: Any = njit(cache=True, nogil=True, fastmath=fastmath, inline=inline)(function)
        if hasattr(made, "_cache"):  # with NUMBA_DISABLE_JIT it is the function itself
            cache, own = made._cache, made._cache._impl
            where = cache._cache_path, own.filename_base, own.locator.get_source_stamp()
            cache._cache_file = _Kept(*where)  # type: ignore[no-untyped-call]
        return made

    return compiled


class _Kept(IndexDataCacheFile):
    """Numba reads what it has kept before it sees that it was made of other source. A type that is no more, or a file
    that was cut off, would end the stage; here it is compiled anew."""

    def _load_index(self) -> Any:
        try:
            return super()._load_index()  # type: ignore[no-untyped-call]
        except Exception:
            return {}

    def _load_data(self, name: str) -> Any:
        try:
            return super()._load_data(name)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise OSError(f"{name} cannot be read") from error


class OfTheProject(InTreeCacheLocator):
    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> Any:
        file = Path(py_file).resolve()
        if not os.environ.get(ROOT) or not file.is_relative_to(COPY):
            return None
        own = Path(os.environ[ROOT]) / file.relative_to(COPY)
        same = own.is_file() and own.read_bytes() == file.read_bytes()
        return super().from_function(py_func, str(own)) if same else None  # type: ignore[no-untyped-call]
