"""HiGHS through Pyomo, in this process."""

from __future__ import annotations

from typing import Any

from shardwright.pipeline.config import Solve
from shardwright.stages.solve.search.backends import NothingFound, termination


def solve(model: Any, settings: Solve, where: str) -> float:
    import pyomo.environ as pyo

    solver = pyo.SolverFactory("appsi_highs")
    solver.config.load_solution = False
    solver.options.update(
        {"time_limit": settings.time_limit_s, "mip_rel_gap": settings.gap, "random_seed": 0, "threads": 1}
    )
    results = solver.solve(model, load_solutions=False)
    ended = termination(results)
    if ended not in ("optimal", "maxTimeLimit") or not len(results.solution):
        raise NothingFound(
            f"HiGHS found no plan in {settings.time_limit_s:g} s ({ended})", where=where, remedy="raise time_limit_s"
        )
    model.solutions.load_from(results)
    if hasattr(model, "rc"):  # reduced costs, which the loaded solution leaves out
        model.rc.update(solver.get_reduced_costs())
    return float(results.problem.lower_bound)
