"""What ranks tell one another beside training, over the store on which they met; it costs a step nothing.

A thread of each rank listens. `call` reaches all of them, also those whose main thread waits for another rank:

| call | what a rank does |
|---|---|
| `stop 15` | says how many steps it will have done after the one that runs; all end after the most that was said |
| `hang` | says what it is doing, and where in the code: who is not waiting for others is the one that hangs |
"""

from __future__ import annotations

import json
import linecache
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwright.pipeline.base.signals import ASKING
from shardwright.pipeline.runtime.context import step
from shardwright.pipeline.user.batches import Batches
from shardwright.stages.train.data import PREFETCH, Prefetched

ANSWER_S = 10.0  # within which every rank answers; its main thread is not asked
FOR_EVER = timedelta(days=1000)
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_WAITING = Prefetched._take.__code__
Statuses = dict[int, dict[str, Any]]


class Peers:
    def __init__(self, store: dist.Store, rank: int, hosts: list[str]) -> None:
        """`hosts` of all ranks."""
        self.rank, self.hosts = rank, hosts
        self.ear, self.mouth = (dist.PrefixStore("peers", store.clone()) for _ in range(2))
        self.busy = threading.Lock()  # one at a time speaks
        self.between = threading.Lock()  # a step begins, or this rank says where it stands
        self.begun = 0  # steps that are done when the one that runs is
        self.signal: int | None = None  # that asked for the end
        self.target: int | None = None  # so many steps are done by all
        self.settled = threading.Event()
        self.closed = False
        self.on_silence: Callable[[str], None] = print
        self.what: Callable[[], str] = lambda: ""  # is under way here

    def listen(self, on_silence: Callable[[str], None], what: Callable[[], str]) -> None:
        """`on_silence` is called where others do not answer."""
        self.on_silence, self.what = on_silence, what
        self.listener = threading.Thread(target=self._listen, daemon=True, name="peers")
        self.listener.start()

    def close(self) -> None:
        """Before this rank ends well: a thread that still waits for the store when that goes aborts the process."""
        self.closed = True
        self.call("closed")
        self.listener.join(ANSWER_S)

    # ---- the end before the last step

    def ends(self, done: int) -> bool:
        """Asked before each step, when so many are done: whether the run is to end here."""
        with self.between:
            if self.signal is None:
                self.begun = done + 1
                return False
        self.settled.wait()
        return done >= (self.target or 0)

    def heed_signals(self) -> None:
        """In the main thread. They are read by a thread: the main one may wait for another rank."""
        heard, wakes = socket.socketpair()
        wakes.setblocking(False)
        for number in ASKING:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_signals)
        self._wakes = wakes  # it lives as long as this

        def read() -> None:
            while number := heard.recv(1):
                if number[0] in ASKING:
                    self.ask_all(number[0])

        threading.Thread(target=read, daemon=True, name="signals").start()

    def ask_all(self, number: int) -> None:
        """To end, as this rank was by that signal. Without the first rank there is nobody to agree with, nor a run."""
        if not self.call(f"stop {number}") and not self.closed:
            self.on_silence(f"rank 0 on {self.hosts[0]}, with which the ranks meet, is gone")

    def _stop(self, number: int) -> None:
        with self.between:
            self.signal, mine = number, self.begun
        self.ear.set(f"at {self.rank}", str(mine))
        said = self._heard("at", ANSWER_S)
        silent = [rank for rank in range(len(self.hosts)) if rank not in said]
        if silent:
            names = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in silent)
            self.on_silence(f"{names} did not answer when the run was told to end by {signal.Signals(number).name}")
            return
        self.target = max(map(int, said.values()))
        self.settled.set()

    # ---- who hangs

    def explain(self, what: str) -> str:
        """`what` was not done in time: who hangs. The store may hang with its rank, so it is asked by a thread."""
        found: Statuses = {}

        def ask() -> None:
            self.call("hang")
            found.update({rank: json.loads(text) for rank, text in self._heard("doing", ANSWER_S).items()})

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(ANSWER_S * 1.5)
        return who_hangs(what, self.hosts, found or None)

    # ---- talking

    def call(self, text: str) -> bool:
        """Whether the store is there to pass it on."""
        with suppress(dist.DistError, RuntimeError), self.busy:
            self.mouth.set(f"call {self.mouth.add('calls', 1)}", text)
            return True
        return False

    def _listen(self) -> None:
        number = 0
        with suppress(dist.DistError, RuntimeError):  # the store is gone, and soon this rank
            while not self.closed:
                number += 1
                self.ear.wait([f"call {number}"], FOR_EVER)
                word, *given = self.ear.get(f"call {number}").decode().split()
                if word == "stop" and self.signal is None:
                    self._stop(int(given[0]))
                elif word == "hang":
                    self.ear.set(f"doing {self.rank}", json.dumps({"what": self.what(), **place_of_work()}))

    def _heard(self, key: str, seconds: float) -> dict[int, str]:
        """What ranks have said under that key, when all have or the time is over."""
        own = self.ear.clone() if threading.current_thread().name != "peers" else self.ear
        missing, found = set(range(len(self.hosts))), {}
        deadline = time.monotonic() + seconds
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                if own.check([f"{key} {rank}"]):
                    found[rank] = own.get(f"{key} {rank}").decode()
                    missing.discard(rank)
            time.sleep(0.05 if missing else 0)
        return found


def who_hangs(what: str, hosts: list[str], found: Statuses | None) -> str:
    """Who hangs, for the user; `found` is None where the store itself did not answer, which is with the first rank."""
    names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
    if found is None:
        return f"{what}: {names[0]}, or the host on which ranks meet, does not answer: it is stopped or gone"
    silent = [name for rank, name in enumerate(names) if rank not in found]
    if silent:
        return f"{what}: {', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer: stopped or gone"
    at = {rank: f"{names[rank]} is at {status['at']}" for rank, status in found.items()}
    hanging = [rank for rank, status in found.items() if not status["waits"]]
    if hanging and len(hanging) < len(names):
        return f"{what}: " + ", ".join(f"{names[rank]} hangs at {found[rank]['at']}" for rank in hanging[:4])
    return f"{what}: " + ", ".join(at[rank] for rank in sorted(at)[:4])


def _forget_signals() -> None:
    """A process that the user's data set forks ends as usual, and its signals are not ours."""
    signal.set_wakeup_fd(-1)
    for number in ASKING:
        signal.signal(number, signal.SIG_DFL)


def place_of_work() -> dict[str, Any]:
    """Of the main thread: its file and line, the innermost that is not of an installed package; and whether it waits
    for other ranks. Where it waits for data that is read ahead, of the thread that reads."""
    threads = {thread.name: thread.ident for thread in threading.enumerate()}
    now = sys._current_frames()
    frame = now.get(threading.main_thread().ident or 0)
    if frame is not None and (frame.f_code is _WAITING or Path(frame.f_code.co_filename).name == "queue.py"):
        frame = now.get(threads.get(PREFETCH) or 0, frame)
    if frame is None:
        return {"at": "an unknown place", "waits": False}
    file, line = frame.f_code.co_filename, linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    waits = "torch/distributed" in file or ".wait(" in line  # in a call of torch.distributed, or for one under way
    outwards = [each for each, _ in traceback.walk_stack(frame)]
    own = next((each for each in outwards if not each.f_code.co_filename.startswith(_INSTALLED)), frame)
    reads = any(each.f_code is Batches._read.__code__ for each in outwards)  # and not a thread ahead of this one
    sample = step.sample if reads else None
    read = f", reading sample {sample}" if sample is not None else ""
    return {"at": f"{own.f_code.co_filename}:{own.f_lineno}{read}", "waits": not reads and waits}
