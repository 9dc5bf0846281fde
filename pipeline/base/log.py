"""Lines that say which stage speaks, and progress that a terminal shows as a bar and a file as plain lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from shardwright.pipeline.base.secrets import without_secrets
from shardwright.pipeline.ir.names import printable

QUIET, NORMAL, VERBOSE = 0, 1, 2
Log = logging.Logger


class Advance(Protocol):
    def __call__(self, done: int, note: str = "") -> None: ...


def get_log(stage: str, verbosity: int = NORMAL) -> Log:
    """A logger whose lines read `[solve] text`; warnings are always shown, details with -v."""
    log = logging.getLogger(f"shardwright.{stage}")
    log.setLevel({QUIET: logging.WARNING, NORMAL: logging.INFO, VERBOSE: logging.DEBUG}[verbosity])
    log.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format(f"[{stage}] %(kind)s%(message)s"))
    log.handlers = [handler]
    return log


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.kind = "warning: " if record.levelno >= logging.WARNING else ""
        return printable(without_secrets(super().format(record)), keep="\n\t")


def say(text: str) -> None:
    """What a command answers, on the output that may be read by a program; names in it do nothing to a terminal."""
    print(printable(text, keep="\n\t"), flush=True)


@contextmanager
def progress(log: Log, what: str, total: int) -> Iterator[Advance]:
    """A bar in a terminal; elsewhere a line at every fifth of the way."""
    if not log.isEnabledFor(logging.INFO):
        yield lambda done, note="": None
        return
    if not sys.stderr.isatty():
        shown = 0

        def advance(done: int, note: str = "") -> None:
            nonlocal shown
            if done * 5 // total > shown * 5 // total or (done == total and shown != done):
                shown = done
                log.info("%s %d/%d %s", what, done, total, note)

        yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    stage = log.name.rpartition(".")[2]
    columns = (TextColumn(f"[{stage}]", markup=False), TextColumn("{task.description}", markup=False), BarColumn())
    console = Console(stderr=True)
    with Progress(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, note="": bar.update(task, completed=done, description=f"{what} {note}".strip())
