"""A rank's batches: the next step's, read while the step before runs; and those that are not trained on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.base.instantiate import instantiate
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.runtime.step.slices import Slices
from shardwright.pipeline.user.batches import Batches

Read = TypeVar("Read")
PREFETCH = "prefetch"  # the name of the thread that reads


class Prefetched(Generic[Read]):
    """What `read` gives for each step up to `steps`, asked for in any order; one thread reads, one step at a time.

    Only the step after the one that was asked for last is read ahead, so there is that of two steps. The first is
    read by who asks: if that moves torch's own generator, so are all others, as reading in between the steps' own draws
    would make both depend on who comes first.
    """

    def __init__(self, read: Callable[[int], Read], steps: int) -> None:
        self.read, self.steps = read, steps
        self.ahead: bool | None = None  # not known before the first
        self.wanted: SimpleQueue[int | None] = SimpleQueue()
        self.found: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.under_way: int | None = None

    def __getitem__(self, step: int) -> Read:
        if self.under_way == step:
            result, error = self._take()
            if error is not None:
                raise error
        else:
            result = self._read_here(step)
        if self.ahead and step + 1 < self.steps:
            self.under_way = step + 1
            self.wanted.put(step + 1)
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """What is under way is waited for: nothing reads the data afterwards."""
        self._take()
        self.wanted.put(None)

    def _read_here(self, step: int) -> Read:
        self._take()
        before = torch.get_rng_state()
        result = self.read(step)
        if self.ahead is None:
            self.ahead = torch.equal(before, torch.get_rng_state())
            # A daemon: a data set that hangs must not keep the rank from ending.
            threading.Thread(target=self._work, daemon=True, name=PREFETCH).start()
        return result

    def _take(self) -> tuple[Any, BaseException | None]:
        """What was under way, if anything."""
        if self.under_way is None:
            return None, None
        self.under_way = None
        return self.found.get()

    def _work(self) -> None:
        while (step := self.wanted.get()) is not None:
            try:
                self.found.put((self.read(step), None))
            except BaseException as error:  # the user's data: raised where the step is asked for
                self.found.put((None, error))


def held_out_batches(
    job: Mapping[str, Any], layouts: Mapping[str, Layout], axes: list[str], slices: Slices | None = None
) -> list[dict[str, torch.Tensor]]:
    """This rank's part of them, always the same ones, in the data's order; no sample is in two.

    Where the model's batch is cut into slices, these one after another. Whatever they draw, training does not see it.
    """
    with torch.random.fork_rng(devices=[]):
        data = job["data"]
        dataset = instantiate(data["held_out"], f"{job['where']['data']}: held_out")
        batches = Batches(dataset, {**job, "data": {**data, "shuffle": False}}, layouts, axes, "held_out", slices)
        if batches.length < batches.size:
            what = f"it has {batches.length} samples, and a batch of the model {batches.size}"
            raise TrainError(what, where=batches.where, remedy="hold out more of them")
        count = min(job["train"]["evaluate"]["batches"], batches.length // batches.size)
        return [batches[number] for number in range(count * len(batches.slices.samples))]
