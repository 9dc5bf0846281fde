"""Pipeline schedules: in which order each device runs its work, how many micro-batches wait, how long a step takes.

P partitions on S devices (a device here is all that hold one partition: a submesh), M micro-batches. F is
a forward, B a backward, W the part of a backward that makes weight gradients, where it is run on its own. The orders
are those of `torch.distributed.pipelining`:

    gpipe         all F, then all B. Every partition has M in flight.
    1f1b          partition p runs S-p F, then B and F in turn: min(M, S-p) in flight.
    interleaved   v partitions a device, p on device p mod S; warm-up (v-1)M/rounds + 2(S-1-r) F on device r
    zero_bubble   1f1b with W put off: device r starts W after r B, so that W fills what would be idle (ZB-H1; torch
                  calls it InterleavedZeroBubble). A micro-batch is in flight until its W.

`orders` writes these down, `in_flight` counts in them, and `simulate` plays them: a task starts when its device is free
and its input is there; transfers take time between two devices and none of theirs. The search estimates a step
(`StepWeights`), with t the seconds of a micro-batch on a partition (F + B) and c of both transfers after it:

    gpipe         sum t + sum c + (M-1) max t          at most the truth, which has max F + max B for max t
    1f1b          sum t + sum c + (M-1) max (t + c)    at least the truth where B is to F alike in all partitions, exact
                                                       where they are equal; else the truth may be more, but not more
                                                       than with max (F + c/2) + max (B + c/2) for max (t + c)
    interleaved   (sum t + sum c)/v + (Mv-1) max (t+c) an estimate; exact for equal partitions without transfers, M a
                                                       multiple of S
    zero_bubble   sum (t - 2w) + sum c + (M-1) max (t+c)   an estimate; less 2w of the truth for equal F = B = W

(1f1b: on a longest path through the order a partition is passed X_p times, with sum (X_p - 1) <= M-1.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pipeline.base.errors import ShardwrightError


class ScheduleError(ShardwrightError):
    """A pipeline schedule that does not exist."""


class Pipeline(Enum):
    """How a pipeline's work is ordered."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero_bubble"


@dataclass(frozen=True)
class Task:
    phase: str  # F, B or W
    partition: int
    micro: int

    def __str__(self) -> str:
        return f"{self.phase}{self.partition}.{self.micro}"


@dataclass(frozen=True)
class DeviceOrder:
    """What each device runs, in order; partition p lies on device p mod len(tasks)."""

    pipeline: Pipeline
    partitions: int
    micro_batches: int
    tasks: tuple[tuple[Task, ...], ...]


def refusal(pipeline: Pipeline, devices: int, chunks: int, micro_batches: int) -> str | None:
    """Why such a schedule does not exist; None if it does."""
    if chunks != 1 and pipeline is not Pipeline.INTERLEAVED:
        return f"{pipeline.value} has one partition on a device, not {chunks}"
    if pipeline is Pipeline.INTERLEAVED and chunks < 2:
        return "interleaved needs at least two partitions on a device"
    rounds = max(1, micro_batches // devices)
    if pipeline in (Pipeline.INTERLEAVED, Pipeline.ZERO_BUBBLE) and micro_batches % rounds:
        return f"{pipeline.value} on {devices} submeshes runs in {rounds} rounds, which do not divide {micro_batches}"
    return None


def orders(pipeline: Pipeline, devices: int, micro_batches: int, chunks: int = 1) -> DeviceOrder:
    why = refusal(pipeline, devices, chunks, micro_batches)
    if why:
        raise ScheduleError(why, where="pipeline schedule", remedy="use another number of micro-batches or partitions")
    tasks = tuple(_tasks(pipeline, rank, devices, micro_batches, chunks) for rank in range(devices))
    return DeviceOrder(pipeline, devices * chunks, micro_batches, tasks)


def forwards_ahead(pipeline: Pipeline, left: int, micro_batches: int) -> int:
    """Before the first backward pass of a partition, where so many are left of the pipeline, itself included.

    Of schedules with a partition on each device: these are the most that it has in flight.
    """
    return micro_batches if pipeline is Pipeline.GPIPE else min(micro_batches, left)


def _tasks(pipeline: Pipeline, rank: int, devices: int, micro_batches: int, chunks: int) -> tuple[Task, ...]:
    if pipeline in (Pipeline.INTERLEAVED, Pipeline.ZERO_BUBBLE):
        return _rounds(pipeline, rank, devices, micro_batches, chunks)
    ahead = forwards_ahead(pipeline, devices - rank, micro_batches)
    tasks = [Task("F", rank, m) for m in range(ahead)]
    for m in range(micro_batches):
        tasks.append(Task("B", rank, m))
        if m + ahead < micro_batches:
            tasks.append(Task("F", rank, m + ahead))
    return tuple(tasks)


def _rounds(pipeline: Pipeline, rank: int, devices: int, micro_batches: int, chunks: int) -> tuple[Task, ...]:
    """Micro-batches go in rounds: a round passes through all chunks of a device before the next one starts."""
    weights = pipeline is Pipeline.ZERO_BUBBLE
    round_size = micro_batches // max(1, micro_batches // devices)
    total = chunks * micro_batches
    ahead = min((chunks - 1) * round_size + (1 if weights else 2) * (devices - 1 - rank), total)
    done: dict[tuple[str, int], int] = {}
    tasks: list[Task] = []

    def add(phase: str, step: int) -> None:
        local = step // round_size % chunks
        partition = (local if phase == "F" else chunks - 1 - local) * devices + rank
        done[phase, partition] = micro = done.get((phase, partition), -1) + 1
        tasks.append(Task(phase, partition, micro))

    for step in range(ahead):
        add("F", step)
    for step in range(total):
        if step + ahead < total:
            add("F", step + ahead)
        add("B", step)
        if weights and step >= rank:
            add("W", step - rank)
    for step in range(max(0, total - rank), total):
        if weights:
            add("W", step)
    return tuple(tasks)


def in_flight(order: DeviceOrder) -> tuple[int, ...]:
    """For each partition the most micro-batches whose forward has begun and whose backward has not ended."""
    end = "W" if order.pipeline is Pipeline.ZERO_BUBBLE else "B"
    now, most = [0] * order.partitions, [0] * order.partitions
    for tasks in order.tasks:
        for task in tasks:
            p = task.partition
            now[p] += (task.phase == "F") - (task.phase == end)
            most[p] = max(most[p], now[p])
    return tuple(most)


# -------------------------------------------------------------------------------------------------------- step time


@dataclass(frozen=True)
class Load:
    """A partition's seconds: of a micro-batch forwards and backwards, and of the step once all are through."""

    forward: float
    backward: float  # recompute and weight gradients included
    send: float = 0.0  # of its output to the next partition, and of the gradient back: each
    weight: float = 0.0  # of the backward, what can be put off (zero_bubble)
    once: float = 0.0  # gradient sums, optimizer
    last: Load | None = None  # of the last micro-batch, where that one is not recomputed
    early: float = 0.0  # of the backward, what is computed before its gradient has come (GPipe; not our runtime)

    @property
    def time(self) -> float:
        return self.forward + self.backward

    def seconds(self, task: Task, split: bool, micro_batches: int) -> float:
        if self.last is not None and task.micro == micro_batches - 1:
            return self.last.seconds(task, split, micro_batches)
        if task.phase == "F":
            return self.forward
        if task.phase == "W":
            return self.weight
        return self.backward - (self.weight if split else 0.0)


@dataclass(frozen=True)
class TaskEvent:
    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class PlayedSchedule:
    """What each device ran, and when; `seconds` until the last one has done its part of the step."""

    events: tuple[tuple[TaskEvent, ...], ...]
    seconds: float


def simulate(order: DeviceOrder, loads: Sequence[Load]) -> PlayedSchedule:
    """Play the orders: every device runs its next task as soon as its input is there."""
    split = order.pipeline is Pipeline.ZERO_BUBBLE
    ends: dict[Task, float] = {}
    events: list[list[TaskEvent]] = [[] for _ in order.tasks]
    waiting = set(range(len(order.tasks)))
    while waiting:
        moved = False
        for device in sorted(waiting):
            row = events[device]
            while len(row) < len(order.tasks[device]):
                task = order.tasks[device][len(row)]
                ready = _ready(task, order.partitions, loads, ends)
                if ready is None:
                    break
                early = loads[task.partition].early if task.phase == "B" else 0.0
                start = max(ready - early, row[-1].end if row else 0.0)
                ends[task] = start + loads[task.partition].seconds(task, split, order.micro_batches)
                row.append(TaskEvent(task, start, ends[task]))
                moved = True
            else:
                waiting.discard(device)
        if waiting and not moved:
            raise ScheduleError("the devices wait for one another for ever", where="pipeline schedule")
    size = len(events)
    once = [sum(load.once for load in loads[device::size]) for device in range(size)]
    seconds = max(row[-1].end + after for row, after in zip(events, once, strict=True))
    return PlayedSchedule(tuple(map(tuple, events)), seconds)


def _ready(task: Task, partitions: int, loads: Sequence[Load], ends: dict[Task, float]) -> float | None:
    """When the input of a task is on its device; None while that is unknown."""
    p, m = task.partition, task.micro
    if task.phase == "F":
        before = None if p == 0 else Task("F", p - 1, m)
        late = loads[p - 1].send
    elif task.phase == "B" and p < partitions - 1:
        before, late = Task("B", p + 1, m), loads[p].send
    else:
        before, late = Task("B" if task.phase == "W" else "F", p, m), 0.0
    if before is None:
        return 0.0
    return None if before not in ends else ends[before] + late


@dataclass(frozen=True)
class StepWeights:
    """How a step is estimated: `sum` of all partitions' seconds and `peak` times those of the slowest."""

    sum: float
    peak: float
    send_in_peak: bool  # whether the slowest counts with its transfers
    credit: float = 0.0  # times the weight gradients, off the sum


def weights_of(pipeline: Pipeline, micro_batches: int, chunks: int = 1) -> StepWeights:
    if pipeline is Pipeline.INTERLEAVED:
        return StepWeights(1 / chunks, micro_batches * chunks - 1, True)
    credit = 2.0 if pipeline is Pipeline.ZERO_BUBBLE else 0.0
    return StepWeights(1.0, micro_batches - 1, pipeline is not Pipeline.GPIPE, credit)
