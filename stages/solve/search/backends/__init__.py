"""Programs that solve the model, one file each, found by listing this folder.

Each has `solve(model, settings, where) -> float`: leaves the values in the model and returns a proven lower bound of
the objective. It raises `NothingFound` where it has no solution to show.
"""

from __future__ import annotations

from typing import Any

from shardwright.pipeline.base.errors import SolveError


class NothingFound(SolveError):
    """The solver ended without a plan: none exists, or none was found in time."""


def termination(results: Any) -> str:
    return str(results.solver.termination_condition)
