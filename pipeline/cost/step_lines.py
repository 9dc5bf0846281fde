"""The passes of a step as tasks on lines: the card, and the collectives that run beside what it computes.

| what                                   | begins                              | is waited for                     |
|----------------------------------------|-------------------------------------|-----------------------------------|
| a conversion, a sum inside an op       | when the card comes to it           | at once: it is a task of the card |
| gradients of a bucket (`Bucket`)       | in the last backward, once its last | after all backward passes         |
|                                        | gradient and all before it are made |                                   |
| a gather of parameters (ZeRO-3, FSDP)  | when the one before is handed out   | by the link that reads them       |

This is what the runtime does (`overlap: runtime`): pipeline/runtime/step/gradients.py. The first gather of a step has
none before it; that of a later micro-batch runs beside the end of the one before. In Megatron's way (`overlap:
megatron`) also the collectives of a link's backward run beside the part of it that makes gradients of weights, which do
not need them, and those of its parameters beside the next link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwright.pipeline.cost.lines import COMPUTE, LineTask, played

CARD = "card"


@dataclass(frozen=True)
class Collective:
    over: str  # the ranks: those over the same run one after another
    links: str  # that it uses
    seconds: float


@dataclass(frozen=True)
class Traffic:
    """The collectives of a link's run, forward or backward."""

    blocking: tuple[Collective, ...] = ()  # the card waits for each of these
    gathers: tuple[Collective, ...] = ()  # begun ahead of time, one after another
    beside: tuple[Collective, ...] = ()  # behind the end of the link's own work
    late: float = 0.0  # seconds of that work which do not need them
    trailing: tuple[Collective, ...] = ()  # waited for at the end of the passes

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            (*self.blocking, *other.blocking),
            (*self.gathers, *other.gathers),
            (*self.beside, *other.beside),
            self.late + other.late,
            (*self.trailing, *other.trailing),
        )

    @property
    def every(self) -> tuple[Collective, ...]:
        return (*self.blocking, *self.gathers, *self.beside, *self.trailing)

    @property
    def behind(self) -> float:
        """Seconds of what may run beside other work."""
        return sum(one.seconds for one in (*self.gathers, *self.beside, *self.trailing))


@dataclass(frozen=True)
class LinkPass:
    """A run of one link or of several: in this order they are the passes of a micro-batch."""

    first: int
    last: int
    backward: bool
    seconds: float  # with all collectives, one after the other
    traffic: Traffic = Traffic()


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed together, once the backward passes down to a link are done; in the order they leave."""

    link: int  # the first that has part in them; -1: what is done before the chain has as well
    sums: tuple[Collective, ...]  # one after the other


@dataclass(frozen=True)
class StepLines:
    """A step up to the optimizer."""

    runs: tuple[LinkPass, ...]  # of one micro-batch
    buckets: tuple[Bucket, ...]
    micro_batches: int
    hidden: float

    @property
    def behind(self) -> float:
        """Seconds of all that may run beside other work."""
        own = sum(run.traffic.behind for run in self.runs)
        return self.micro_batches * own + sum(one.seconds for bucket in self.buckets for one in bucket.sums)

    @property
    def saved(self) -> float:
        """Seconds by which the step is shorter than its parts one after the other."""
        if not self.behind or not self.hidden:
            return 0.0
        passes, count = sum(run.seconds for run in self.runs), self.micro_batches
        sums = sum(one.seconds for bucket in self.buckets for one in bucket.sums)
        found = count * passes + sums - sum(self.durations(count - 1))
        if count > 1:
            found -= sum(self.durations(0))
        if count > 2:
            found -= (count - 2) * sum(self.durations(1))
        return max(0.0, found)

    def durations(self, micro_batch: int) -> list[float]:
        """From the end of each run to that of the next, on the card; then what is still waited for.

        Sums leave in the last micro-batch. What the one before has begun for a micro-batch is under way when that
        begins, and what it slows down there counts here: all but the first are as the second.
        """
        last = micro_batch == self.micro_batches - 1
        buckets, beside = self.buckets if last else (), any(run.traffic.behind for run in self.runs)
        if not buckets and not beside:  # as long as its runs
            return [*(run.seconds for run in self.runs), 0.0]
        begun = sum(self.durations(0)) if micro_batch and beside else 0.0
        made = tasks_of(self.runs, buckets, self.runs if begun else ())
        found = played(made.tasks, self.hidden)
        marks = made.marks[-len(self.runs) :]
        ends = [begun, *(mark if isinstance(mark, float) else found.ends[mark] for mark in marks), found.seconds]
        *own, waited = (end - before for before, end in pairwise(ends))
        return [*own, waited if last else 0.0]


def tasks_of(runs: Sequence[LinkPass], buckets: Sequence[Bucket], before: Sequence[LinkPass] = ()) -> _Tasks:
    """The tasks of the passes, in program order, after those of the micro-batch before."""
    made = _Tasks()
    for run in before:
        made.run(run)
    waiting = list(buckets)
    for run in runs:
        made.run(run)
        while run.backward and waiting and waiting[0].link >= run.first:
            made.send(waiting.pop(0))
    for bucket in waiting:
        made.send(bucket)
    return made


class _Tasks:
    def __init__(self) -> None:
        self.tasks: list[LineTask] = []
        self.marks: list[int | float] = []  # where each run ends: with a task of the card, or when
        self.card: tuple[int, ...] = ()  # the last task of the card so far
        self.handed: tuple[int, ...] = ()  # the task of the card before which a gather was handed out last
        self.needed: tuple[int, ...] = ()  # what the next task of the card waits for

    def add(self, name: str, line: str, seconds: float, after: tuple[int, ...], uses: str) -> tuple[int, ...]:
        self.tasks.append(LineTask(line, seconds, after, uses, name))
        return (len(self.tasks) - 1,)

    def on_card(self, name: str, seconds: float, uses: str = COMPUTE) -> None:
        """Nothing that waits for nothing is no task."""
        if seconds > 0 or self.needed:
            self.card = self.add(name, CARD, max(0.0, seconds), self.needed, uses)
            self.needed = ()

    def run(self, run: LinkPass) -> None:
        traffic, name = run.traffic, f"{'backward' if run.backward else 'forward'} of {run.first}..{run.last}"
        if len(self.tasks) == len(self.card) and not traffic.behind:  # nothing is beside the passes so far
            before = sum(task.seconds for task in self.tasks)
            self.tasks, self.card = [], ()
            self.on_card("passes", before + run.seconds)
            self.marks.append(float(before + run.seconds))
            return
        for one in traffic.gathers:
            begun = self.handed or self.card
            self.needed += self.add(f"gather for {name}", "gathers", one.seconds, begun, one.links)
            self.on_card(f"handed to {name}", 0.0)
            self.handed = self.card
        blocked: Counter[str] = Counter()
        for one in traffic.blocking:
            blocked[one.links] += one.seconds  # type: ignore[assignment]
        for links, seconds in blocked.items():
            self.on_card(f"collectives of {name}", seconds, links)
        own = max(0.0, run.seconds - sum(one.seconds for one in traffic.every))
        late = min(traffic.late, own) if traffic.beside else 0.0
        self.on_card(name, own - late)
        begun, beside = self.card, tuple[int, ...]()
        for one in traffic.beside:
            beside += self.add(f"sums of {name}", f"sums of activations {one.over}", one.seconds, begun, one.links)
        self.on_card(f"gradients of weights, {name}", late)
        self.needed += beside
        for one in traffic.trailing:
            self.add(f"scatter of {name}", f"scatters {one.over}", one.seconds, self.card, one.links)
        self.marks.append(self.card[0] if self.card else 0.0)

    def send(self, bucket: Bucket) -> None:
        after = self.card
        for one in bucket.sums:
            after = self.add("gradient sums", f"gradients {one.over}", one.seconds, after, one.links)
