"""Signals that ask a command to end: it cleans up, and its exit status is 128 and the signal's number.

Most commands are interrupted where they are. One that has something to save is `gentle`: it is told, and ends by
itself; a second signal interrupts it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_S = 1.0  # a signal that comes so soon after another is the same one, passed on by somebody else
CLEANING_S = 10.0  # after the interruption: nothing disturbs the cleaning up
DVC = "DVC_STAGE"  # which DVC sets for a stage that it runs


class Interrupted(KeyboardInterrupt):
    """By a signal."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.status = 128 + number
        super().__init__(signal.Signals(number).name)


class _Asked:
    def __init__(self) -> None:
        self.gentle = False
        self.number: int | None = None  # the first signal
        self.at = self.raised = -float("inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self.at < SAME_S or now - self.raised < CLEANING_S:
            return
        first, self.at = self.number is None, now
        self.number = self.number or number
        if not (first and self.gentle):
            self.raised = now
            raise Interrupted(self.number)


_asked: _Asked | None = None  # while a command runs


@contextmanager
def interruptible() -> Iterator[None]:
    """While a command runs, in its main thread; what its caller told it to ignore, as `nohup` does, it ignores."""
    global _asked
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in ASKING if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    _asked = _Asked()
    before = {number: signal.signal(number, _asked) for number in heeded}
    if os.environ.get(DVC):
        _follow_dvc()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked = None


@contextmanager
def gentle() -> Iterator[Callable[[], int | None]]:
    """Inside, the first signal is only noted: what is yielded tells its number."""
    asked = _asked
    if asked is None:
        yield lambda: None
        return
    asked.gentle = True
    try:
        yield lambda: asked.number
    finally:
        asked.gentle = False


def run_dvc(command: list[str], root: Path, environ: Mapping[str, str], **streams: Any) -> int:
    """Its status. A signal goes to the stage that DVC runs, and DVC ends with it; else DVC itself is ended."""
    with gentle() as asked:
        process = subprocess.Popen(command, cwd=root, env=dict(environ), **streams)
        try:
            told = False
            while process.poll() is None:
                number = asked()
                if number and not told:
                    told = True
                    for target in _stages_below(process.pid) or [process.pid]:
                        with suppress(ProcessLookupError):
                            os.kill(target, number)
                time.sleep(0.05)
        except BaseException:
            process.kill()  # its stage follows it
            process.wait()
            raise
        number = asked()
    if number:
        raise Interrupted(number)
    return process.returncode


def _stages_below(pid: int) -> list[int]:
    import psutil

    found = []
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                if is_stage(process.cmdline()):
                    found.append(process.pid)
    return found


def is_stage(argv: Sequence[str]) -> bool:
    """Of a command line: `python -m shardwright ...`, `python -m stages ...`, `python .../shardwright ...`."""
    first, second = [*argv[1:3], "", ""][:2]
    return second in ("shardwright", "stages") if first == "-m" else Path(first).name == "shardwright"


def _forget() -> None:
    """A process that was forked ends as it would have without us."""
    global _asked
    if _asked is not None:
        _asked = None
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


os.register_at_fork(after_in_child=_forget)


def is_dvc(argv: Sequence[str]) -> bool:
    """Whether a command line is dvc itself: `dvc ...`, `python .../dvc ...`, `python -m dvc ...`; not its shell."""
    names = ("dvc", "dvc.exe")
    if not argv or Path(argv[0]).name in names:
        return bool(argv)
    if not Path(argv[0]).name.lower().startswith(("python", "pypy")):
        return False
    rest = argv[1:]
    while rest and rest[0].startswith("-"):
        if re.fullmatch(r"-[A-Za-z]*m", rest[0]):
            return rest[1:2] == ["dvc"]
        if re.fullmatch(r"-[A-Za-z]*c", rest[0]):
            return False
        rest = rest[2:] if rest[0] in ("-X", "-W") else rest[1:]
    return bool(rest) and Path(rest[0]).name in names


def dvc_above() -> psutil.Process | None:
    """The dvc that has started this process, directly or by others."""
    import psutil

    for process in psutil.Process().parents():
        with suppress(psutil.Error):
            if is_dvc(process.cmdline()):
                return process
    return None


def _follow_dvc() -> None:
    """DVC does not pass on a signal that ends it: a stage that it has left behind takes it for its own."""
    import psutil

    try:
        above = dvc_above()
    except psutil.Error:
        return
    if above is None:
        return

    def follow() -> None:
        try:
            while above.is_running() and above.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.5)
        except psutil.NoSuchProcess:
            pass
        except psutil.Error:
            return
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True, name="follow-dvc").start()
