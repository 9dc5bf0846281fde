"""Hosts of a probe as processes, in network namespaces or on this machine alone; for tests and a benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from tests.flow.project import WARM

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0  # far beyond what a busy machine needs; nothing waits so long that goes on


def start(command: list[str], space: str | None = None, **environment: str) -> subprocess.Popen[str]:
    """The interpreter is a fork of the warm one, for modules, and so are the launchers and ranks that it starts."""
    inside = ["ip", "netns", "exec", space] if space else []
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [*inside, str(WARM.python), *command], env=known, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def first(settings: dict, space: str | None = None, **environment: str) -> subprocess.Popen[str]:
    return start(["-m", "tests.flow.first_host", json.dumps(settings)], space, **environment)


def join(
    place: str, host: str, space: str | None = None, wait: int = 200, devices: int = 1, **environment: str
) -> subprocess.Popen[str]:
    told = ["--host", host, "--wait", str(wait), "--devices", str(devices)]
    return start(["-m", "shardwright.stages.cluster.join", place, *told], space, **environment)


def end(processes: list[subprocess.Popen[str]], within: float = LIMIT_S) -> list[tuple[int, str, str]]:
    deadline = time.monotonic() + within
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
            found.append((process.returncode, out, err))
        return found
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
