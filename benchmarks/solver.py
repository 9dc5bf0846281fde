"""Solve an instance of the contest format: `python -m benchmarks.solver --instance FILE --seconds N`.

FILE is JSON, plain or gzip: `nodes.intervals` (half-open), `nodes.costs` and `nodes.usages` per strategy, `edges.nodes`
(one or two of them) and `edges.costs` (row-major), `usage_limit`; 10^18 forbids. Prints what presolve left, the cost,
the bound and the gap, and last a line of JSON. The time counts from the start of the process. Cost and memory are
computed again from the file, in whole numbers, by code that shares nothing with the search.

Bars, the best teams' costs within the contest's limits: G 217,039 (120 s), A 6,548,641,531 (60 s), M 49,928,460,991
(180 s), S 1,534,613,444 (240 s); the example's optimum is 445.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil

from benchmarks.parallel_search import SearchResult, search
from shardwright.stages.solve.problem.data import FORBIDDEN, Edge, Holding, Node, Problem
from shardwright.stages.solve.search.large.presolve import NoChoice

TOO_DEAR = 10**18
RESERVE = 0.8  # seconds to stop, check and print; and a share of the time that loading took


class BadInstance(Exception):
    """The file is not an instance."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instance", type=Path, required=True, help=".json or .json.gz")
    parser.add_argument("--seconds", type=float, required=True, help="for everything, loading included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes that search; 0: none besides this one")
    arguments = parser.parse_args()
    age = time.time() - psutil.Process().create_time()
    start = time.monotonic() - age
    deadline = start + arguments.seconds
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # millions of numbers live until the end: looking for garbage among them takes seconds
    try:
        instance = load(arguments.instance)
        problem = to_problem(instance)
    except BadInstance as error:
        print(f"error: {arguments.instance}: {error}", file=sys.stderr)
        return 2
    loaded = time.monotonic()
    reserve = RESERVE + 0.2 * (loaded - start)
    try:
        found = search(
            problem, instance["usage_limit"], deadline - reserve, arguments.seed, arguments.workers, step=1.0
        )
    except NoChoice as error:
        print(f"error: {arguments.instance}: node {error} has no strategy that its neighbours allow", file=sys.stderr)
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return report(instance, found, loaded - start, start)


def load(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        content = orjson.loads(raw)
        content = content.get("problem", content)
        nodes, edges = content["nodes"], content["edges"]
        for part in ("intervals", "costs", "usages"):
            if len(nodes[part]) != len(nodes["costs"]):
                raise BadInstance(f"nodes.{part} has {len(nodes[part])} entries, nodes.costs {len(nodes['costs'])}")
        if len(edges["nodes"]) != len(edges["costs"]):
            raise BadInstance(f"edges.nodes has {len(edges['nodes'])} entries, edges.costs {len(edges['costs'])}")
        int(content["usage_limit"])
    except BadInstance:
        raise
    except OSError as error:
        raise BadInstance(f"cannot be read: {error.strerror or error}") from error
    except (KeyError, AttributeError, TypeError) as error:
        raise BadInstance(f"is not an instance of the contest format: {error!r}") from error
    except (ValueError, EOFError) as error:
        raise BadInstance(f"is not JSON: {error}") from error
    return content


def to_problem(instance: dict[str, Any]) -> Problem:
    given = instance["nodes"]
    nodes = []
    for i, (interval, costs, usages) in enumerate(
        zip(given["intervals"], given["costs"], given["usages"], strict=True)
    ):
        try:
            first, end = map(int, interval)
            held = np.array(usages, np.float64)
            own = _costs(costs)
        except (TypeError, ValueError) as error:
            raise BadInstance(f"node {i}: {error}") from error
        if not len(own) or own.ndim != 1 or held.shape != own.shape or first < 0 or end < first:
            raise BadInstance(f"node {i}: {len(costs)} costs, {len(usages)} usages, interval {interval}")
        nodes.append(Node(str(i), own, (Holding(first, end, held),) if end > first else ()))
    edges = []
    for e, (ends, costs) in enumerate(zip(instance["edges"]["nodes"], instance["edges"]["costs"], strict=True)):
        try:
            sizes = [len(nodes[v].costs) for v in ends if isinstance(v, int) and v >= 0]
            matrix = _costs(costs).reshape(sizes)
        except (TypeError, ValueError, IndexError) as error:
            raise BadInstance(f"edge {e} between {ends}: {error}") from error
        if len(sizes) == len(ends) == 1:
            old = nodes[ends[0]]
            nodes[ends[0]] = Node(old.name, old.costs + matrix, old.holdings)
        elif len(sizes) == len(ends) == 2:
            edges.append(Edge(ends[0], ends[1], matrix))
        else:
            raise BadInstance(f"edge {e} names the nodes {ends}: only one or two are supported")
    return Problem(tuple(nodes), tuple(edges))


def _costs(values: list[int]) -> np.ndarray:
    costs = np.array(values, np.float64)
    costs[costs >= TOO_DEAR] = FORBIDDEN
    return costs


def evaluate(instance: dict[str, Any], picked: list[int]) -> tuple[int, int]:
    """Cost and peak memory of these choices, from the file's own numbers."""
    nodes, edges = instance["nodes"], instance["edges"]
    cost = sum(int(costs[k]) for costs, k in zip(nodes["costs"], picked, strict=True))
    for ends, costs in zip(edges["nodes"], edges["costs"], strict=True):
        place = 0
        for v in ends:
            place = place * len(nodes["costs"][v]) + picked[v]
        cost += int(costs[place])
    changes: dict[int, int] = {}
    for (first, end), usages, k in zip(nodes["intervals"], nodes["usages"], picked, strict=True):
        if end > first:
            changes[first] = changes.get(first, 0) + int(usages[k])
            changes[end] = changes.get(end, 0) - int(usages[k])
    peak = held = 0
    for moment in sorted(changes):
        held += changes[moment]
        peak = max(peak, held)
    return cost, peak


def report(instance: dict[str, Any], found: SearchResult, loading: float, start: float) -> int:
    limit = int(instance["usage_limit"])
    columns = ("nodes", "edges", "choices")
    given = instance["nodes"]["costs"], instance["edges"]["nodes"]
    print(f"{'':24}" + "".join(f"{name:>12}" for name in columns))
    print(f"{'instance':24}{len(given[0]):12,}{len(given[1]):12,}{sum(map(len, given[0])):12,}")
    if found.sizes:
        print(f"{'after presolve':24}" + "".join(f"{found.sizes[name]:12,}" for name in columns))
    for name, number in found.sizes.items():
        if name not in columns:
            print(f"  {name:34}{number:14,}")
    bound = None if math.isinf(found.bound) else math.ceil(found.bound - 1e-6 - 1e-9 * abs(found.bound))
    cost, feasible = None, False
    if found.picked is not None:
        cost, peak = evaluate(instance, [int(k) for k in found.picked])
        feasible = peak <= limit and cost < TOO_DEAR
        bound = min(bound, cost) if bound is not None else None
        print(f"{'memory':24}{peak:24,} of {limit:,} ({100 * peak / max(limit, 1):.2f}%)")
        print(f"{'cost':24}{cost:24,}")
    if bound is not None:
        gap = f"  (gap {100 * (cost - bound) / max(abs(cost), 1):.3f}%)" if cost is not None else ""
        print(f"{'bound':24}{bound:24,}{gap}")
    print(f"{'seconds to load':24}{loading:24.1f}")
    seconds = round(time.monotonic() - start, 2)
    print(json.dumps({"cost": cost, "feasible": feasible, "bound": bound, "seconds": seconds}), flush=True)
    return 0 if feasible else 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # at once: to free millions of numbers one by one takes a second
