"""Ranks that this stage starts itself, or that a launcher outside has started: torchrun over hosts, or Slurm."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.base.errors import TrainError
from pipeline.launch.launch import Supervision, run_here, run_ranks
from pipeline.launch.place import find_place

WORKER = "stages.train.worker"


def start_ranks(
    job: dict[str, Any],
    ranks: int,
    timeout: float | None,
    poll: Callable[[Path], None],
    watch: Supervision,
) -> dict[str, Any]:
    """All ranks on this machine, or the one that this process is; what rank 0 found, on other ranks nothing."""
    place = find_place(os.environ)
    if place is None:
        return run_ranks(WORKER, job, ranks, timeout, poll, watch=watch)
    if place.ranks != ranks:
        raise TrainError(
            f"the run needs {ranks} ranks, and {place.ranks} were started",
            where="runs/checkpoint/plan.json",
            remedy=f"start {ranks}, one for each device, or plan for a cluster of {place.ranks} devices",
        )
    return run_here(WORKER, job, place, timeout, poll, watch)
