"""A command in a project's folder, in a child that is forked: what is imported here is imported there already.

A child has bounds of time and memory, so that a command without an end is seen as one.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SECONDS = 120  # of the processor that a command may take
ROOM = 3 << 30  # bytes beside what this process has


def command(root: Path, *words: str, before: Callable[[], None] = lambda: None) -> subprocess.CompletedProcess[str]:
    """`shardwright WORDS` with its output and status; `before` is called in the child."""
    return commands(root, list(words), before=before)


def commands(
    root: Path, *each: list[str], before: Callable[[], None] = lambda: None
) -> subprocess.CompletedProcess[str]:
    """One after another in one child, until one fails."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _run(root, each, before, out.fileno(), err.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess([], status, *texts)


def warm(root: Path, *lines: str) -> None:
    """Runs these commands, and imports what they import, so that later children need not."""
    with tempfile.NamedTemporaryFile("r") as names:
        ended = commands(root, *(line.split() for line in lines), before=lambda: _note_imports(names.name))
        if ended.returncode:
            raise SystemExit(ended.stderr)
        for name in names.read().split():
            with suppress(Exception):  # what can be imported as a part of something else alone
                importlib.import_module(name)


def _note_imports(path: str) -> None:
    """When the child ends."""
    ended = os._exit

    def end(status: int) -> None:
        with open(path, "a") as file:
            file.write(" ".join(sys.modules) + " ")
        ended(status)

    os._exit = end  # type: ignore[assignment]


def _run(root: Path, each: tuple[list[str], ...], before: Callable[[], None], out: int, err: int) -> None:
    status = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.chdir(root)
        sys.path.insert(0, str(root))  # as with `python -m`
        _bound()
        from shardwright.stages.command_line import main

        before()
        status = next((status for words in each if (status := main(words))), 0)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _bound() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        most = pages * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
