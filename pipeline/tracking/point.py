"""The point of a sweep for which a process works, told by `python -m stages sweep` through the environment.

DVC runs each point in a copy of the project, which it then removes: records of a point belong into the project itself.
The runs of a sweep are one set in MLflow: each has its name as a tag and lies below the run of the sweep.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SWEEP_TAG = "shardwright.sweep"
SWEEP, POINT, ROOT = "SHARDWRIGHT_SWEEP", "SHARDWRIGHT_POINT", "SHARDWRIGHT_ROOT"
LOCATORS = "pipeline.base.kernel_cache.OfTheProject,InTreeCacheLocator,UserWideCacheLocator"


@dataclass(frozen=True)
class Point:
    sweep: str  # empty: the sweep's own run
    name: str  # of its run
    root: Path  # of the project whose runs/ keeps the records

    def environment(self) -> dict[str, str]:
        found = {SWEEP: self.sweep, POINT: self.name, ROOT: str(self.root)}
        return found | {"NUMBA_CACHE_LOCATOR_CLASSES": LOCATORS}


def current(environ: Mapping[str, str] = os.environ) -> Point | None:
    if not environ.get(ROOT):
        return None
    return Point(environ.get(SWEEP, ""), environ.get(POINT, ""), Path(environ[ROOT]))


def tags_in_set(client: Any, experiment_id: str, execution_tag: str, sweep: str | None) -> dict[str, str]:
    """Of a run that belongs to a sweep; the sweep's own run is the execution of its name."""
    if not sweep:
        return {}
    found = client.search_runs([experiment_id], f"tags.`{execution_tag}` = '{sweep}'", max_results=1)
    return {SWEEP_TAG: sweep} | ({"mlflow.parentRunId": found[0].info.run_id} if found else {})
