"""torch's own pipeline schedules run without tensors, ranks as threads with clocks of their own.

A stage's forward and backward move the clock of its rank; a message begins when both ends have posted it, after what
their ranks computed until then, and a rank that waits goes on when it is there. As NCCL has it, messages that one rank
posts alone are on a stream of the pair of ranks, one after another; those that are posted together begin at once.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from torch.distributed.pipelining import schedules

from shardwright.pipeline.cost.pipelines.play import Load
from shardwright.pipeline.runtime.pipelining.stage import SCHEDULES

PATIENCE = 60.0  # seconds in which some rank moves
Key = tuple[str, int, int]  # phase, partition that sends, micro-batch


class Wires:
    """Messages between ranks: when each of their ends is posted, and when they are there."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads, self.moved = loads, threading.Condition()
        self.ends: dict[Key, list[tuple[float, Key | None]]] = defaultdict(list)  # posted when, behind which message
        self.there: dict[Key, float] = {}

    def post(self, key: Key, now: float, behind: Key | None) -> None:
        with self.moved:
            self.ends[key].append((now, behind))
            self.moved.notify_all()

    def wait(self, key: Key) -> float:
        with self.moved:
            assert self.moved.wait_for(lambda: self._arrival(key) is not None, PATIENCE), f"{key} never comes"
            return self.there[key]

    def _arrival(self, key: Key) -> float | None:
        """Once both ends are posted, and what is before it on their stream is there."""
        if key in self.there or len(self.ends[key]) < 2:
            return self.there.get(key)
        before = [self._arrival(behind) for _, behind in self.ends[key] if behind]
        if None in before:
            return None
        begins = max(now for now, _ in self.ends[key])
        cut = key[1] - (key[0] == "B")
        self.there[key] = max([begins, *(time for time in before if time is not None)]) + self.loads[cut].send
        return self.there[key]


class Rank:
    def __init__(self, number: int, wires: Wires) -> None:
        self.number, self.wires, self.now = number, wires, 0.0
        self.streams: dict[int, Key] = {}  # the last message of each pair
        self.ran: list[tuple[str, float, float]] = []

    def run(self, name: str, seconds: float) -> None:
        self.ran.append((name, self.now, self.now + seconds))
        self.now += seconds

    def posted(self, ops: list[SimpleNamespace]) -> list[SimpleNamespace]:
        together = len({op.sends for op in ops}) == 2
        for op in ops:
            self.wires.post(op.key, self.now, None if together else self.streams.get(op.peer))
            if not together:
                self.streams[op.peer] = op.key
        return [SimpleNamespace(wait=lambda key=op.key: self._wait(key)) for op in ops]

    def _wait(self, key: Key) -> None:
        self.now = max(self.now, self.wires.wait(key))


class FakeStage:
    """What a schedule asks of a stage."""

    submod = None

    def __init__(self, number: int, count: int, ranks: Sequence[Rank], micro_batches: int) -> None:
        self.stage_index, self.num_stages, self.group_size = number, count, len(ranks)
        self.rank, self.group_rank = ranks[number % len(ranks)], number % len(ranks)
        self.micro_batches, self.ranks = micro_batches, ranks
        self.is_first, self.is_last = number == 0, number == count - 1
        self.load = self.rank.wires.loads[number]

    def __getattr__(self, name: str) -> object:
        """What a schedule does to a stage beside this has no seconds."""
        if name.startswith("_") or name not in ("perform_reduce_grad", "scale_grads", "clear_runtime_states"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def forward_one_chunk(self, chunk: int, *_: object, **__: object) -> None:
        self.rank.run(f"F{self.stage_index}.{chunk}", self.load.forward)

    def backward_one_chunk(self, chunk: int, full_backward: bool = True, **_: object) -> None:
        self.rank.run(f"B{self.stage_index}.{chunk}", self.load.backward - (0 if full_backward else self.load.weight))

    def backward_weight_one_chunk(self, chunk: int, **_: object) -> None:
        self.rank.run(f"W{self.stage_index}.{chunk}", self.load.weight)

    def get_fwd_recv_ops(self, chunk: int) -> list[SimpleNamespace]:
        return self._op("F", self.stage_index - 1, chunk, False)

    def get_bwd_recv_ops(self, chunk: int) -> list[SimpleNamespace]:
        return self._op("B", self.stage_index + 1, chunk, False)

    def get_fwd_send_ops(self, chunk: int) -> list[SimpleNamespace]:
        return [] if self.is_last else self._op("F", self.stage_index, chunk, True)

    def get_bwd_send_ops(self, chunk: int) -> list[SimpleNamespace]:
        return [] if self.is_first else self._op("B", self.stage_index, chunk, True)

    def _op(self, phase: str, sender: int, chunk: int, sends: bool) -> list[SimpleNamespace]:
        if not 0 <= sender < self.num_stages:
            return []
        other = self.stage_index + (1 if (phase == "F") == sends else -1)
        return [SimpleNamespace(key=(phase, sender, chunk), sends=sends, peer=other % self.group_size)]


@contextmanager
def as_threads(ranks: Sequence[Rank]) -> Iterator[threading.local]:
    """torch's functions that post messages, and prepare what is not here."""
    here = threading.local()

    def post(ops: list[SimpleNamespace], desc: str | None = None) -> list[SimpleNamespace]:
        return ranks[here.number].posted(ops) if ops else []

    def by_peer(ops: list[SimpleNamespace], desc: str | None = None) -> dict[int, list[SimpleNamespace]]:
        return {peer: post([op for op in ops if op.peer == peer]) for peer in sorted({op.peer for op in ops})}

    nothing = mock.patch.object(schedules._PipelineSchedule, "_check_inputs", lambda self, a, k, *_: (a, k))
    stages = mock.patch.object(schedules.PipelineScheduleMulti, "_initialize_stages", lambda *_, **__: None)
    stage = mock.patch.object(schedules.PipelineScheduleSingle, "_initialize_stage", lambda *_, **__: None)
    posts = mock.patch.multiple(schedules, _batch_p2p=post, _sorted_batch_p2p=by_peer)
    with nothing, stages, stage, posts:
        yield here


def run_torch(name: str, devices: int, loads: Sequence[Load], micro_batches: int) -> list[Rank]:
    """The ranks after a step of the schedule that our runtime takes by this name."""
    wires = Wires(loads)
    ranks = [Rank(number, wires) for number in range(devices)]
    failed: list[BaseException] = []

    def step(number: int) -> None:
        try:
            here.number = number
            stages = [FakeStage(n, len(loads), ranks, micro_batches) for n in range(number, len(loads), devices)]
            single = issubclass(SCHEDULES[name], schedules.PipelineScheduleSingle)
            schedule = SCHEDULES[name](stages[0] if single else stages, micro_batches, scale_grads=False)
            schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, return_outputs=False)
        except BaseException as error:
            failed.append(error)

    with as_threads(ranks) as here:
        threads = [threading.Thread(target=step, args=(number,)) for number in range(devices)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
    return ranks
