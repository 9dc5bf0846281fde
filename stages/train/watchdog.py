"""A rank that waits for ever ends itself: then the launcher ends the others, and starts all again or gives up."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable


class Watchdog:
    """From the first beat on, one has to come within every `limit_s` seconds."""

    def __init__(self, limit_s: float, on_hang: Callable[[str], None]) -> None:
        self.limit_s, self.on_hang = limit_s, on_hang
        self.last: float | None = None
        self.done = 0  # steps
        self.ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def beat(self, done: int) -> None:
        self.done, self.last = done, time.monotonic()

    def stop(self) -> None:
        self.ended.set()

    def _watch(self) -> None:
        while not self.ended.wait(min(1.0, self.limit_s / 4)):
            if self.last is not None and time.monotonic() - self.last > self.limit_s:
                self.on_hang(f"step {self.done} was not finished within {self.limit_s:g} s (`hang_s`): a rank hangs")
                return


def end_process() -> None:
    """From any thread, whatever the others wait for; where each of them waits goes to the log."""
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)
