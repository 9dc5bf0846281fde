"""Pipeline schedules: in which order each device runs its work, how many micro-batches wait, how long a step may take.

P partitions on S devices (a device here is all that hold one partition: a submesh), M micro-batches. F is
a forward, B a backward, W the part of a backward that makes weight gradients, where it is run on its own. The orders
are those of `torch.distributed.pipelining`:

    gpipe         all F, then all B. Every partition has M in flight.
    1f1b          partition p runs S-p F, then B and F in turn: min(M, S-p) in flight.
    interleaved   v partitions a device, p on device p mod S; warm-up (v-1)M/rounds + 2(S-1-r) F on device r
    zero_bubble   1f1b with W put off: device r starts W after r B, so that W fills what would be idle (ZB-H1; torch
                  calls it InterleavedZeroBubble). A micro-batch is in flight until its W.

`orders` writes these down, `in_flight` counts in them, and play.py plays them with the messages of
handovers.py. The search estimates a step (`StepWeights`), with t the seconds of a micro-batch on a partition (F + B), c
of both transfers after it and c- of those before it:

    gpipe         sum t + sum c + (M-1) max (t + c)    the truth has max (F + c-/2) + max (B + c/2) for the maximum
    1f1b          the same                             the truth is at most GPipe's; without transfers, and B to F alike
                                                       in all partitions, at most the estimate, exact for equal ones
    interleaved   (sum t)/v + sum c + (Mv-1) max t     exact for equal partitions, M a multiple of S and more than two
                                                       devices, where transfers are short beside F and B: else more.
                                                       Where senders wait, t + c for t, and sum c is in the first sum
    zero_bubble   sum (t - 2w) + sum c + (M-1) max (t+c)   for equal F = B = W 2w less than the truth without transfers;
                                                       beside computation w of c are hidden

(1f1b: on a longest path through the order a partition is passed X_p times, with sum (X_p - 1) <= M-1.)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.ir.cluster import Overlap


class ScheduleError(ShardwrightError):
    """A pipeline schedule that does not exist."""


class Pipeline(Enum):
    """How a pipeline's work is ordered."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero_bubble"


class Sending(Enum):
    """How messages go from partition to partition (pipeline/cost/pipelines/handovers.py)."""

    RUNTIME = "as our programs run"
    BLOCKING = "nothing is computed meanwhile"
    EAGER = "the reader alone waits"


def sending_of(overlap: Overlap, pipeline: Pipeline) -> Sending:
    """Megatron sends beside computation where its pipeline is interleaved."""
    if overlap.silent:
        return Sending.BLOCKING
    if overlap.mode == "runtime":
        return Sending.RUNTIME
    ahead = pipeline in (Pipeline.INTERLEAVED, Pipeline.ZERO_BUBBLE)
    return Sending.EAGER if ahead else Sending.BLOCKING


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


@dataclass(frozen=True)
class StepWeights:
    """How a step is estimated: `sum` of all partitions' seconds and `peak` times those of the slowest."""

    sum: float
    peak: float
    send_in_peak: bool = True  # whether the slowest counts with its transfers
    credit: float = 0.0  # times the weight gradients, off the sum
    sends: float = 1.0  # times all transfers, in the sum


def weights_of(
    pipeline: Pipeline, micro_batches: int, chunks: int = 1, sending: Sending = Sending.RUNTIME
) -> StepWeights:
    if pipeline is Pipeline.INTERLEAVED:
        waits = sending is Sending.BLOCKING
        return StepWeights(1 / chunks, micro_batches * chunks - 1, waits, sends=1.0 if waits else chunks)
    return StepWeights(1.0, micro_batches - 1, credit=2.0 if pipeline is Pipeline.ZERO_BUBBLE else 0.0)
