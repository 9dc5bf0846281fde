"""What a rank does for the process that started it: it ends with it, and says how it fared in the folder they share.

| file | what it says |
|---|---|
| `error-1.txt` | why rank 1 failed, in one line |
| `final-1.txt` | the same, of what no further start would mend |
| `hang-1.txt` | the same, of a hang: it is the cause of all that comes after it |
| `stopped.txt` | the signal that made the ranks end before their time |
| `result.json` | what the first rank found |
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.ir.names import printable

PARENT = "SHARDWRIGHT_PARENT"
MEET = "SHARDWRIGHT_MEET"  # the folder in which ranks of one machine find one another
FAILED = "shardwright failed: "  # a line in which a rank says why, where it could not write that down
NOTE = "shardwright: "  # begins a line of a rank that is for the user
STOPPED, RESULT = "stopped.txt", "result.json"
ORPHAN = 70  # the status of a rank whose parent is gone
NOTICED_S = 3.0  # after which the launcher has seen a rank that died
_LOST = re.compile(r"connection (?:closed|reset)|broken pipe|remote (?:process|worker|end)", re.IGNORECASE)


def follow_parent() -> None:
    """Ends this rank when the process that started the run or the launcher is gone: a kill leaves no orphan.

    The launcher is ended as well: it would start the ranks again.
    """
    parent = os.environ.get(PARENT)
    if not parent:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher and _alive(int(parent)):
            time.sleep(0.5)
        if os.getppid() == launcher and launcher != int(parent):
            os.kill(launcher, signal.SIGTERM)
        os._exit(ORPHAN)

    threading.Thread(target=watch, daemon=True, name="follow-parent").start()


def _alive(pid: int) -> bool:
    import psutil  # here, so that ranks can be started by hand where torch is all there is

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def report_error(work: Path, rank: int, text: str, *, final: bool = False, hang: bool = False) -> None:
    """One line for the user. Ranks that hang do not end, and are killed."""
    line = printable(" ".join(text.split()))
    kinds = ["final" if final else "error", *(["hang"] if hang else [])]
    try:
        for kind in kinds:
            write_whole(error_path(work, rank, kind), line)
    except OSError:  # no room: the log is in memory
        print(f"\n{FAILED}{line}", file=sys.stderr, flush=True)


def end_after_cause(error: Exception) -> None:
    """Waits where a rank has lost another one: of those that failed the launcher names whom it sees end first."""
    if _LOST.search(str(error)):
        time.sleep(NOTICED_S)


def forget_error(work: Path, rank: int) -> None:
    """Of a rank that is started again: what made it fail before is over."""
    for kind in ("hang", "error"):
        error_path(work, rank, kind).unlink(missing_ok=True)


def error_path(work: Path, rank: int, kind: str = "error") -> Path:
    return work / f"{kind}-{rank}.txt"


def tell_user(text: str) -> None:
    """A warning that the stage passes on."""
    print(f"\n{NOTE}{text}", file=sys.stderr, flush=True)


def write_result(work: Path, result: dict[str, Any], spare: str | None = None) -> None:
    """`spare` is a file for it where the folder has no room."""
    text = json.dumps(result)
    try:
        write_whole(work / RESULT, text)
    except OSError:
        if spare is None:
            raise
        write_atomic(Path(spare), text.encode())


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all; a folder that is gone stays so."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text, "utf-8")
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def restart_count() -> int:
    """How often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
