"""A command of the project in a folder, with what it wrote."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.small_project import environment

LIMIT_S = 300


def run(root: Path, *command: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    """`shardwright COMMAND`; `before` is called in the process that becomes it."""
    words = [sys.executable, "-m", "stages", *command]
    return subprocess.run(
        words,
        cwd=root,
        env=environment(root),
        text=True,
        capture_output=True,
        preexec_fn=before,
        timeout=LIMIT_S,
        check=False,
    )
