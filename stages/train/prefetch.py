"""The next step's batches, read while the step before runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

Read = TypeVar("Read")


class Prefetched(Generic[Read]):
    """What `read` gives for each step up to `steps`, asked for in any order; one thread reads, one step at a time.

    Only the step after the one that was asked for last is read ahead, so what is held is that of two steps. The first
    is read by who asks: if that moves torch's own generator, so are all others, as reading in between the steps' own
    draws would make both depend on who comes first.
    """

    def __init__(self, read: Callable[[int], Read], steps: int) -> None:
        self.read, self.steps = read, steps
        self.ahead: bool | None = None  # not known before the first
        self.wanted: SimpleQueue[int | None] = SimpleQueue()
        self.found: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.under_way: int | None = None

    def __getitem__(self, step: int) -> Read:
        result = self._take() if self.under_way == step else self._read_here(step)
        if self.ahead and step + 1 < self.steps:
            self._begin(step + 1)
        return result

    def close(self) -> None:
        """What is under way is waited for: nothing reads the data afterwards."""
        self._drop()
        self.wanted.put(None)

    def _read_here(self, step: int) -> Read:
        self._drop()
        before = torch.get_rng_state()
        result = self.read(step)
        if self.ahead is None:
            self.ahead = torch.equal(before, torch.get_rng_state())
            # A daemon: a data set that hangs must not keep the rank from ending.
            threading.Thread(target=self._work, daemon=True, name="prefetch").start()
        return result

    def _begin(self, step: int) -> None:
        self.under_way = step
        self.wanted.put(step)

    def _take(self) -> Read:
        self.under_way = None
        result, error = self.found.get()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def _drop(self) -> None:
        if self.under_way is not None:
            self.under_way = None
            self.found.get()

    def _work(self) -> None:
        while (step := self.wanted.get()) is not None:
            try:
                self.found.put((self.read(step), None))
            except BaseException as error:  # the user's data: raised where the step is asked for
                self.found.put((None, error))
