"""The seven stages on a GPU as a user runs them, beside what PyTorch offers: `python -m benchmarks.gpu_path`.

For each model and precision a project of its own; `shardwright trace` ... `train` in it. The peers are trained by
the same stage and loop with `engine: single`: the module as it is, with every block recomputed, and compiled as a whole
(benchmarks/gpu_path_models.py). The peak of the module as it is is 100%; each plan has a share of it as its budget:

    eager      cuda_graphs: false
    compiled   compile: true, cuda_graphs: false
    graphs     compile: true, cuda_graphs: auto, which captures such a step
    fused      eager, with the optimizer's fused kernels

Milliseconds and peak are those of runs/train/report.json, the first step is what a user waits for it from the command
on. A plan is held against the fastest peer that fits its budget: eager ones against eager peers, fused ones against
none (no peer steps so), others against all. A budget that no plan fits is told, and is no point. What needs no GPU is
planned for several projects at a time; what measures or trains runs alone.

It takes about an hour of a GPU and can be done in shards: what is measured lies in `--folder` and is not measured
again; `--seconds` is when to begin nothing new; `--only` names points by what is in them: `--only qwen3,eager`;
`--ways` the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu_path_models import EAGER_WAYS, WAYS
from benchmarks.gpu_path_project import Failed, Project
from benchmarks.gpu_path_report import EAGER_FORMS, State, met, report

GPU = {"source": "probe", "device": "cuda", "devices": 1, "memory_gb": None}
# Model, precision: the shares of each form, in percent.
PROJECTS: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    ("qwen3-0.6b", "amp"): {"eager": (100, 75, 60), "compiled": (50,), "graphs": (75, 50, 35), "fused": (100,)},
    ("gpt2-medium", "amp"): {"eager": (75, 50, 35), "compiled": (35,), "graphs": (50,)},
    ("llama-1b", "bf16"): {"eager": (100, 75), "fused": (100,)},
    ("bert-large", "bf16"): {"eager": (100, 50)},
    ("vit-large", "amp"): {"eager": (100, 50), "graphs": (50,)},
    ("t5-base", "fp32"): {"eager": (100, 50)},
    ("mixtral-small", "amp"): {"eager": (100, 50)},
    ("resnet50", "amp"): {"eager": (100, 50), "graphs": (50,)},
}


T = TypeVar("T")
R = TypeVar("R")
KEPT = ("trace", "profile", "cluster")  # stages that another budget does not run again
PLANNING = ("solve", "checkpoint", "codegen")


@dataclass(frozen=True)
class Point:
    project: str
    form: str
    share: int  # of the plain peak, in percent

    @property
    def name(self) -> str:
        return f"{self.project} {self.form} {self.share}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu_path"), help="projects and what was measured")
    parser.add_argument("--only", default="", help="points with all of these words in their names")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so many")
    parser.add_argument("--ways", default=";".join(WAYS), help="the peers: those of this list, between semicolons")
    given = parser.parse_args(arguments)
    ways = tuple(given.ways.split(";"))
    result = measure(PROJECTS, GPU, given.folder, given.only.split(","), given.seconds, ways)
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
    bench = Bench(folder, cluster, time.monotonic() + seconds)
    points = [
        Point(f"{model} {precision}", form, share)
        for (model, precision), forms in projects.items()
        for form, shares in forms.items()
        for share in shares
    ]
    asked = [p for p in points if all(w in p.name for w in words)]
    wanted = [p for p in asked if p.name not in bench.state["points"]]
    # With all peers, in whatever order points are measured.
    compared = {p.project for p in points if p.form not in EAGER_FORMS}
    bench.prepare(wanted)
    for name in dict.fromkeys(point.project for point in asked):
        for way in ways:
            if way in EAGER_WAYS or name in compared:
                bench.measure_peer(name, way)
    for point in bench.plan(wanted):
        bench.measure_point(point)
    told = report(bench.state)
    print(told)
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


class Bench:
    """Projects and measurements in a folder."""

    def __init__(self, folder: Path, cluster: dict[str, Any], deadline: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.cluster, self.deadline = folder, cluster, deadline
        self.path = folder / "state.json"
        self.state: State = json.loads(self.path.read_text()) if self.path.exists() else {"peers": {}, "points": {}}

    def project(self, name: str, form: str, share: int | None = None) -> Project:
        words = name, form, *([] if share is None else [str(share)])
        return Project(self.folder / " ".join(words).replace(" ", "-"), name, form, self.cluster)

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def prepare(self, wanted: list[Point]) -> None:
        """What does not depend on the budget; of the module as it is also a plan, without which it does not train."""
        forms = {(point.project, form) for point in wanted for form in ("eager", point.form)}
        projects = [self.project(*one) for one in sorted(forms)]
        if not projects or self.late():
            return
        first = projects[0]
        for project in projects:
            project.configure()
        if not first.made("cluster"):
            known = next(self.folder.glob("*/cluster-seconds.txt"), None)
            if known is None:
                first.run("cluster")
            else:
                first.take(Project(known.parent, first.name, first.form, self.cluster), "cluster")
        for project in projects:
            project.take(first, "cluster")
        several(partial(prepare_stage, "trace"), projects)
        eager = [project for project in projects if project.form == "eager"]
        several(partial(prepare_stage, "profile"), eager)
        for project in projects:
            prepare_stage("profile", project)  # compiled blocks are timed
        several(lambda project: [prepare_stage(stage, project) for stage in PLANNING], eager)

    def measure_peer(self, name: str, way: str) -> None:
        peers = self.state["peers"].setdefault(name, {})
        if way not in peers and not self.late():
            peers[way] = measured_peer(self.project(name, "eager"), way)
            self._note(f"{name}: {way}", peers[way])

    def plan(self, wanted: list[Point]) -> list[Point]:
        """Those for which there is a plan; of the others is noted why there is none."""
        known = [point for point in wanted if "plain" in self.state["peers"].get(point.project, {})]
        for point in known:
            plain = self.state["peers"][point.project]["plain"]
            if "error" in plain:
                raise SystemExit(f"{point.project}: the module as it is does not train: {plain['error']}")
        if self.late():
            return []
        found = several(self._planned, known)
        for point, told in zip(known, found, strict=True):
            if told:
                self.state["points"][point.name] = self._about(point) | told
                self._note(point.name, self.state["points"][point.name])
        return [point for point, told in zip(known, found, strict=True) if not told]

    def _planned(self, point: Point) -> dict[str, str]:
        project = self.project(point.project, point.form, point.share)
        project.take(self.project(point.project, point.form), *KEPT)
        project.configure(self._about(point)["budget"])
        return refusal_of(lambda: project.run(*project.missing(*KEPT), *PLANNING))

    def _about(self, point: Point) -> dict[str, Any]:
        plain = self.state["peers"][point.project]["plain"]["peak"]
        share = point.share / 100
        return {"project": point.project, "form": point.form, "share": share, "budget": int(plain * share)}

    def measure_point(self, point: Point) -> None:
        if not self.late():
            project = self.project(point.project, point.form, point.share)
            self.state["points"][point.name] = self._about(point) | measured_point(project)
            self._note(point.name, self.state["points"][point.name])

    def _note(self, name: str, told: dict[str, Any]) -> None:
        print(f"{name}: {told}", file=sys.stderr, flush=True)
        self.path.write_text(json.dumps(self.state, indent=1))


def several(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """As many at a time as the cores can do."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        return list(pool.map(work, items))


def prepare_stage(stage: str, project: Project) -> None:
    """Once. What fails here fails again, and is told, where it is needed."""
    refusal_of(lambda: project.run(*project.missing(stage)))


def refusal_of(work: Callable[[], object]) -> dict[str, str]:
    try:
        work()
    except Failed as error:
        return {"refused" if error.fits_nothing else "error": str(error)}
    except (subprocess.TimeoutExpired, OSError) as error:
        return {"error": str(error)}
    return {}


def measured_peer(project: Project, way: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    project.configure()
    why = refusal_of(lambda: project.run(*project.missing(*KEPT, *PLANNING)))
    project.configure(engine="single")  # a peer that cannot do a model says so
    return why or refusal_of(lambda: found.update(project.train(way))) or found


def measured_point(project: Project) -> dict[str, Any]:
    found: dict[str, Any] = {}
    predicted, recomputes = project.predicted()
    told = refusal_of(lambda: found.update(project.train()))
    about = {"predicted": predicted, "recomputes": recomputes, "seconds": project.seconds()}
    return told or about | {"measured": found}


if __name__ == "__main__":
    sys.exit(main())
