"""Where the time of a step goes, from the profiler's events of one step.

    ops           ####  ######        ########        compute: ops of this rank, short holes between them filled
    collectives          ----------     ----          communication: what of these no op covers
    messages                    --------        ----  bubble: what of these neither ops nor collectives cover
                      |             |         ||      other: what is left, such as waiting for the host

On a GPU the ops are its kernels, collectives are those of NCCL, and other is mostly waiting for the host. Messages go
between partitions of a pipeline; a collective of all partitions counts as one. When a message leaves its sender the
other rank does not see: so a bubble has the transfer in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from shardwright.pipeline.ir.report import Breakdown
from shardwright.pipeline.runtime.pipelining.transfer import ACROSS
from shardwright.pipeline.runtime.programs.collectives import AROUND

STEP = "shardwright step"
HOLE_NS = 100_000  # between two ops it is the program's own time: no collective of two processes is so short
GPU_HOLE_NS = 4_000  # between two kernels that the host has issued in time; else the GPU waits for it
_COLLECTIVES = ("gloo:", "nccl:", "nccldevkernel", "ncclkernel")
_MESSAGES = ("gloo:send", "gloo:recv", "nccldevkernel_sendrecv", "ncclkernel_sendrecv")
_OPTIMIZER = "Optimizer.step#"  # of torch, around the step of any optimizer
_EXCHANGE = "nccl:all_to_all"  # a label around the same kernels
_NOT_OPS = ("autograd::", "c10d::", "profiler::", "record_param_comms")

Span = tuple[int, int]  # begin and end, in ns


@dataclass(frozen=True)
class ProfiledEvent:
    name: str
    thread: int
    span: Span
    on_gpu: bool = False
    is_label: bool = False  # put around others by `record_function`; on a GPU from their first kernel to their last

    @property
    def is_collective(self) -> bool:
        return self.name.lower().startswith(_COLLECTIVES)

    @property
    def is_message(self) -> bool:
        return self.name.lower().startswith(_MESSAGES)

    @property
    def is_op(self) -> bool:
        """Not what only encloses others and may wait in them."""
        if self.on_gpu:
            return not (self.is_collective or self.is_label)
        return ("::" in self.name or "CompiledFxGraph" in self.name) and not self.name.startswith(_NOT_OPS)


def profiled(work: Callable[[], None], device: torch.device, trace: Path | None) -> Breakdown:
    """Of the work, which is a step; its Chrome trace is written where a path is given."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    # There is one cycle of events; without `acc_events` torch 2.11 warns of those of others.
    with profile(activities=activities, acc_events=True) as found:
        if on_gpu:  # the first kernel that is profiled waits milliseconds for the profiler
            torch.ones((), device=device)
            torch.cuda.synchronize(device)
        with record_function(STEP):
            work()
            if on_gpu:
                torch.cuda.synchronize(device)
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        part = trace.with_suffix(".part")
        found.export_chrome_trace(str(part))
        os.replace(part, trace)
    events = []
    for event in found.profiler.kineto_results.events():
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        there = event.device_type() == DeviceType.CUDA
        events.append(ProfiledEvent(event.name(), event.start_thread_id(), span, there, event.is_user_annotation()))
    return break_down(events, on_gpu)


def break_down(events: list[ProfiledEvent], on_gpu: bool) -> Breakdown:
    step = next(event for event in events if event.name == STEP and not event.on_gpu)
    whole = [step.span]
    collectives = [e for e in events if e.is_collective and e.on_gpu == on_gpu and not (on_gpu and e.is_label)]
    # Threads that run collectives add and copy for them.
    theirs = set() if on_gpu else {event.thread for event in collectives} - {step.thread}
    ops = [e.span for e in events if e.is_op and e.on_gpu == on_gpu and e.thread not in theirs]
    busy = within(joined(ops, GPU_HOLE_NS if on_gpu else HOLE_NS), whole)
    sent = within(joined(event.span for event in collectives), whole)
    hidden, alone = length(within(sent, busy)), without(sent, busy)
    # `inside` are those in which ranks of one partition take part.
    labels = [event for event in events if event.on_gpu == on_gpu and (event.is_label or not on_gpu)]
    across = joined(label.span for label in labels if label.name == ACROSS)
    exchanges = joined(label.span for label in labels if label.name.startswith(_EXCHANGE if on_gpu else AROUND))
    updates = joined(label.span for label in labels if label.name.startswith(_OPTIMIZER))
    messages = joined(event.span for event in collectives if event.is_message)
    others = joined(event.span for event in collectives if not event.is_message)
    inside = without(joined([*others, *within(messages, exchanges)]), across)
    communication = length(within(alone, inside))
    return Breakdown(
        step_seconds=length(whole) / 1e9,
        compute_seconds=length(busy) / 1e9,
        communication_seconds=communication / 1e9,
        hidden_seconds=hidden / 1e9,
        other_seconds=(length(whole) - length(busy) - length(alone)) / 1e9,
        bubble_seconds=(length(alone) - communication) / 1e9,
        optimizer_seconds=length(within(busy, updates)) / 1e9,
    )


# ---- sets of moments, as spans in their order that do not touch


def joined(spans: Iterable[Span], hole: int = 0) -> list[Span]:
    """The moments in any of the spans, and those in holes between them that are not longer than that."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin - found[-1][1] <= hole:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def within(left: list[Span], right: list[Span]) -> list[Span]:
    """The moments in both."""
    found, at = [], 0
    for begin, end in left:
        while at and right[at - 1][1] > begin:
            at -= 1
        while at < len(right) and right[at][0] < end:
            both = max(begin, right[at][0]), min(end, right[at][1])
            if both[0] < both[1]:
                found.append(both)
            at += 1
    return found


def without(left: list[Span], right: list[Span]) -> list[Span]:
    """The moments in the one and not in the other."""
    found = []
    for begin, end in left:
        for first, last in within(right, [(begin, end)]):
            if begin < first:
                found.append((begin, first))
            begin = last
        if begin < end:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> int:
    return sum(end - begin for begin, end in spans)


def mean_breakdown(ranks: list[Breakdown]) -> Breakdown:
    """Their mean; of a pipeline that of the rank which computes longest, as its predicted seconds are.

    Ranks wait for one another, so that their steps are of one length.
    """
    if any(rank.bubble_seconds for rank in ranks):
        return max(ranks, key=lambda rank: rank.compute_seconds)
    return Breakdown(*(sum(seconds) / len(ranks) for seconds in zip(*map(astuple, ranks), strict=True)))
