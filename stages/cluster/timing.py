"""How a rank times its work: all ranks begin together, the slowest counts, and all decide by the same figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shardwright.stages.cluster.fit import reduce_times

MOST = 8  # times as many repeats as asked for

Work = Callable[[], object]


@dataclass
class Clock:
    """Times work on a device, and keeps how far the times were spread."""

    device: str
    repeats: int
    spreads: list[float] = field(default_factory=list)
    outliers: int = 0
    started: float = field(default_factory=time.perf_counter)

    def once(self, work: Work, inner: int = 1, together: bool = True) -> float:
        """Seconds of one call on this rank."""
        if together:
            dist.barrier()
        self.settle()
        start = time.perf_counter()
        for _ in range(inner):
            work()
        self.settle()
        return (time.perf_counter() - start) / inner

    def settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Work, inner: int = 1) -> float:
        """Of one call on the slowest rank; a first call is not counted."""
        work()
        return self.reduce(slowest([self.once(work, inner) for _ in range(self.repeats)]))

    def together(self, works: list[Work], budget: float) -> list[float]:
        """Seconds of several kinds of work taken in turns, so that what disturbs the machine disturbs all alike.

        Where time is left, more often than asked for: a machine that others use needs it.
        """
        times: list[list[float]] = [[] for _ in works]
        deadline = self.elapsed() + budget
        for number in range(MOST * self.repeats):
            if number >= self.repeats and self.elapsed() > deadline:
                break
            for own, work in zip(times, works, strict=True):
                own.append(self.once(work))
        return [self.reduce(slowest(own)) for own in times]

    def reduce(self, times: list[float]) -> float:
        found = reduce_times(times)
        self.spreads.append(found.spread)
        self.outliers += found.outliers
        return found.seconds

    def elapsed(self) -> float:
        """Seconds since the start, the same on every rank."""
        return slowest([time.perf_counter() - self.started])[0]


def slowest(values: list[float]) -> list[float]:
    """The largest of each value over all ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(value) for value in found]
