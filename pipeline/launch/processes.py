"""The processes of a launch: which of them are ranks, which stand still, and their end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import suppress

import psutil

GONE = (ProcessLookupError, psutil.Error)


class Processes:
    """The launcher and its ranks, or the one rank that was started without a launcher."""

    def __init__(self, started: subprocess.Popen[bytes], count: int, rank: int | None) -> None:
        """So many ranks, or the one that this is."""
        self.started, self.count = started, count
        self.above = psutil.Process(started.pid)
        self.alone = {rank: self.above} if rank is not None else None
        self.known: dict[int, psutil.Process] = {}
        self.halted: dict[int, tuple[psutil.Process, float]] = {}  # by rank: what is stopped, and since when
        self.launcher_halted: float | None = None
        self.asked: set[int] = set()  # processes that were told to end

    def ranks(self) -> dict[int, psutil.Process]:
        """By their number. Looked for again when one is not there, as that reads all processes of the host."""
        if self.alone is not None:
            return self.alone
        if len(self.known) < self.count or not all(map(_lives, self.known.values())):
            self.known = {}
            with suppress(psutil.Error):
                for process in filter(_lives, self.above.children()):
                    with suppress(psutil.Error, KeyError, ValueError):
                        self.known[int(process.environ()["RANK"])] = process
        return self.known

    def look(self, now: float) -> None:
        """Takes note of what is stopped; what was stopped when it ended stays noted until a new rank has its number."""
        for rank, process in self.ranks().items():
            if _status(process) == psutil.STATUS_STOPPED:
                if rank not in self.halted or self.halted[rank][0] != process:
                    self.halted[rank] = process, now
            elif _lives(process):
                self.halted.pop(rank, None)
        halted = self.alone is None and _status(self.above) == psutil.STATUS_STOPPED
        self.launcher_halted = (self.launcher_halted or now) if halted else None

    def told(self) -> str:
        """Who is stopped, for the user; nothing where nobody is."""
        names = [f"rank {rank} ({_place(process)})" for rank, (process, _) in self.halted.items()]
        if self.launcher_halted is not None:
            names.append(self.launcher())
        verb = "is" if len(names) == 1 else "are"
        return f"{', '.join(names)} {verb} stopped, by SIGSTOP or a debugger" if names else ""

    def launcher(self) -> str:
        return f"the launcher, torchrun ({_place(self.above)})"

    def end_halted(self, before: float) -> None:
        """Ranks that have been stopped since then or longer: they died, as far as others are concerned."""
        for process, since in self.halted.values():
            if since <= before:
                with suppress(psutil.Error):
                    process.kill()

    def ask(self, number: int) -> None:
        """Tells the ranks to end; again and again until they do, as a launcher may start others.

        Ranks that come after the first were asked, and a launcher without ranks, are ended by the launcher.
        """
        ranks = [process for process in self.ranks().values() if _lives(process)]
        new = [process for process in ranks if process.pid not in self.asked]
        if not ranks or (self.asked and new):
            with suppress(*GONE):
                self.above.send_signal(signal.SIGTERM)
            self.asked |= {process.pid for process in new}
            return
        for process in new:
            with suppress(*GONE):
                process.send_signal(signal.SIGCONT)
                process.send_signal(number)
            self.asked.add(process.pid)

    def end(self) -> None:
        """At once, where they still run; ranks lie in sessions of their own."""
        if self.started.poll() is not None:
            return
        below: list[psutil.Process] = []
        with suppress(psutil.Error):
            below = self.above.children(recursive=True)
        with suppress(*GONE):
            os.killpg(self.started.pid, signal.SIGTERM)  # a launcher that has heard it starts no more ranks
        for process in below:
            with suppress(*GONE):
                process.kill()
        try:
            self.started.wait(timeout=5)
        except subprocess.TimeoutExpired:
            with suppress(*GONE):
                os.killpg(self.started.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.started.wait(timeout=5)


def _lives(process: psutil.Process) -> bool:
    return _status(process) not in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status()) if process.is_running() else psutil.STATUS_DEAD
    except psutil.Error:
        return psutil.STATUS_DEAD


def _place(process: psutil.Process) -> str:
    return f"process {process.pid} on {socket.gethostname()}"
