"""Pipelines cut by the planner: `python -m benchmarks.partition [--cases 200]`.

First, small random pipelines against every way to cut them: the least estimate of a step must be the same. Then a model
of 96 equal layers (width 12288, about 174 billion parameters; micro-batches of 4 sequences of 2048) with an embedding
before and a head with its loss after them, 98 links, on 64 devices of 80 GB: submeshes of 1, 2, 4, 8, 16 and 32 devices
with two plans each, any mix of them, 64 micro-batches, 1f1b, recompute solved. The costs are written here and nowhere
measured; the memory binds. One core, the compiled kernels already on disk. Bars: all cases equal; 96 layers under 10 s.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter

from shardwright.stages.checkpoint.pipelines.partition import partition
from shardwright.stages.checkpoint.pipelines.refine import PipelinePlan
from shardwright.stages.checkpoint.pipelines.search_inputs import Division, Effort, PartitionError
from shardwright.stages.checkpoint.pipelines.submesh_plans import SubmeshPlan
from shardwright.stages.checkpoint.recompute.chain import Chain, Slots
from tests.partition_cases import least_estimate, random_case

LAYERS, DEVICES, MICRO_BATCHES, MEMORY = 96, 64, 64, 80 * 10**9
WIDTH, TOKENS, VOCABULARY, RATE = 12288, 4 * 2048, 50304, 250e12
SIZES = (1, 2, 4, 8, 16, 32)
SECONDS = 10.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    given = parser.parse_args(arguments)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    start = time.perf_counter()
    equal = sum(_equal(seed) for seed in range(given.cases))
    print(f"{equal} of {given.cases} random pipelines cut as well as possible ({time.perf_counter() - start:.1f} s)")
    division = large()
    start = time.perf_counter()
    plan = partition((division,), MEMORY, effort=Effort())[0]
    seconds = time.perf_counter() - start
    _show(plan)
    print(json.dumps({"cases": given.cases, "equal": equal, "seconds": {f"{LAYERS}x{DEVICES}": round(seconds, 2)}}))
    return 0 if equal == given.cases and seconds < SECONDS else 1


def _equal(seed: int) -> bool:
    case = random_case(seed)
    best = least_estimate(case)
    effort = Effort(Slots(0, case.memory, 1), gap=0.0)
    try:
        plans = partition((case.division,), case.memory, case.wishes, effort, case.reshard)
    except PartitionError:
        return best == math.inf
    return math.isclose(min(plan.estimate for plan in plans), best, rel_tol=1e-9)


def large() -> Division:
    """Tensor parallelism sends little between layers and much inside; the other way (ZeRO) gathers parameters."""
    submeshes = [_submesh(size, zero) for size in SIZES for zero in (False, True)]
    return Division(DEVICES, {MICRO_BATCHES: tuple(submeshes)}, lambda nbytes: 20e-6 + nbytes / 25e9)


def _submesh(size: int, zero: bool) -> SubmeshPlan:
    inside = 200e9 if size <= 8 else 25e9  # bytes/s: a box has eight devices
    parameters, table = 12 * WIDTH**2, VOCABULARY * WIDTH
    activation = 2 * TOKENS * WIDTH
    share = size if zero else 1  # of the activations, which ZeRO splits by batch
    moved = 2 * parameters if zero else 4 * activation
    talk = (size - 1) / size * moved / inside
    forward = 2 * parameters * TOKENS / size / RATE + talk
    head = 2 * table * TOKENS / size / RATE
    kept = 34 * TOKENS * WIDTH / size + (0 if zero else 2 * activation)
    owned = (4 if zero and size > 1 else 16) * parameters / size + (12 * parameters / size if zero and size > 1 else 0)
    return SubmeshPlan(
        name=f"{'zero' if zero else 'tensor'} on {size}",
        devices=size,
        chain=Chain(
            a=(TOKENS * 8, *(activation / share for _ in range(LAYERS + 1))),
            saved=(activation / share, *(max(kept, activation / share) for _ in range(LAYERS))),
            f=(1e-4, *(forward for _ in range(LAYERS))),
            b=(2e-4, *(2 * forward for _ in range(LAYERS)), 3 * head),
            ft=(0.0, *(activation / share for _ in range(LAYERS))),
            bt=(0.0, *(2 * activation / share for _ in range(LAYERS)), 6 * TOKENS * VOCABULARY / size),
        ),
        resident=(16 * table / size, *(owned for _ in range(LAYERS)), 16 * table / size),
        once=(1e-3, *(parameters / size * 30 / 2e12 for _ in range(LAYERS)), 1e-3),
    )


def _show(plan: PipelinePlan) -> None:
    print(f"{'links':>10}{'devices':>9}  {'plan':14}{'flight':>7}{'seconds':>10}{'GB':>7}  recomputed")
    for part in plan.partitions:
        again = Counter(type(step).__name__ for step in part.region.steps)
        print(
            f"{part.first:5}..{part.last:<3}{part.submesh.devices:9}  {part.submesh.name:14}{part.flight:7}"
            f"{part.load.time:10.4f}{part.peak_bytes / 1e9:7.1f}  {again['Region']} regions, {again['Keep']} links kept"
        )
    print(f"a step of {plan.micro_batches}: {plan.seconds:.3f} s simulated, {plan.estimate:.3f} s estimated", end="")
    rows = plan.timeline.events
    busy = sum(event.end - event.start for row in rows for event in row)
    print(f", {1 - busy / (max(row[-1].end for row in rows) * len(rows)):.1%} idle")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
