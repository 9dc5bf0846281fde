"""A pipeline's orders played: when each device runs its tasks, and when the step ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.pipeline.cost.pipelines.handovers import Doing, Program, programs, reader
from shardwright.pipeline.cost.pipelines.schedules import DeviceOrder, Pipeline, ScheduleError, Sending, Task


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
    ends: tuple[float, ...]  # when each is through, and what it sent is there
    seconds: float


def simulate(order: DeviceOrder, loads: Sequence[Load], sending: Sending = Sending.RUNTIME) -> PlayedSchedule:
    """Every device goes through its program; where that waits, until the message is there."""
    play = _Play(order, loads, sending)
    waiting = set(range(len(order.tasks)))
    while waiting:
        moved = [device for device in sorted(waiting) if play.advance(device)]
        if not moved:
            raise ScheduleError("the devices wait for one another for ever", where="pipeline schedule")
        waiting = {device for device in waiting if not play.is_through(device)}
    size = len(order.tasks)
    once = [sum(load.once for load in loads[device::size]) for device in range(size)]
    seconds = max(now + after for now, after in zip(play.now, once, strict=True))
    return PlayedSchedule(tuple(map(tuple, play.events)), tuple(play.now), seconds)


class _Play:
    def __init__(self, order: DeviceOrder, loads: Sequence[Load], sending: Sending) -> None:
        self.order, self.loads = order, loads
        self.programs: tuple[Program, ...] = programs(order, sending)
        self.split = order.pipeline is Pipeline.ZERO_BUBBLE
        ahead = self.split or order.pipeline is Pipeline.INTERLEAVED
        self.in_turn = ahead and sending is Sending.RUNTIME
        every = (action for program in self.programs for action in program)
        self.ends_to_post = Counter(action.task for action in every if action.doing is Doing.POST)
        self.now, self.places = [0.0] * len(order.tasks), [0] * len(order.tasks)
        self.events: list[list[TaskEvent]] = [[] for _ in order.tasks]
        self.posted: dict[Task, float] = {}  # when the last end so far has
        self.there: dict[Task, float] = {}
        self.free: dict[tuple[int, ...], float] = {}  # the way between two devices

    def is_through(self, device: int) -> bool:
        return self.places[device] == len(self.programs[device])

    def advance(self, device: int) -> bool:
        """As far as the device comes; whether it did anything."""
        program, first = self.programs[device], self.places[device]
        while not self.is_through(device):
            action = program[self.places[device]]
            task = action.task
            if action.doing is Doing.RUN:
                self._run(device, task)
            elif action.doing is Doing.POST:
                self._post(device, task)
            elif task in self.there:
                early = self._early(task) if device == reader(self.order, task) else 0.0
                self.now[device] = max(self.now[device], self.there[task] - early)
            else:
                break
            self.places[device] += 1
        return self.places[device] > first

    def _run(self, device: int, task: Task) -> None:
        start = self.now[device]
        self.now[device] += self.loads[task.partition].seconds(task, self.split, self.order.micro_batches)
        self.events[device].append(TaskEvent(task, start, self.now[device]))

    def _early(self, message: Task) -> float:
        return self.loads[message.partition - 1].early if message.phase == "B" else 0.0

    def _post(self, device: int, message: Task) -> None:
        self.posted[message] = max(self.posted.get(message, 0.0), self.now[device])
        self.ends_to_post[message] -= 1
        if self.ends_to_post[message]:
            return
        way: tuple[int, ...] = (message.partition % len(self.programs), reader(self.order, message))
        if self.in_turn:
            way = tuple(sorted(way))
        cut = message.partition - (message.phase == "B")
        self.there[message] = max(self.posted[message], self.free.get(way, 0.0)) + self.loads[cut].send
        self.free[way] = self.there[message]
