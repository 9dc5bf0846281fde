"""How long the pipeline takes on a fresh copy of the project, and what a change re-runs: `python -m benchmarks.house`.

Bars: a full `dvc repro` under 120 s, one with nothing to do under 6 s; `train.steps` re-runs train alone; the memory
budget re-runs solve and what follows it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
FULL_LIMIT, NOOP_LIMIT = 120.0, 6.0
STAGES = ("trace", "profile", "cluster", "solve", "checkpoint", "codegen", "train")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        project = copy_project(Path(folder) / "project")
        results = {"full": repro(project), "noop": repro(project)}
        edit(project / "conf/train/adamw.yaml", "steps: 20", "steps: 5")
        results["steps"] = repro(project)
        edit(project / "conf/solve/glpk.yaml", "memory_budget_gb: null", "memory_budget_gb: 0.02")
        results["budget"] = repro(project)
    return report(results)


def copy_project(target: Path) -> Path:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=SOURCE, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(SOURCE / name, target / name, follow_symlinks=False)
    subprocess.run(["git", "init", "--quiet"], cwd=target, check=True)
    return target


def repro(project: Path) -> tuple[float, list[str]]:
    """Seconds of one `dvc repro`, and the stages that it ran."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "repro"],
        cwd=project,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout)
    return time.perf_counter() - start, re.findall(r"Running stage '(\w+)'", done.stdout)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path} does not say {old!r}"
    path.write_text(text.replace(old, new))


def report(results: dict[str, tuple[float, list[str]]]) -> int:
    wanted = {
        "full": list(STAGES),
        "noop": [],
        "steps": ["train"],
        "budget": ["solve", "checkpoint", "codegen", "train"],
    }
    print(f"{'case':10}{'seconds':>10}  stages")
    for name, (seconds, ran) in results.items():
        print(f"{name:10}{seconds:10.1f}  {' '.join(ran) or '-'}")
    right = all(sorted(results[name][1]) == sorted(wanted[name]) for name in wanted)
    full, noop = results["full"][0], results["noop"][0]
    met = right and full < FULL_LIMIT and noop < NOOP_LIMIT
    print(
        json.dumps({"full_seconds": round(full, 1), "noop_seconds": round(noop, 1), "right_stages": right, "met": met})
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
