"""Where in the code this rank is, as another thread of it sees it."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.runtime.context import step
from pipeline.user.batches import Batches

PREFETCH = "prefetch"  # the thread for which the main one waits where data is read ahead
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def place_of_work() -> dict[str, Any]:
    """Of the main thread: its file and line, the innermost that is not of an installed package; and whether it waits
    for other ranks."""
    threads = {thread.name: thread.ident for thread in threading.enumerate()}
    now = sys._current_frames()
    frame = now.get(threading.main_thread().ident or 0)
    if frame is not None and Path(frame.f_code.co_filename).name in ("prefetch.py", "queue.py"):
        frame = now.get(threads.get(PREFETCH) or 0, frame)
    if frame is None:
        return {"at": "an unknown place", "waits": False}
    own = next((f for f in _outwards(frame) if not f.f_code.co_filename.startswith(_INSTALLED)), frame)
    reads = any(f.f_code is Batches._read.__code__ for f in _outwards(frame))  # and not a thread ahead of this one
    sample = step.sample if reads else None
    read = f", reading sample {sample}" if sample is not None else ""
    return {"at": f"{own.f_code.co_filename}:{own.f_lineno}{read}", "waits": not reads and _waits(frame)}


def _waits(frame: FrameType) -> bool:
    """In a call of torch.distributed, or for one that is under way."""
    file, line = frame.f_code.co_filename, linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return "torch/distributed" in file or ".wait(" in line


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
