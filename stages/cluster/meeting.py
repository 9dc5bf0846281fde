"""Hosts that measure together: who has come, with which versions, and who falls silent. A TCP store on the first host.

The process of the first host serves the store (`Meeting`). Another host's process (`join.py`) says who it is and waits
for the word to start (`Guest`). Every rank says once a second what it does (`Voice`); the first host listens while its
own ranks run (`Meeting.listen`), so a rank that is dead, stopped or cut off is told by its number and host within
SILENT_S, and not by what its peers make of it.
"""

from __future__ import annotations

import itertools
import json
import platform
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from shardwright.pipeline.base.artifacts import KINDS
from shardwright.pipeline.launch.work_folder import LaunchFailed

BEAT_S = 1.0
STOP_S = 5.0  # that a rank which is through waits for its last beat
SILENT_S = 15.0
LAST_WORDS_S = 10.0  # after a failure here, for the reason to arrive from elsewhere
PART_S = 10.0
LOCAL = "127.0.0.1"


def versions() -> dict[str, str]:
    """What must be equal on all hosts."""
    return {
        "torch": str(torch.__version__).split("+")[0],
        "python": ".".join(platform.python_version_tuple()[:2]),
        "cluster artifact": str(KINDS["cluster"].version),
    }


@dataclass(frozen=True)
class Arrival:
    host: str
    devices: int
    versions: dict[str, str] = field(default_factory=versions)


class Meeting:
    """The first host's side."""

    def __init__(self, own: Arrival, others: tuple[str, ...], port: int) -> None:
        self.own, self.others = own, others
        address = "0.0.0.0" if others else LOCAL
        try:
            self.store = TCPStore(
                address, port if others else 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
            )
        except (RuntimeError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise LaunchFailed(f"port {port} of host {own.host} cannot be used: {reason}") from error
        self.ranks: list[str] = []  # host of each rank
        self.heard: dict[int, tuple[str, float]] = {}  # rank -> its last word, and when it was heard

    @property
    def address(self) -> tuple[str, int]:
        return self.own.host if self.others else LOCAL, self.store.port

    def gather(self, timeout: float) -> list[Arrival]:
        """Everyone who should come, this host first; LaunchFailed names who did not, or came with other versions."""
        deadline = time.monotonic() + timeout
        arrived = [self.own]
        for number, host in enumerate(self.others, start=1):
            text = _get(self.store, f"arrival/{host}", deadline)
            if text is None:
                self._refuse(f"host {host} (node {number}) did not join within {timeout:g} s")
            arrival = Arrival(**json.loads(text or "{}"))
            for what, own in self.own.versions.items():
                other = arrival.versions.get(what, "none")
                if other != own:
                    self._refuse(f"host {host} (node {number}) has {what} {other}, host {self.own.host} has {own}")
            arrived.append(arrival)
        self.ranks = [arrival.host for arrival in arrived for _ in range(arrival.devices)]
        return arrived

    def _refuse(self, reason: str) -> None:
        self.store.set("go", json.dumps({"error": reason}))
        self.part()
        raise LaunchFailed(reason)

    def start(self, word: dict[str, Any]) -> None:
        self.store.set("go", json.dumps(word))

    def stop(self, reason: str) -> None:
        """Tells the other hosts that it is over, and why."""
        self.store.set("stop", reason)
        self.part()

    def part(self) -> None:
        """Stays until those who came are through, since the store ends with this process; but not for ever."""
        deadline = time.monotonic() + PART_S
        for host in self.others:
            if _peek(self.store, f"arrival/{host}"):
                _get(self.store, f"through/{host}", deadline)

    def listen(self, _: Path | None = None) -> None:
        """LaunchFailed where a host has given up or a rank that had spoken is silent for too long."""
        failed = self._last_words()
        if failed:
            raise LaunchFailed(failed)
        now = time.monotonic()
        for rank, host in enumerate(self.ranks):
            word = _peek(self.store, f"beat/{rank}")
            if word is None:
                continue
            before, since = self.heard.get(rank, ("", now))
            if word != before:
                self.heard[rank] = word, now
            elif now - since > SILENT_S:
                doing = word.partition("|")[2]
                raise LaunchFailed(f"rank {rank} on host {host} no longer answers; it was {doing}")

    def explain(self, failure: str) -> str:
        """The reason of a failure that was noticed here: what another host knows, or who was never heard."""
        waits = self.others and " died" not in failure  # a death here is its own reason
        deadline = time.monotonic() + (LAST_WORDS_S if waits else 0.0)
        found = self._last_words()
        while found is None and time.monotonic() < deadline:
            time.sleep(0.1)
            found = self._last_words()
        if found and " died" not in failure:
            return found
        missing = [rank for rank in range(len(self.ranks)) if _peek(self.store, f"beat/{rank}") is None]
        if "did not finish" in failure and missing and self.heard:
            return f"{failure}; rank {missing[0]} on host {self.ranks[missing[0]]} never answered"
        return on_host(failure, self.own.host)

    def _last_words(self) -> str | None:
        """Of the hosts that gave up: a death first, since all other failures follow from it."""
        words = [word for host in self.others if (word := _peek(self.store, f"failed/{host}"))]
        return next((word for word in words if " died" in word), words[0] if words else None)


class Guest:
    """Another host's side."""

    def __init__(self, address: str, port: int, own: Arrival, timeout: float) -> None:
        """Arrives, and says who it is."""
        self.host = own.host
        try:
            self.store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
        except (RuntimeError, OSError) as error:
            raise LaunchFailed(f"host {address} did not answer at port {port} within {timeout:g} s") from error
        self.store.set(f"arrival/{own.host}", json.dumps(asdict(own)))

    def wait(self, timeout: float) -> dict[str, Any]:
        """The word to start."""
        try:
            text = _get(self.store, "go", time.monotonic() + timeout)
        except RuntimeError as error:
            raise LaunchFailed("the first host is gone") from error
        if text is None:
            raise LaunchFailed(f"the first host did not start within {timeout:g} s")
        word: dict[str, Any] = json.loads(text)
        if "error" in word:
            self.through()
            raise LaunchFailed(word["error"])
        return word

    def listen(self, _: Path | None = None) -> None:
        try:
            reason = _peek(self.store, "stop")
        except RuntimeError as error:
            raise LaunchFailed("the first host is gone") from error
        if reason:
            raise LaunchFailed(reason)

    def through(self) -> None:
        self.store.set(f"through/{self.host}", "")

    def failed(self, reason: str) -> None:
        with suppress(RuntimeError):  # the first host is gone, and knows
            self.store.set(f"failed/{self.host}", on_host(reason, self.host))
            self.through()


class Voice:
    """A rank's side: says once a second what it does, where someone listens."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self.rank = rank
        self.doing = "starting"
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None
        if "meeting" not in job:  # started by hand
            return
        address, port = job["meeting"]
        self.store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=job["timeout_s"]))
        self.thread = threading.Thread(target=self._speak, daemon=True, name="voice")
        self.thread.start()

    def stop(self) -> None:
        """Before the process ends: a thread that is inside the store at that moment aborts it (SIGABRT)."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join(STOP_S)

    def _speak(self) -> None:
        for count in itertools.count():
            try:
                self.store.set(f"beat/{self.rank}", f"{count}|{self.doing}")
            except RuntimeError:
                return  # nobody listens any more
            if self.ended.wait(BEAT_S):
                return


def _peek(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _get(store: Any, key: str, deadline: float) -> str | None:
    while (text := _peek(store, key)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return text


def on_host(reason: str, host: str) -> str:
    """Which of the hosts it was, where a launcher tells that one of its ranks died."""
    return reason if " on host " in reason else reason.replace(" died of", f" on host {host} died of", 1)
