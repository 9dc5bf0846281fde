"""Kernels that numba keeps on disk: what cannot be read there is compiled anew."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = """
from typing import NamedTuple

from shardwright.pipeline.base.kernel_cache import kernel


class {name}(NamedTuple):
    x: float


@kernel()
def twice(given):
    return 2 * given.x


def run():
    return twice({name}(4.0))
"""


def run_module(path: Path, name: str) -> tuple[float, int]:
    """What it computes, and how often that was on the disk."""
    source = SOURCE.format(name=name)
    path.write_text(source)
    module = ModuleType("kept_kernels")
    sys.modules["kept_kernels"] = module
    # not by importlib: it would take the bytecode of a source of the same size that was written in the same second
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module.run(), sum(module.twice.stats.cache_hits.values())


def test_it_is_kept_and_found_again(tmp_path):
    assert run_module(tmp_path / "kept_kernels.py", "Given") == (8.0, 0)
    assert run_module(tmp_path / "kept_kernels.py", "Given") == (8.0, 1)


def test_a_type_that_is_no_more_is_no_error(tmp_path):
    run_module(tmp_path / "kept_kernels.py", "Given")
    assert run_module(tmp_path / "kept_kernels.py", "Other") == (8.0, 0)
    assert run_module(tmp_path / "kept_kernels.py", "Other") == (8.0, 1)


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"x" * 4096])
def test_a_damaged_file_is_written_anew(tmp_path, ending, content):
    run_module(tmp_path / "kept_kernels.py", "Given")
    (kept,) = (tmp_path / "__pycache__").glob(f"*.{ending}")
    kept.write_bytes(content)
    assert run_module(tmp_path / "kept_kernels.py", "Given") == (8.0, 0)
    assert run_module(tmp_path / "kept_kernels.py", "Given") == (8.0, 1)
