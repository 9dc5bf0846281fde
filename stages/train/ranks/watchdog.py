"""A rank that waits for ever ends itself: then the launcher ends the others, and starts all again or gives up."""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from shardwright.pipeline.launch.rank import error_path, report_error

SLOW = 4  # of what may take its time: compiling in a first step, reading all of the weights, a disk that is slow

ASLEEP_TICKS = 10  # a thread that comes so late was stopped

T = TypeVar("T")
Beat = Callable[[], None]
Now = tuple[str, bool, float]  # what is under way, whether it may take its time, and since when


class Watchdog:
    """From its start to its stop: whatever is under way ends, or goes on by a beat, within `limit_s` seconds.

    What may take its time has SLOW times as long. Without a limit nothing is watched.
    """

    def __init__(self, limit_s: float | None = None, on_hang: Callable[[str], None] = print) -> None:
        self.limit_s, self.on_hang = limit_s, on_hang
        place = f"{os.environ.get('RANK', '0')} on {socket.gethostname()}"
        self.explain: Callable[[str], str] = lambda what: f"{what}, as rank {place} sees it"
        self.ended = threading.Event()
        self.beat("the start", slow=True)
        if limit_s is not None:
            threading.Thread(target=self._watch, args=(limit_s,), daemon=True, name="watchdog").start()

    def beat(self, what: str, slow: bool = False) -> None:
        """It is under way from now on, or has come further."""
        self.now: Now = what, slow, time.monotonic()  # as one, for the thread may look at any time

    def beating(self, what: str, slow: bool = False) -> Beat:
        return partial(self.beat, what, slow)

    def stop(self) -> None:
        self.ended.set()

    def _watch(self, limit_s: float) -> None:
        tick = min(1.0, limit_s / 4)
        last = time.monotonic()
        asleep = 0.0  # seconds in which this process was stopped itself, with a whole job perhaps: no hang
        now = self.now
        while not self.ended.wait(tick):
            at = time.monotonic()
            asleep = asleep if now is self.now else 0.0
            asleep += max(0.0, at - last - ASLEEP_TICKS * tick)
            last, now = at, self.now
            told = overdue(now, limit_s, at - asleep)
            if told:
                self.on_hang(told)
                return


def overdue(now: Now, limit_s: float, at: float) -> str:
    """What to say of it at that time; nothing while there is hope."""
    what, slow, since = now
    allowed, named = (SLOW * limit_s, f"{SLOW} times `hang_s`") if slow else (limit_s, "`hang_s`")
    if at - since <= allowed:
        return ""
    return f"{what} was not finished within {allowed:g} s ({named}): a rank hangs"


def unwatched() -> None:
    """A beat where nobody listens."""


def with_beats(items: Iterable[T], beat: Beat) -> Iterator[T]:
    """One before each and one after the last."""
    for item in items:
        beat()
        yield item
    beat()


def watch_process(limit_s: float | None, work: Path, rank: int) -> Watchdog:
    """A hang ends it; `explain` can be set to say who hangs."""
    dog = Watchdog(limit_s, lambda what: give_up(work, rank, dog.explain(what), hang=True))
    return dog


def give_up(work: Path, rank: int, why: str, hang: bool = False) -> None:
    """Ends this rank; told is why, unless something else went wrong before."""
    if not error_path(work, rank).exists():
        report_error(work, rank, why, hang=hang)
    end_process()


def end_process() -> None:
    """From any thread, whatever the others wait for; where each of them waits goes to the log."""
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)
