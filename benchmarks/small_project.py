"""A project of its own in a folder: a small GPT on two processes, planned and ready to be trained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

SOURCE = Path(__file__).parents[1]
BEFORE_TRAIN = ("trace", "profile", "cluster", "solve", "checkpoint", "codegen")


def make(root: Path, train: dict[str, Any], width: int = 16, batch: int = 8, context: int = 8, layers: int = 2) -> None:
    """With every stage before train done."""
    configure(root, train, width, batch, context, layers)
    for stage in BEFORE_TRAIN:
        run(root, stage).check_returncode()


def configure(
    root: Path, train: dict[str, Any], width: int = 16, batch: int = 8, context: int = 8, layers: int = 2
) -> None:
    """Its settings alone; `only: zero`, so that shards of the state lie on both ranks."""
    words = 64
    shape = {"shape": [batch, context], "dtype": "int64"}
    sizes = {"vocab_size": words, "context": context, "width": width, "layers": layers, "heads": 2}
    data = {"vocab_size": words, "length": context, "samples": 1000, "seed": 3}
    files: dict[str, dict[str, Any]] = {
        "model": {
            "module": {"_target_": "shardwright.pipeline.models.gpt.build", **sizes},
            "batch": {"input_ids": shape, "labels": shape},
        },
        "data": {"dataset": {"_target_": "shardwright.pipeline.models.data.TokenSequences", **data}, "shuffle": True},
        "cluster": {
            "source": "preset",
            "device": "cpu",
            "devices": 2,
            "memory_gb": 4,
            "preset": {
                "matmul_gflops": 50,
                "memory_gbytes_per_s": 10,
                "launch_us": 1,
                "latency_us": 1,
                "link_gbytes_per_s": 2,
            },
        },
        "solve": {"backend": "highs", "gap": 1e-3, "frontier_points": 1, "only": "zero"},
        "checkpoint": {"recompute": "off"},
        "train": {
            "gradient_accumulation": 1,
            "seed": 1,
            "timeout_s": 3000,
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
            **train,
        },
    }
    for group, content in files.items():
        _write(root / "conf" / group / "small.yaml", content)
    choices = dict.fromkeys(files, "small")
    _write(root / "conf/config.yaml", {**choices, "code": "conf", "tracking": {"enabled": False}})
    for name in ("plan", "measured"):
        (root / "conf" / name).mkdir()


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))  # which is YAML too


def copy(root: Path, to: Path, **train: Any) -> None:
    """The same project with other settings of the train file."""
    shutil.copytree(root, to)
    path = to / "conf/train/small.yaml"
    _write(path, {**json.loads(path.read_text()), **train})


def environment(root: Path) -> dict[str, str]:
    """Temporary files lie in the project: what a killed process leaves is found there, and removed with it."""
    temporary = root / "tmp"
    temporary.mkdir(exist_ok=True)
    return {**os.environ, "PYTHONPATH": str(SOURCE), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}


def run(root: Path, stage: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stages", stage, "-q"]
    return subprocess.run(command, cwd=root, env=environment(root), text=True, check=False, **how)


class Training:
    """`shardwright train` under way, seen from outside."""

    def __init__(self, root: Path, *command: str, **environ: str) -> None:
        self.root = root
        self.log = root / "said.txt"
        words = command or ("-m", "stages", "train")
        with open(self.log, "w") as log:
            self.stage = subprocess.Popen(
                [sys.executable, *words], cwd=root, env={**environment(root), **environ}, stdout=log, stderr=log
            )

    def steps(self) -> list[dict[str, Any]]:
        """What the first rank has told so far."""
        found = []
        for path in (self.root / "tmp").glob("shardwright-*/steps.jsonl"):
            try:
                found += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
            except (OSError, ValueError):
                continue
        return found

    def until(self, step: int, patience_s: float = 900) -> None:
        """That step is done."""
        self.wait_for(lambda: any(line.get("step", -1) >= step for line in self.steps()), patience_s)

    def wait_for(self, seen: Any, patience_s: float = 900) -> None:
        deadline = time.monotonic() + patience_s
        while not seen():
            if self.stage.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"it did not come so far: {self.log.read_text()[-2000:]}")
            time.sleep(0.01)

    def processes(self) -> tuple[psutil.Process, list[psutil.Process]]:
        """torchrun, and its ranks by their number."""
        (launcher,) = psutil.Process(self.stage.pid).children()
        return launcher, sorted(launcher.children(), key=lambda rank: int(rank.environ()["RANK"]))

    def ended(self, patience_s: float = 120) -> subprocess.CompletedProcess[str]:
        """When it has; one that does not is killed, and has no status."""
        try:
            status: int | None = self.stage.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.stage.kill()
            self.stage.wait()
            status = None
        return subprocess.CompletedProcess([], -1000 if status is None else status, "", self.log.read_text())

    def left(self, patience_s: float = 10) -> list[str]:
        """What it has left behind: processes of the project, temporary folders."""
        deadline = time.monotonic() + patience_s
        while (found := _running(self.root)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found + [path.name for path in (self.root / "tmp").glob("shardwright-*")]


def _running(root: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(root) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def snapshots(root: Path) -> list[int]:
    """The steps of those that are on the disk."""
    return sorted(int(path.name[5:]) for path in (root / "runs/train/snapshots").glob("*/step-*"))
