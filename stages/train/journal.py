"""The lines of steps.jsonl, in a temporary folder that may be full: training does not depend on it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.launch.rank import tell_user
from pipeline.launch.work_folder import ROOM


class Journal:
    """What there is no room for waits in memory, and is written with what comes later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[str] = []
        self.told = False

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Ranks that are started again go on in the same file."""
        self.waiting += [json.dumps(line) + "\n" for line in lines]
        if not self.waiting:
            return
        try:
            _append(self.path, "".join(self.waiting).encode())
        except OSError as error:
            if not self.told:
                self.told = True
                tell_user(f"{self.path} cannot be written ({error.strerror}): training goes on, unseen; {ROOM}")
            return
        self.waiting.clear()


def _append(path: Path, content: bytes) -> None:
    """All of it, or nothing."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        before = os.fstat(descriptor).st_size
        try:
            while content:
                content = content[os.write(descriptor, content) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)
