"""The large search on whole steps: `python -m benchmarks.whole_step [--layers 24,96] [--seconds 100] [--families gpt]`.

The GPT and the Llama of benchmarks/step_problems.py: forward, backward and optimizer, every op of every layer a node of
its own, nothing shared between equal layers. Solved by the search of benchmarks.solver (stages/solve/search/large) in
the given seconds, presolve included, within a budget half way between the smallest plan's memory and the fastest's.
Beside it the plan of `search: dp`, which folds equal layers and proves a bound of its own; it is exact for the GPT and
cuts the Llama open, which is too wide for elimination. `ratio` is between the two costs, `gap` between the search's
cost and the higher of the two bounds. Cost and memory are computed again from the whole problem, and the step's seconds
by pipeline.cost from the program that the plan becomes: neither knows the search.

Bars: a plan that fits; in the given seconds and 2 more; at most 1% dearer than that of dynamic programming; its seconds
as pipeline.cost has them, but for a thousandth.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from benchmarks.in_process import in_process

OVER, RATIO, PRICED = 2.0, 1.01, 1e-3
RESERVE = 0.5  # seconds to stop the search and to read its plan
EXACT_SECONDS = 60.0  # for dynamic programming
KEPT = ("nodes", "search", "cost_ms", "bound_ms", "dp_ms", "ratio", "gap", "met")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="24,96")
    parser.add_argument("--families", default="gpt,llama")
    parser.add_argument("--seconds", type=float, default=100.0, help="for the search of each, presolve included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        family, depth = given.one.split(":")
        print(json.dumps(plan(family, int(depth), given.seconds, given.seed)))
        return 0
    depths = [int(part) for part in given.layers.split(",")]
    print(
        f"{'model':7}{'layers':>6}{'nodes':>17}{'edges':>17}{'choices':>24}{'trace':>7}{'build':>7}{'search':>8}{'cost':>11}"
        f"{'bound':>11}{'dp':>11}{'dp bound':>11}{'ratio':>8}{'gap':>7}  bars"
    )
    rows = {}
    for family in given.families.split(","):
        for depth in depths:
            asked = ("--one", f"{family}:{depth}", "--seconds", str(given.seconds), "--seed", str(given.seed))
            rows[f"{family} {depth}"] = row = in_process("benchmarks.whole_step", *asked)
            print(_line(family, depth, row), flush=True)
    print(json.dumps({name: {key: row[key] for key in KEPT} for name, row in rows.items()}))
    return 0 if all(row["met"] for row in rows.values()) else 1


def _line(family: str, depth: int, row: dict[str, Any]) -> str:
    sizes = "".join(
        f"{row[what]:,} > {row['left'][what]:,}".rjust(width)
        for what, width in (("nodes", 17), ("edges", 17), ("choices", 24))
    )
    cost = "none" if row["cost_ms"] is None else f"{row['cost_ms']:.2f}ms"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.4f}"
    gap = "" if row["gap"] is None else f"{row['gap']:.2%}"
    return (
        f"{family:7}{depth:6}{sizes}{row['trace']:6.1f}s{row['build']:6.1f}s{row['search']:7.1f}s{cost:>11}"
        f"{row['bound_ms']:9.2f}ms{row['dp_ms']:9.2f}ms{row['dp_bound_ms']:9.2f}ms{ratio:>8}{gap:>7}"
        f"  {'met' if row['met'] else 'missed'}"
    )


def plan(family: str, depth: int, seconds: float, seed: int, **sizes: int) -> dict[str, Any]:
    import logging

    from benchmarks.parallel_search import search
    from benchmarks.step_problems import COPIES, Sizes, binding_budget, traced, two_boxes
    from shardwright.pipeline.config import Backend, Search, Solve
    from shardwright.pipeline.cost.step import Workload
    from shardwright.stages.solve.answer.frontier import FrontierSearch
    from shardwright.stages.solve.on_mesh import price_point
    from shardwright.stages.solve.problem.build import build, to_sharding
    from shardwright.stages.solve.search.large.plain import plain

    start = time.monotonic()
    graph, profile = traced(family, depth, Sizes(**sizes))
    traced_at, cluster = time.monotonic(), two_boxes()
    workload = Workload(graph, profile, cluster, COPIES)
    problem, choices = build(workload)
    built_at = time.monotonic()
    settings = Solve(backend=Backend.highs, gap=1e-4, time_limit_s=EXACT_SECONDS, search=Search.dp, frontier_points=1)
    sweep = FrontierSearch(problem, settings, "--layers", logging.getLogger())
    budget = binding_budget(sweep, time.monotonic() + EXACT_SECONDS)
    exact = sweep.within(budget)
    del sweep  # its tables: the search's processes are copies of this one
    begin = time.monotonic()
    whole = plain(problem)
    found = search(whole.problem, budget, begin + seconds - RESERVE, seed)
    picked = None if found.picked is None else whole.read(found.picked)
    spent = time.monotonic() - begin
    row = {
        "nodes": len(whole.problem.nodes),
        "edges": len(whole.problem.edges),
        "choices": sum(len(node.costs) for node in whole.problem.nodes),
        "left": found.sizes,
        "trace": traced_at - start,
        "build": built_at - traced_at,
        "search": round(spent, 2),
        "budget_gb": budget / 1e9,
        "bound_ms": found.bound * 1e3,
        "dp_ms": exact.cost * 1e3,
        "dp_bound_ms": exact.proof.bound * 1e3,
        "cost_ms": None,
        "ratio": None,
        "gap": None,
        "met": False,
    }
    if picked is None:
        return row
    cost, peak = problem.cost(picked), problem.peak(picked)
    priced = price_point(workload, to_sharding(graph, choices, picked), exact.proof).seconds
    fits = peak <= budget and abs(cost - found.cost) <= 1e-9 * cost and abs(priced - cost) <= PRICED * cost
    return row | {
        "cost_ms": cost * 1e3,
        "priced_ms": priced * 1e3,
        "peak_gb": peak / 1e9,
        "ratio": round(cost / exact.cost, 5),
        "gap": round((cost - max(found.bound, exact.proof.bound)) / cost, 5),
        "met": fits and spent <= seconds + OVER and cost <= RATIO * exact.cost,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
