"""How planning grows with depth: `python -m benchmarks.planning --layers 12,24,48,96 [--backend highs]`.

The GPT of benchmarks/step_problems.py on its mesh of 2 x 4 devices. The budget lies half way between the memory of the
smallest plan and that of the fastest, so it binds. Each depth has a process of its own on one core; its
seconds are strategies, problem and solution: the trace and the profile come before. The gap is between the plan's cost
and the proven bound. Bars: a gap of at most 0.5% at every depth; 96 layers under 15 s and at most 3 times 12.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from benchmarks.in_process import in_process

SECONDS, RATIO, GAP = 15.0, 3.0, 5e-3


def main(arguments: list[str]) -> int:
    from shardwright.pipeline.config import Backend

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="12,24,48,96")
    parser.add_argument("--backend", default="glpk", choices=list(Backend))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one is not None:
        print(json.dumps(_plan(given.one, given.backend)))
        return 0
    depths = [int(part) for part in given.layers.split(",")]
    found = {
        depth: in_process("benchmarks.planning", "--one", str(depth), "--backend", given.backend) for depth in depths
    }
    print(
        f"{'layers':>6}{'nodes':>8}{'choices':>9}{'build':>8}{'solve':>8}{'together':>10}{'budget':>11}{'step':>10}"
        f"{'gap':>9}  method"
    )
    for depth, row in found.items():
        print(
            f"{depth:6}{row['nodes']:8}{row['choices']:9}{row['build']:7.2f}s{row['solve']:7.2f}s{row['seconds']:9.2f}s"
            f"{row['budget_gb']:8.2f} GB{row['step_ms']:8.2f}ms{row['gap']:9.2%}  {row['method']}"
        )
    kept = ("seconds", "gap", "backend")
    print(json.dumps({str(depth): {key: row[key] for key in kept} for depth, row in found.items()}))
    met = all(row["gap"] <= GAP for row in found.values())
    if 96 in found:
        met = met and found[96]["seconds"] < SECONDS
        met = met and (12 not in found or found[96]["seconds"] <= RATIO * found[12]["seconds"])
    return 0 if met else 1


def _plan(depth: int, backend: str) -> dict[str, Any]:
    import logging

    from benchmarks.step_problems import COPIES, binding_budget, traced, two_boxes
    from shardwright.pipeline.config import Backend, Solve
    from shardwright.pipeline.cost.step import Workload
    from shardwright.stages.solve.answer.frontier import FrontierSearch
    from shardwright.stages.solve.problem.build import build

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    graph, profile = traced("gpt", depth)
    start = time.perf_counter()
    problem, _ = build(Workload(graph, profile, two_boxes(), COPIES))
    built = time.perf_counter()
    sweep = FrontierSearch(
        problem, Solve(backend=Backend(backend), gap=GAP / 2, time_limit_s=60), "--backend", logging.getLogger()
    )
    budget = binding_budget(sweep, time.monotonic() + 60)
    plan = sweep.within(budget)
    done = time.perf_counter()
    assert plan.peak <= budget and plan.proof.bound <= plan.cost
    return {
        "nodes": len(problem.nodes),
        "choices": sum(len(node.costs) for node in problem.nodes),
        "build": built - start,
        "solve": done - built,
        "seconds": round(done - start, 2),
        "budget_gb": budget / 1e9,
        "step_ms": plan.cost * 1e3,
        "gap": round(plan.proof.gap, 6),
        "backend": plan.proof.backend,
        "method": plan.proof.method,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
