"""One point as a DVC experiment: run in a copy of the project that DVC makes, from its cache as far as that goes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import overrides
from stages.sweep.abandoned import forget
from stages.sweep.points import SweepError

END_S = 20.0  # that it has to end after it was told to
PLAIN = re.compile(r"[\w.+/-]+")


@dataclass(frozen=True)
class Ran:
    name: str  # of the experiment
    reason: str  # why it failed; empty where it did not


def check_repository(root: Path) -> None:
    found = subprocess.run(["git", "rev-parse", "--verify", "-q", "HEAD"], cwd=root, capture_output=True)
    if found.returncode:
        raise SweepError("DVC keeps experiments in git, and there is no commit here", remedy="`git init`, then commit")


def run_point(
    root: Path,
    name: str,
    settings: Sequence[str],
    code: str,
    until: str,
    environ: Mapping[str, str],
    report: Path,
    lock: int,
) -> Ran:
    """All that it said goes to the file `report`. The lock tells others that it runs, also where this process died."""
    changes = [flag for change in overrides(root, settings) for flag in ("-S", _override(*change))]
    copied = [flag for path in _untracked(root, code) for flag in ("--copy-paths", path)]
    command = [sys.executable, "-m", "dvc", "exp", "run", "--temp", "--name", name, *changes, *copied, until]
    report.parent.mkdir(parents=True, exist_ok=True)
    with report.open("w") as file:
        dvc = subprocess.Popen(
            command, cwd=root, env=dict(environ), stdout=file, stderr=subprocess.STDOUT, pass_fds=(lock,),
            process_group=0,
        )  # fmt: skip
    try:
        status = dvc.wait()
    except BaseException:
        end(dvc)
        raise
    finally:
        forget(root, lambda other: other == name)
    return Ran(name, _reason(report.read_text()) if status else "")


def end(dvc: subprocess.Popen[bytes]) -> None:
    """With its stage, as Ctrl-C would: DVC removes its copy of the project then."""
    for sign, patience_s in ((signal.SIGINT, END_S), (signal.SIGTERM, END_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(dvc.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            dvc.wait(patience_s)
            return


def _override(file: str, key: str, value: Any) -> str:
    """As Hydra reads it, which DVC asks; `++` also adds a key that the file leaves to its default."""
    return f"{file}:++{key}={_hydra(value)}"


def _hydra(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_hydra(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)


def _untracked(root: Path, code: str) -> list[str]:
    """Files of the configuration and of the model's source that git does not have yet: DVC's copy lacks them."""
    folders = ["conf", *([code] if (root / code).resolve().is_relative_to(root.resolve()) else [])]
    listed = ["git", "ls-files", "-z", "--others", "--exclude-standard", "--", *folders]
    found = subprocess.run(listed, cwd=root, capture_output=True, text=True)
    return [name for name in found.stdout.split("\0") if name]


def _reason(said: str) -> str:
    """A stage's own line, or else DVC's last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    own = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    dvc = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (own or dvc or lines or ["it said nothing"])[-1]


def metrics_of(root: Path, experiment: str, stages: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The summary of each of these stages in an experiment that ended well."""
    from dvc.api import DVCFileSystem

    with closing(DVCFileSystem(str(root), rev=experiment)) as files:
        return {stage: json.loads(files.read_text(f"runs/{stage}/summary.json")) for stage in stages}
