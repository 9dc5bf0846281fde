"""A user's repository of benchmarks.gpu_path: one model in one precision and form, and the commands that run in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_path_models import MODELS, WAY

SOURCE = Path(__file__).parents[1]
STEPS = 14
LIMIT_S = 900
FORMS: dict[str, dict[str, Any]] = {
    "eager": {"cuda_graphs": False},
    "compiled": {"compile": True, "cuda_graphs": False},
    "graphs": {"compile": True, "cuda_graphs": "auto"},
    "fused": {"cuda_graphs": False},
}


class Failed(Exception):
    def __init__(self, stage: str, told: str) -> None:
        lines = told.strip().splitlines()
        super().__init__(f"{stage}: {lines[-1] if lines else 'failed'}")
        self.told = told
        self.fits_nothing = "memory_budget_gb" in told


class Project:
    def __init__(self, root: Path, name: str, form: str, cluster: dict[str, Any]) -> None:
        self.root, self.name, self.form, self.cluster = root, name, form, cluster
        self.model, self.precision = name.split()

    def configure(self, budget: float | None = None, engine: str = "planned") -> None:
        batch = {
            name: {"shape": spec["shape"], "dtype": spec["dtype"]} for name, spec in MODELS[self.model]["batch"].items()
        }
        files: dict[str, dict[str, Any]] = {
            "model": {
                "module": {"_target_": "benchmarks.gpu_path_models.build", "name": self.model},
                "precision": self.precision,
                "batch": batch,
                **FORMS[self.form],
            },
            "data": {"dataset": {"_target_": "benchmarks.gpu_path_models.Drawn", "name": self.model}},
            "cluster": self.cluster,
            "solve": {"backend": "highs", "memory_budget_gb": None if budget is None else budget / 1e9},
            "checkpoint": {"recompute": "optimal"},
            "train": {
                "steps": STEPS,
                "engine": engine,
                "resume": "never",
                "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-5, "fused": self.form == "fused" or None},
            },
        }
        for group, content in files.items():
            _write(self.root / "conf" / group / "gpu.yaml", content)
        choices = dict.fromkeys(files, "gpu")
        _write(self.root / "conf/config.yaml", {**choices, "code": "conf", "tracking": {"enabled": False}})

    def run(self, *stages: str) -> None:
        for name in stages:
            start = time.monotonic()
            told = subprocess.run(
                [sys.executable, "-m", "stages", name, "-q"],
                cwd=self.root, env=self._environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
            if told.returncode:
                raise Failed(name, told.stderr or told.stdout)
            self._mark(name).write_text(f"{time.monotonic() - start:.1f}")

    def made(self, stage: str) -> bool:
        return self._mark(stage).exists()

    def missing(self, *stages: str) -> list[str]:
        return [name for name in stages if not self.made(name)]

    def seconds(self) -> dict[str, float]:
        """Of the stages that ran, started as commands."""
        return {path.name.split("-")[0]: float(path.read_text()) for path in sorted(self.root.glob("*-seconds.txt"))}

    def _mark(self, stage: str) -> Path:
        return self.root / f"{stage}-seconds.txt"

    def take(self, other: Project, *stages: str) -> None:
        """What these stages made there."""
        for name in stages:
            if other.root != self.root and other.made(name) and not self.made(name):
                shutil.copytree(other.root / "runs" / name, self.root / "runs" / name, dirs_exist_ok=True)
                shutil.copy(other._mark(name), self.root)

    def train(self, way: str = "plain") -> dict[str, Any]:
        """What came of it, and how long a user waited for the first step."""
        start = time.monotonic()
        log = self.root / "said.txt"
        with log.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "stages", "train", "-q"],
                cwd=self.root, env=self._environment() | {WAY: way}, stdout=said, stderr=said,
            )  # fmt: skip
            first = None
            while process.poll() is None and time.monotonic() < start + LIMIT_S:
                if first is None and self._has_stepped():
                    first = time.monotonic() - start
                time.sleep(0.02)
            process.kill()
            process.wait()
        if process.returncode:
            raise Failed("train", log.read_text())
        body = json.loads((self.root / "runs/train/report.json").read_text())["body"]
        compared = {row["what"]: row for row in body["compared"]}
        return {
            "ms": 1e3 * body["median_step_seconds"],
            "busy_ms": compared.get("compute_ms", {}).get("measured"),
            "optimizer_ms": compared.get("optimizer_ms", {}).get("measured"),
            "peak": max(body["peak_bytes"]),
            "loss": body["losses"][-1],
            "first_s": round(first or 0.0, 2),
        }

    def _has_stepped(self) -> bool:
        found = (self.root / "tmp").glob("shardwright-*/steps.jsonl")
        try:
            return any('"step"' in path.read_text() for path in found)
        except FileNotFoundError:  # the folder goes when the stage ends
            return False

    def _environment(self) -> dict[str, str]:
        temporary = self.root / "tmp"
        temporary.mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
        # As docs/gpu.md and the Makefile have it: stages are processes that start often.
        usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**usual, "PYTHONPATH": path, "TMPDIR": str(temporary)}

    def predicted(self) -> tuple[dict[str, float], bool]:
        """Of the plan on disk, and whether it recomputes."""
        body = json.loads((self.root / "runs/checkpoint/plan.json").read_text())["body"]
        told = body["prediction"]
        regions = [region for partition in body["partitions"] for region in partition["regions"]]
        kept = any(region["recompute"] or (region["compiled"] or 1.0) < 1.0 for region in _all(regions))
        seconds = {"ms": told["step_seconds"], "optimizer_ms": told["optimizer_seconds"]}
        return {name: 1e3 * value for name, value in seconds.items()} | {"peak": told["peak_bytes"]}, kept


def _all(regions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found for region in regions for found in (region, *_all(region["inner"]))]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))  # which is YAML too
