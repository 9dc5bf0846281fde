"""What the devices of a pipeline do between their tasks: messages that are posted, and waited for.

A message is what a task leaves for another device: a forward's activation for the next partition, a backward's gradient
for the one before. It goes when both ends have posted it, each after what it computes until then, as on a GPU's stream;
a device that waits for it does nothing else. As `torch.distributed.pipelining` runs our programs (`RUNTIME`):

    gpipe         a receive is posted when its reader comes to it, and waited for: nothing hides a transfer. For sends
                  the device waits at the end of all forwards, and of all backwards
    1f1b          the same while forwards run ahead, and at the end; in between an activation leaves together with the
                  receive of a gradient, and the other way round, and the device waits for both
    interleaved,  receives are posted ahead (`_lowered`), so that transfers run beside computation. The messages of two
    zero_bubble   devices go one after another, both ways, as posted. Sends are waited for at the end of the step

`BLOCKING`: what is posted between two tasks is waited for there; of `interleaved` and `zero_bubble`, in whose orders
devices do not meet, by the sender alone. `EAGER`: a message goes when it is there, and its reader alone waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, repeat

from shardwright.pipeline.cost.pipelines.schedules import DeviceOrder, Pipeline, Sending, Task

GATHERED = 3  # partitions whose parameters torch has there at once


class Doing(Enum):
    RUN = "run"
    POST = "post"
    WAIT = "wait"


@dataclass(frozen=True)
class Action:
    """A device runs a task, posts what a task sends (as its sender, or as its reader), or waits until that is there."""

    doing: Doing
    task: Task


Program = tuple[Action, ...]


def programs(order: DeviceOrder, sending: Sending) -> tuple[Program, ...]:
    """Of each device."""
    devices = range(len(order.tasks))
    meet = {Pipeline.GPIPE: _gpipe, Pipeline.ONE_F_ONE_B: _1f1b}.get(order.pipeline)
    if sending is Sending.RUNTIME and meet is None:
        return tuple(tuple(_with_waits(order, own)) for own in _lowered(order))
    if sending is Sending.EAGER or meet is None:
        waits = sending is Sending.BLOCKING
        return tuple(tuple(_sent_at_once(order, device, waits)) for device in devices)
    made = (meet(order, device) for device in devices)
    return tuple(tuple(_waited_for_at_once(own) if sending is Sending.BLOCKING else own) for own in made)


def sent(order: DeviceOrder, task: Task) -> Task | None:
    """The message of a task, by which its reader is meant as well; None where there is none."""
    last = order.partitions - 1
    goes = (task.phase == "F" and task.partition < last) or (task.phase == "B" and task.partition > 0)
    return task if goes and len(order.tasks) > 1 else None


def received(order: DeviceOrder, task: Task) -> Task | None:
    """The message that a task needs."""
    back = {"F": 1, "B": -1}.get(task.phase)
    other = task.partition - back if back else -1
    if back is None or not 0 <= other < order.partitions:
        return None
    return sent(order, Task(task.phase, other, task.micro))


def reader(order: DeviceOrder, message: Task) -> int:
    """The device that takes it."""
    return (message.partition + (1 if message.phase == "F" else -1)) % len(order.tasks)


# ------------------------------------------------------------------------------------------------ as torch posts them


def _gpipe(order: DeviceOrder, device: int) -> Iterator[Action]:
    for _, tasks in groupby(order.tasks[device], key=lambda task: task.phase):
        sends = []
        for task in tasks:
            yield from _take(received(order, task))
            yield Action(Doing.RUN, task)
            yield from _each(Doing.POST, sent(order, task))
            sends.append(sent(order, task))
        yield from _each(Doing.WAIT, *sends)


def _1f1b(order: DeviceOrder, device: int) -> Iterator[Action]:
    """What is sent waits for the next receive where a task of the other phase follows."""
    tasks, left, under_way = order.tasks[device], None, None
    for number, task in enumerate(tasks):
        yield from _take(left, received(order, task))
        yield Action(Doing.RUN, task)
        yield from _each(Doing.WAIT, under_way)
        alike = number + 1 == len(tasks) or tasks[number + 1].phase == task.phase
        left, under_way = (None, sent(order, task)) if alike else (sent(order, task), None)
        yield from _each(Doing.POST, under_way)
    yield from _each(Doing.WAIT, under_way)


def _lowered(order: DeviceOrder) -> tuple[Program, ...]:
    """Tasks are placed in rounds, one of each device whose message is placed; with each what it sends, at both ends."""
    made: list[list[Action]] = [[] for _ in order.tasks]
    known: set[Task | None] = {None}
    waiting = {device: deque(_with_turns(order, tasks)) for device, tasks in enumerate(order.tasks)}
    while any(waiting.values()):
        for device, tasks in waiting.items():
            if not tasks or (tasks[0] is not None and received(order, tasks[0]) not in known):
                continue
            task = tasks.popleft()
            if task is not None:
                message = sent(order, task)
                known.add(message)
                made[device] += [Action(Doing.RUN, task), *_each(Doing.POST, message)]
                if message is not None:
                    made[reader(order, message)].append(Action(Doing.POST, message))
    return tuple(map(tuple, made))


def _with_turns(order: DeviceOrder, tasks: Sequence[Task]) -> Iterator[Task | None]:
    """None where torch has something of FSDP instead, which we do not use: it has its turn in the rounds.

    Parameters of the `GATHERED` partitions that run next are there, and gradients are summed at a partition's end.
    """
    there: set[int] = set()
    ends = {task.partition: number for number, task in enumerate(tasks)}
    for number, task in enumerate(tasks):
        wanted = _next_partitions(tasks, number)
        yield from repeat(None, len(wanted ^ there))
        there = wanted
        yield task
        if ends[task.partition] == number:
            yield None


def _next_partitions(tasks: Sequence[Task], number: int) -> set[int]:
    found: set[int] = set()
    for other in range(number, len(tasks)):
        found.add(tasks[other].partition)
        if len(found) == GATHERED:
            break
    return found


def _with_waits(order: DeviceOrder, program: Program) -> Iterator[Action]:
    sends = []
    for action in program:
        if action.doing is Doing.RUN:
            yield from _each(Doing.WAIT, received(order, action.task))
            sends.append(sent(order, action.task))
        yield action
    yield from _each(Doing.WAIT, *sends)


# ------------------------------------------------------------------------------------------------------- other ways


def _waited_for_at_once(program: Iterable[Action]) -> Iterator[Action]:
    """What is posted between two tasks is waited for there."""
    for runs, actions in groupby(program, key=lambda action: action.doing is Doing.RUN):
        if runs:
            yield from actions
        else:
            posted = [action.task for action in actions if action.doing is Doing.POST]
            yield from _take(*posted)


def _sent_at_once(order: DeviceOrder, device: int, sender_waits: bool) -> Iterator[Action]:
    """Readers post nothing."""
    for task in order.tasks[device]:
        yield from _each(Doing.WAIT, received(order, task))
        yield Action(Doing.RUN, task)
        yield from _each(Doing.POST, sent(order, task))
        yield from _each(Doing.WAIT, sent(order, task) if sender_waits else None)


def _take(*messages: Task | None) -> Iterator[Action]:
    """All are posted, then waited for."""
    yield from _each(Doing.POST, *messages)
    yield from _each(Doing.WAIT, *messages)


def _each(doing: Doing, *messages: Task | None) -> Iterator[Action]:
    return (Action(doing, message) for message in messages if message is not None)
