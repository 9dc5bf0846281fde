"""Tasks played on lines: what runs at once, how much it slows each other down, and who waits for whom.

    card    F0 |F1 |..B1..|..B0..|   wait   |optimizer       one line: its tasks run one after another
    sums           (first bucket)|(second bucket)            another: over the links, beside what the card computes

A task starts when the one before it on its line has ended, and every task that it is `after`. While it runs it shares
what it `uses`: n tasks on the same links have 1/n of them each, and while the card computes and links are busy, both go
on at 1 / (2 - hidden) of their pace. So of a task that runs wholly beside a longer one the part `hidden` costs nothing:
1 is no contention, and 0 is as slow as one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

COMPUTE = "compute"  # what a task uses that is none of the links'
ROUNDING = 1e-12  # of a task's seconds


@dataclass(frozen=True)
class LineTask:
    line: str
    seconds: float  # where nothing runs beside it
    after: tuple[int, ...] = ()  # numbers of earlier tasks
    uses: str = COMPUTE  # or the links', by any name
    name: str = ""


@dataclass(frozen=True)
class Played:
    starts: tuple[float, ...]  # of each task
    ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(self.ends, default=0.0)


def played(tasks: Sequence[LineTask], hidden: float) -> Played:
    """`hidden`: of computation and a collective at once, the part of the shorter one that costs nothing."""
    if any(other >= number for number, task in enumerate(tasks) for other in task.after):
        raise ValueError("a task is after earlier ones alone")
    queues: dict[str, list[int]] = {}
    for number in reversed(range(len(tasks))):
        queues.setdefault(tasks[number].line, []).append(number)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    left: dict[int, float] = {}  # seconds of the tasks that run, where nothing were beside them
    running: dict[str, int] = {}  # by line
    done, now = [False] * len(tasks), 0.0
    while queues:
        for line, queue in queues.items():
            if line not in running and all(done[other] for other in tasks[queue[-1]].after):
                running[line], starts[queue[-1]] = queue[-1], now
                left[queue[-1]] = tasks[queue[-1]].seconds
        paces = _paces([tasks[number].uses for number in left], hidden)
        step = min(seconds / pace for seconds, pace in zip(left.values(), paces, strict=True))
        now += step
        for (number, seconds), pace in zip(list(left.items()), paces, strict=True):
            left[number] = seconds - step * pace
            if left[number] <= ROUNDING * tasks[number].seconds:
                line, ends[number], done[number] = tasks[number].line, now, True
                del left[number], running[line]
                queues[line].pop()
                if not queues[line]:
                    del queues[line]
    return Played(tuple(starts), tuple(ends))


def _paces(uses: Sequence[str], hidden: float) -> list[float]:
    """Of tasks that run at once, by what they use."""
    count = Counter(uses)
    slower = 1 / (2 - hidden) if COMPUTE in count and len(count) > 1 else 1.0
    return [slower / (1 if use == COMPUTE else count[use]) for use in uses]
