"""The seven stages on a GPU as a user runs them, beside what PyTorch offers: `python -m benchmarks.gpu_path`.

For each model and precision a project of its own; `shardwright trace` ... `train` in it. The peers are trained by
the same stage and loop with `engine: single`: the module as it is, with every block recomputed, and compiled as a whole
(benchmarks/gpu_path_models.py). The peak of the module as it is is 100%; each plan has a share of it as its budget:

    eager      cuda_graphs: false
    compiled   compile: true, cuda_graphs: false
    graphs     compile: true, cuda_graphs: auto, which captures such a step

Milliseconds and peak are those of runs/train/report.json, the first step is what a user waits for it from the command
on. A plan is held against the fastest peer that fits its budget: eager ones against eager peers, others against all.
A budget that no plan fits is told, and is no point.

It takes about an hour of a GPU and can be done in shards: what is measured lies in `--folder` and is not measured
again; `--seconds` is when to begin nothing new; `--only` names points by what is in them: `--only qwen3,eager`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_path_models import EAGER_WAYS, MODELS, WAY, WAYS
from benchmarks.gpu_path_report import State, met, report

SOURCE = Path(__file__).parents[1]
STAGES = ("trace", "profile", "cluster", "solve", "checkpoint", "codegen")
STEPS = 14
LIMIT_S = 900
FORMS: dict[str, dict[str, Any]] = {
    "eager": {"cuda_graphs": False},
    "compiled": {"compile": True, "cuda_graphs": False},
    "graphs": {"compile": True, "cuda_graphs": "auto"},
}
GPU = {"source": "probe", "device": "cuda", "devices": 1, "memory_gb": None}
# Model, precision: the shares of each form, in percent.
PROJECTS: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    ("qwen3-0.6b", "amp"): {"eager": (100, 75, 60), "compiled": (50,), "graphs": (75, 50, 35)},
    ("gpt2-medium", "amp"): {"eager": (75, 50, 35), "compiled": (35,), "graphs": (50,)},
    ("llama-1b", "bf16"): {"eager": (100, 75)},
    ("bert-large", "bf16"): {"eager": (100, 50)},
    ("vit-large", "amp"): {"eager": (100, 50), "graphs": (50,)},
    ("t5-base", "fp32"): {"eager": (100, 50)},
    ("mixtral-small", "amp"): {"eager": (100, 50)},
    ("resnet50", "amp"): {"eager": (100, 50), "graphs": (50,)},
}


@dataclass(frozen=True)
class Point:
    project: str
    form: str
    share: int  # of the plain peak, in percent

    @property
    def name(self) -> str:
        return f"{self.project} {self.form} {self.share}"


class Project:
    """A user's repository for one model in one precision."""

    def __init__(self, root: Path, model: str, precision: str, cluster: dict[str, Any]) -> None:
        self.root, self.model, self.precision, self.cluster = root, model, precision, cluster
        self.name = f"{model} {precision}"

    def configure(self, form: str, budget: int | None, engine: str = "planned") -> None:
        batch = {
            name: {"shape": spec["shape"], "dtype": spec["dtype"]} for name, spec in MODELS[self.model]["batch"].items()
        }
        files: dict[str, dict[str, Any]] = {
            "model": {
                "module": {"_target_": "benchmarks.gpu_path_models.build", "name": self.model},
                "precision": self.precision,
                "batch": batch,
                **FORMS[form],
            },
            "data": {"dataset": {"_target_": "benchmarks.gpu_path_models.Drawn", "name": self.model}},
            "cluster": self.cluster,
            "solve": {"backend": "highs", "memory_budget_gb": None if budget is None else budget / 1e9},
            "checkpoint": {"recompute": "optimal"},
            "train": {
                "steps": STEPS,
                "engine": engine,
                "resume": "never",
                "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-5},
            },
        }
        for group, content in files.items():
            _write(self.root / "conf" / group / "gpu.yaml", content)
        choices = dict.fromkeys(files, "gpu")
        _write(self.root / "conf/config.yaml", {**choices, "code": "conf", "tracking": {"enabled": False}})

    def stage(self, name: str) -> None:
        told = subprocess.run(
            [sys.executable, "-m", "stages", name, "-q"],
            cwd=self.root, env=self._environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if told.returncode:
            raise Failed(name, told.stderr or told.stdout)

    def plan(self) -> None:
        """As `dvc repro codegen` would: trace, profile and cluster do not run again for another budget."""
        for name in STAGES:
            mark, made = self.root / f"{name}.made", self._made_of(name)
            if made and mark.exists() and mark.read_text() == made:
                continue
            self.stage(name)
            mark.write_text(made)

    def _made_of(self, stage: str) -> str:
        groups = {"trace": ("model",), "profile": ("model", "cluster"), "cluster": ("cluster",)}.get(stage, ())
        return "\n".join((self.root / f"conf/{group}/gpu.yaml").read_text() for group in groups)

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
        return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}

    def predicted(self) -> tuple[dict[str, float], bool]:
        """Of the plan on disk, and whether it recomputes."""
        body = json.loads((self.root / "runs/checkpoint/plan.json").read_text())["body"]
        told = body["prediction"]
        regions = [region for partition in body["partitions"] for region in partition["regions"]]
        kept = any(region["recompute"] or (region["compiled"] or 1.0) < 1.0 for region in _all(regions))
        return {"ms": 1e3 * told["step_seconds"], "peak": told["peak_bytes"]}, kept


class Failed(Exception):
    def __init__(self, stage: str, told: str) -> None:
        lines = told.strip().splitlines()
        super().__init__(lines[-1] if lines else f"{stage} failed")
        self.fits_nothing = "memory_budget_gb" in told


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu_path"), help="projects and what was measured")
    parser.add_argument("--only", default="", help="points with all of these words in their names")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so many")
    given = parser.parse_args(arguments)
    result = measure(PROJECTS, GPU, given.folder, given.only.split(","), given.seconds)
    return 0 if met(result) else 1


def measure(
    projects: dict[tuple[str, str], dict[str, tuple[int, ...]]],
    cluster: dict[str, Any],
    folder: Path,
    words: list[str],
    seconds: float,
    ways: tuple[str, ...] = WAYS,
) -> dict[str, Any]:
    """The figures of all that is in the folder by now."""
    folder.mkdir(parents=True, exist_ok=True)
    path, start = folder / "state.json", time.monotonic()
    state: State = json.loads(path.read_text()) if path.exists() else {"peers": {}, "points": {}}
    for (model, precision), forms in projects.items():
        project = Project(folder / f"{model}-{precision}", model, precision, cluster)
        points = [Point(project.name, form, share) for form, shares in forms.items() for share in shares]
        wanted = [p for p in points if all(w in p.name for w in words) and p.name not in state["points"]]
        peers = state["peers"].setdefault(project.name, {})
        beside = ways if any(one.form != "eager" for one in points) else EAGER_WAYS
        tasks: list[str | Point] = [way for way in ways if way in beside and way not in peers and wanted]
        if wanted:
            begin(project, folder)
        for task in (*tasks, *wanted):
            if time.monotonic() - start > seconds:
                break
            if isinstance(task, Point) and "error" in peers["plain"]:
                raise SystemExit(f"{project.name}: the module as it is does not train: {peers['plain']['error']}")
            if isinstance(task, Point):
                state["points"][task.name] = measured_point(project, task, peers["plain"]["peak"])
            else:
                peers[task] = measured_peer(project, task)
            told = state["points"][task.name] if isinstance(task, Point) else peers[task]
            print(f"{project.name}: {task}: {told}", file=sys.stderr, flush=True)
            path.write_text(json.dumps(state, indent=1))
    told = report(state)
    print(told)
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def begin(project: Project, folder: Path) -> None:
    """The cluster is measured once for all projects."""
    for other in folder.glob("*/cluster.made"):
        if not (project.root / other.name).exists():
            shutil.copytree(other.parent / "runs/cluster", project.root / "runs/cluster")
            shutil.copy(other, project.root)


def measured_peer(project: Project, way: str) -> dict[str, Any]:
    try:
        project.configure("eager", None)
        project.plan()
        project.configure("eager", None, engine="single")
        return project.train(way)
    except (Failed, subprocess.TimeoutExpired) as error:  # a peer that cannot do a model says so
        return {"error": str(error)}


def measured_point(project: Project, point: Point, plain: float) -> dict[str, Any]:
    budget = int(plain * point.share / 100)
    one = {"project": point.project, "form": point.form, "share": point.share / 100, "budget": budget}
    try:
        project.configure(point.form, budget)
        project.plan()
        predicted, recomputes = project.predicted()
        return one | {"predicted": predicted, "recomputes": recomputes, "measured": project.train()}
    except Failed as error:
        return one | {"refused" if error.fits_nothing else "error": str(error)}
    except subprocess.TimeoutExpired as error:
        return one | {"error": str(error)}


def _all(regions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found for region in regions for found in (region, *_all(region["inner"]))]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))  # which is YAML too


if __name__ == "__main__":
    sys.exit(main())
