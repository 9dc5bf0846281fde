"""A row of a benchmark from a process of its own on one core: its time and memory are not those of the rows before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def in_process(module: str, *arguments: str) -> dict[str, Any]:
    """What `python -m MODULE ARGUMENTS` writes as its last line, which is JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)}: {done.stderr.strip()}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row
