"""Why there is no pipeline; if it is the memory, how much would do, and which partition needs it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from shardwright.stages.checkpoint.pipelines.cuts import Cuts, search
from shardwright.stages.checkpoint.pipelines.refine import plan_of
from shardwright.stages.checkpoint.pipelines.search_inputs import PartitionError, PipelineFloor, SearchInputs
from shardwright.stages.checkpoint.pipelines.search_space import SearchTask, tasks
from shardwright.stages.checkpoint.pipelines.submesh_plans import Recompute
from shardwright.stages.checkpoint.recompute.in_flight import keep_all, worst_step


def nothing(given: SearchInputs, searched: bool, refused: list[str]) -> PartitionError:
    """Why there is no plan; if it is the memory, how much would do."""
    reasons = f" ({'; '.join(sorted(set(refused)))})" if refused else ""
    if not searched:
        remedy = "ask for other numbers of partitions or micro-batches, or another schedule"
        return PartitionError(f"there is no pipeline as asked for{reasons}", remedy=remedy)
    enough = _enough(given)
    if enough is None:
        remedy = "give plans for other numbers of devices, or other boundaries"
        return PartitionError(f"no pipeline fits, whatever the memory{reasons}", remedy=remedy)
    error = PartitionError(
        f"no pipeline fits {given.memory / 1e9:.4g} GB a device{reasons}",
        remedy=f"{enough / 1e9:.4g} GB would do; or use more devices or smaller micro-batches",
    )
    error.floor = _floor(replace(given, memory=enough))
    return error


def _enough(given: SearchInputs) -> int | None:
    """A memory that has a plan, in four digits: first with no choice of recompute, then with all. None: none has."""
    low, high = given.memory, 2 * max(1, given.memory)
    while not _fits(given, high, roughly=True):
        low, high = high, 4 * high
        if high > max(1, given.memory) * 2**40:
            return None
    high = _halved(given, low, high, 1.001, roughly=True)
    if given.wishes.recompute is Recompute.SOLVED:
        high = _halved(given, given.memory, high, 1.005, roughly=False)
    digits = max(0, math.floor(math.log10(high)) - 3)
    rounded = -(-high // 10**digits) * 10**digits
    return rounded if _fits(given, rounded, roughly=False) else high


def _halved(given: SearchInputs, low: int, high: int, near: float, roughly: bool) -> int:
    """Nearly the least between them that fits, where `high` does."""
    while high - low > 1 and high > near * low:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(given, middle, roughly) else (middle, high)
    return high


def _fits(given: SearchInputs, memory: int, roughly: bool) -> bool:
    """Whether there is a plan; roughly, one that recomputes nothing or everything of a partition."""
    return next(_some_cuts(replace(given, memory=memory), roughly), None) is not None


def _some_cuts(given: SearchInputs, roughly: bool) -> Iterator[tuple[SearchTask, Cuts]]:
    for task in tasks(given, []):
        found = search(task.field(roughly=roughly), task.weights, gap=1.0, keep=1)
        if found:
            yield task, found[0]


def _floor(given: SearchInputs) -> PipelineFloor:
    """Of a plan that fits: the partition that fills its room the most."""
    task, cuts = next(_some_cuts(given, roughly=False))
    plan = plan_of(task, cuts)
    number, part = max(enumerate(plan.partitions), key=lambda one: one[1].peak_bytes / one[1].room_bytes)
    running = keep_all(part.first, part.last) if part.fullest.last else part.region
    return PipelineFloor(
        memory=given.memory,
        pipeline=plan.pipeline,
        partition=number,
        partitions=len(plan.partitions),
        first=part.first,
        last=part.last,
        flight=part.flight,
        resident_bytes=part.resident_bytes,
        waiting_bytes=part.fullest.waiting,
        op=worst_step(part.submesh.chain, running, part.first, part.last).op,
    )
