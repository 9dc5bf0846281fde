"""Which tracked run the records of a process belong to: its execution of the pipeline, and its point of a sweep."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.pipeline.base.signals import dvc_above

SWEEP_TAG = "shardwright.sweep"
SWEEP, POINT, ROOT = "SHARDWRIGHT_SWEEP", "SHARDWRIGHT_POINT", "SHARDWRIGHT_ROOT"
LOCATORS = "shardwright.pipeline.base.kernel_cache.OfTheProject,InTreeCacheLocator,UserWideCacheLocator"


@dataclass(frozen=True)
class SweepPoint:
    """Named by `shardwright sweep` through the environment.

    DVC runs each point in a copy of the project, which it then removes: records of a point belong into the project
    itself. The runs of a sweep are one set in MLflow: each has its name as a tag and lies below the run of the sweep.
    """

    sweep: str  # empty: the sweep's own run
    name: str  # of its run
    root: Path  # of the project whose runs/ keeps the records

    def environment(self) -> dict[str, str]:
        found = {SWEEP: self.sweep, POINT: self.name, ROOT: str(self.root)}
        return found | {"NUMBA_CACHE_LOCATOR_CLASSES": LOCATORS}


def current_point(environ: Mapping[str, str] = os.environ) -> SweepPoint | None:
    if not environ.get(ROOT):
        return None
    return SweepPoint(environ.get(SWEEP, ""), environ.get(POINT, ""), Path(environ[ROOT]))


def execution_id() -> str:
    """What all stages of one execution agree on: SHARDWRIGHT_EXECUTION, else the dvc process above, else this one."""
    named = os.environ.get("SHARDWRIGHT_EXECUTION", "").strip()
    if named:
        return file_name(named)
    import psutil

    above = dvc_above()
    process = above or psutil.Process()
    return f"{'dvc' if above else 'run'}-{process.pid}-{round(process.create_time() * 1000)}"


def file_name(text: str) -> str:
    """The text itself where it is a plain file name, else a readable stand-in that differs for different texts."""
    if re.fullmatch(r"\w[\w.-]{0,99}", text, re.ASCII):
        return text
    readable = re.sub(r"[^\w.-]+", "_", text, flags=re.ASCII).strip("._-")[:60]
    return f"{readable or 'x'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
