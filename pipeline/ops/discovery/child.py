"""A function in a child process: whatever it does there (crash, abort, hang, eat memory), this process goes on.

The child is a fork, so it has all that is imported, an op of the user's own too. It runs on one thread, as a forked
process must with OpenMP, and says nothing. Its limit is the processor's time, which a busy machine does not change; one
that only waits is ended much later. Where a fork cannot run backward passes, because this process has run one and there
is a GPU, the child is a new process that imports what this one has imported.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

PROCESSOR_SECONDS = 60
SECONDS = 300.0
MEMORY = 8 << 30  # bytes beyond what this process has
_DONE, _UNFIT = b"+", b"-"
Given = TypeVar("Given")


@dataclass(frozen=True)
class Attempt:
    """What a function returned in its child, or how the child ended."""

    text: str | None
    why: str = ""
    certain: bool = True  # it would end the same way again


def attempt(function: Callable[[Given], str], given: Given) -> Attempt:
    """Runs a function of a module, which returns a text; one that raises gives no text."""
    if sys.platform != "linux":  # elsewhere a forked process may not use the system's libraries
        try:
            return Attempt(function(given))
        except Exception as error:  # whatever it raises
            return Attempt(None, f"failed: {type(error).__name__}")
    return _forked(function, given) or _started(function, given) or Attempt(None, "failed")


def _forked(function: Callable[[Given], str], given: Given) -> Attempt | None:
    """None where a fork is not fit for it."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of threads: the child uses none
        process = os.fork()
    if process == 0:
        os.close(reading)
        _child(function, given, writing, _has_autograd)
    os.close(writing)
    end = partial(os.kill, process, signal.SIGKILL)
    return _answer(reading, end, lambda: os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def _started(function: Callable[[Given], str], given: Given) -> Attempt | None:
    """A new process has run no backward pass yet."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_import_and_run, args=(_imported(), function, given, sender), daemon=True)
    process.start()
    sender.close()

    def wait() -> int:
        process.join()
        return process.exitcode or 0

    return _answer(os.dup(receiver.fileno()), process.kill, wait)


def _imported() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] not in sys.stdlib_module_names]


def _import_and_run(modules: list[str], function: Callable[[Given], str], given: Given, sender: Connection) -> None:
    for name in modules:
        with suppress(Exception):  # some can be imported as a part of something else alone
            importlib.import_module(name)
    _child(function, given, sender.fileno(), lambda: True)


def _answer(reading: int, end: Callable[[], None], wait: Callable[[], int]) -> Attempt | None:
    data, in_time, code = b"", False, 0
    try:
        data, in_time = _read(reading, time.monotonic() + SECONDS)
    finally:
        os.close(reading)
        if not in_time:
            end()
        code = wait()
    if data == _UNFIT:
        return None
    if data.startswith(_DONE) and data.endswith(_DONE) and len(data) > 1:
        return Attempt(data[1:-1].decode())
    if not in_time:
        return Attempt(None, f"did not end within {SECONDS:.0f} s", certain=False)
    return Attempt(None, f"died of {signal.Signals(-code).name}" if code < 0 else "failed")


def _read(pipe: int, until: float) -> tuple[bytes, bool]:
    """All that comes, and whether the end came in time."""
    found = b""
    while (left := until - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            part = os.read(pipe, 1 << 16)
            if not part:
                return found, True
            found += part
    return found, False


def _child(function: Callable[[Given], str], given: Given, writing: int, is_fit: Callable[[], bool]) -> None:
    """Never returns, and runs nothing that the process would run at its end."""
    try:
        faulthandler.disable()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        _limit()
        torch.set_num_threads(1)
        answer = _DONE + function(given).encode() + _DONE if is_fit() else _UNFIT
        while answer:
            answer = answer[os.write(writing, answer) :]
        os._exit(0)
    finally:  # also for SystemExit and KeyboardInterrupt
        os._exit(1)


def _has_autograd() -> bool:
    """Not in a fork of a process whose backward passes have run on a GPU."""
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        return False
    return True


def _limit() -> None:
    import resource

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    with suppress(ValueError, OSError):  # a lower limit is there already
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):
        most = int(time.process_time()) + PROCESSOR_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
    with suppress(ValueError, OSError):
        own = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (own + MEMORY, own + MEMORY))
