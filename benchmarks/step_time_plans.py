"""The plans of benchmarks.step_time: what the stages choose for the measured machine, and plans forced upon them.

Every scenario is a project of its own, in a folder with a conf/ and a runs/; the stages run there as for any user.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from benchmarks.step_time_models import SCENARIOS, specs
from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.stage import STAGES, execute
from shardwright.pipeline.config import Backend, Checkpoint, Recompute, Solve
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Frontier, Plan, Proof, Sharding
from shardwright.pipeline.ir.profile import Profile, as_run
from shardwright.stages.checkpoint.choose import choose, evaluate
from shardwright.stages.checkpoint.recompute.released import released
from shardwright.stages.codegen.module import write_module
from shardwright.stages.solve.on_mesh import MeshProblem, price_point
from shardwright.stages.solve.problem.build import to_sharding
from shardwright.stages.solve.problem.families import Families, named
from shardwright.stages.solve.search.decomposition import fastest
from shardwright.stages.solve.search.restricted import restrict
from tests.namespaces import OWN, address

SOURCE = Path(__file__).resolve().parent.parent
SEARCH_S, PORT = 10.0, 29711
RECOMPUTED = ("DDP", "ZeRO-3")  # also forced with everything recomputed
FREE = 10.0**3  # GB, where plans are forced: none is to be refused
_PROOF = Proof("", "given", 0.0, 0.0, 0.0, 0, 0)


@dataclass(frozen=True)
class Written:
    """A program, and the seconds that its plan promises."""

    name: str
    path: str
    predicted: float
    parts: dict[str, float]  # of the prediction: compute, communication, recompute, optimizer


def project(folder: Path, name: str, probe: dict[str, Any]) -> Path:
    """The scenario as a user would configure it; `probe` says how this machine, or the hosts, are measured."""
    scenario, root = SCENARIOS[name], folder / name
    shutil.rmtree(root, ignore_errors=True)
    shapes = {key: {"shape": spec["shape"], "dtype": spec["dtype"]} for key, spec in specs(scenario).items()}
    adamw = {"_target_": "torch.optim.AdamW", "lr": 1e-5}
    budget = scenario.budget_mb and scenario.budget_mb / 1e3
    module = {"_target_": "benchmarks.step_time_models.build", "name": name}
    conf: dict[str, dict[str, Any]] = {
        "model": {"module": module, "batch": shapes, "batch_norm": scenario.batch_norm},
        "data": {"dataset": {"_target_": "shardwright.pipeline.models.data.TokenSequences"}},  # nothing is trained here
        "cluster": {"source": "probe", "device": "cpu", **probe},
        "solve": {"backend": "highs", "frontier_points": 4, "submeshes": 0, "memory_budget_gb": budget},
        "checkpoint": {"recompute": "optimal"},
        "train": {"steps": 1, "gradient_accumulation": 1, "seed": 0, "optimizer": adamw},
    }
    for group, content in conf.items():
        (root / "conf" / group).mkdir(parents=True)
        (root / "conf" / group / "own.yaml").write_text(json.dumps(content))
    chosen = {**dict.fromkeys(conf, "own"), "code": str(SOURCE / "pipeline" / "models")}
    (root / "conf" / "config.yaml").write_text(json.dumps({**chosen, "tracking": {"enabled": False}}))
    return root


def alone() -> dict[str, Any]:
    """Two processes of this machine."""
    return {"devices": 2, "probe": {"budget_s": 15.0, "repeats": 9, "timeout_s": 300.0, "max_message_mb": 32.0}}


def apart() -> dict[str, Any]:
    """A process on each of two hosts."""
    hosts = {"hosts": [address(0), address(1)], "port": PORT}
    return {"devices": 1, "probe": {**alone()["probe"], **hosts}}


def run(root: Path, *names: str) -> None:
    for name in names:
        module = importlib.import_module(f"shardwright.stages.{name}.run")
        execute(STAGES[name], module.run, root, logging.getLogger("benchmarks.step_time"))


def measure_hosts(root: Path, spaces: list[str]) -> None:
    """The cluster stage on the first host, with the other one joining."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "GLOO_SOCKET_IFNAME": OWN, "OMP_NUM_THREADS": "1"}
    modules = (["stages", "cluster"], ["shardwright.stages.cluster.join", f"{address(0)}:{PORT}", "--host", address(1)])
    processes = [
        subprocess.Popen(["ip", "netns", "exec", space, sys.executable, "-m", *module], cwd=root, env=environment)
        for space, module in zip(spaces, modules, strict=True)
    ]
    if any([process.wait(600) for process in processes]):
        raise SystemExit("the hosts could not be measured")


def take_cluster(source: Path, root: Path) -> None:
    """This machine is measured once for all."""
    shutil.copytree(source / "runs" / "cluster", root / "runs" / "cluster", dirs_exist_ok=True)


def chosen(root: Path) -> Written:
    """What the stages decide; the cluster has been measured."""
    run(root, "trace", "profile", "solve", "checkpoint", "codegen")
    plan: Plan = artifacts.load("plan", root).body
    return _written("chosen", root / "runs" / "codegen" / "module.py", plan)


def _written(name: str, path: Path, plan: Plan) -> Written:
    predicted = plan.prediction
    parts = ("compute", "communication", "recompute", "optimizer")
    return Written(name, str(path), predicted.step_seconds, {p: getattr(predicted, f"{p}_seconds") for p in parts})


def forced(root: Path) -> Iterator[Written]:
    """The fastest plan of every family that the model's shapes allow, and some of them with all recomputed.

    Where two families have the same fastest plan, it counts once.
    """
    planner = _Planner(root)
    programs: set[str] = set()
    for family in named(1):
        sharding = planner.sharding(family)
        for recompute in ("off", "full") if family in RECOMPUTED else ("off",):
            if sharding:
                plan = planner.plan(sharding, Recompute(recompute))
                name = f"{family}{' + recompute' if recompute == 'full' else ''}"
                path = root / f"{name.replace(' ', '_')}.py"
                text = write_module(planner.traced, plan)
                if text not in programs:
                    programs.add(text)
                    path.write_text(text)
                    yield _written(name, path, plan)


class _Planner:
    def __init__(self, root: Path) -> None:
        found = {kind: artifacts.load(kind, root).body for kind in ("graph", "profile", "cluster", "frontier")}
        self.traced: OpGraph = found["graph"]
        self.profile: Profile = found["profile"]
        self.frontier: Frontier = found["frontier"]
        self.graph = as_run(self.traced, self.profile.types)
        cluster = found["cluster"]
        self.cluster = cluster.on(next(mesh for mesh in cluster.mesh_candidates() if len(mesh.axes) == 1))
        settings = Solve(backend=Backend.highs, frontier_points=1)
        log = logging.getLogger("benchmarks.step_time")
        self.workload = Workload(self.graph, self.profile, self.cluster, self.frontier.optimizer_copies)
        self.on_mesh = MeshProblem(self.workload, settings, "", log)

    def sharding(self, family: str) -> Sharding | None:
        problem, choices = self.on_mesh.problem, self.on_mesh.choices
        kept = Families(self.graph, choices).kept(named(1)[family])
        if kept is None:
            return None
        left = restrict(problem, kept)
        picked = left.expand(fastest(left.problem, SEARCH_S))
        return to_sharding(self.graph, choices, picked) if isfinite(problem.cost(picked)) else None

    def plan(self, sharding: Sharding, recompute: Recompute) -> Plan:
        copies = self.frontier.optimizer_copies
        point = price_point(self.workload, sharding, _PROOF)
        meshes = tuple(mesh for mesh in self.frontier.meshes if mesh.axes == self.cluster.axes)
        frontier = Frontier(int(FREE * 1e9), copies, meshes[:1], (point,))
        candidate = evaluate(self.graph, self.profile, self.cluster, frontier, 0, Checkpoint(recompute=recompute))
        plan = choose([candidate], self.cluster, frontier, "")
        return replace(plan, released=released(self.graph, self.profile))
