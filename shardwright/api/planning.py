"""`plan` and `profile`: the stages in memory, for objects that the user has."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack

from torch import nn

from shardwright.api.arguments import PACKAGE, ClusterLike, PlanChoices, PlanRequest, PrecisionName, arguments_named
from shardwright.api.given import ArgumentError, Batch, OptimizerLike, arguments_of, batch_of
from shardwright.api.plan import MADE, ModelPlan
from shardwright.pipeline.base.artifacts import Artifact
from shardwright.pipeline.base.errors import shown
from shardwright.pipeline.base.log import QUIET, get_log
from shardwright.pipeline.config import ClusterSource, Config
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.ops.table import rule_of
from shardwright.stages.profile.picture import draw_nothing, draw_step, table
from shardwright.stages.profile.run import figures
from shardwright.stages.whatif.planner import Planner, Run, planning

_OF_DEVICE = {"cpu": "preset_cpu", "cuda": "h100"}  # a cluster of that device
_measured: dict[str, Cluster] = {}  # by their settings: a machine is measured once a process


def plan(
    model: nn.Module,
    batch: Any,
    cluster: ClusterLike,
    *,
    memory_gb: float | None = None,
    optimizer: OptimizerLike | None = None,
    constraints: Mapping[str, str] | None = None,
    **choices: Unpack[PlanChoices],
) -> ModelPlan:
    """How to train `model`, which gives its loss, on a cluster; nothing is left on the disk, no weight is copied.

    `batch` is that of one pass of all devices: tensors by the names of forward's arguments, or by position; they may
    be on the meta device, as the model may. `cluster` is a preset's name, a YAML file or a mapping (docs/clusters.md).
    `memory_gb` is what a device may use, `optimizer` an instance, a class or a function of parameters (AdamW),
    `constraints` are layouts by name (docs/constraints.md). Further choices: `PlanChoices`.
    """
    with arguments_named("sw.plan"):
        given = _batch(model, batch)
        config = PlanRequest(model, given, cluster, memory_gb, optimizer, constraints, dict(choices)).config()
        made = _made(config, MADE)
    return ModelPlan(made, config, model, given)


@dataclass(frozen=True, repr=False)
class Profiled:
    """What a step of the unsplit model costs on a device: in a terminal a table, in a notebook the memory over time."""

    title: str
    graph: OpGraph
    profile: Profile

    def __repr__(self) -> str:
        unknown = sum(rule_of(op) is None for op in self.graph.ops)
        rows = figures(self.profile, unknown)
        width = max(map(len, rows))
        lines = [self.title, *(f"  {name:{width}}  {value}" for name, value in rows.items())]
        return "\n".join([*lines, *([table(self.profile.step)] if self.profile.step else [])])

    def _repr_png_(self) -> bytes:
        step = self.profile.step
        return draw_step(step, self.title) if step else draw_nothing(self.title, "its step cannot be simulated")


def profile(
    model: nn.Module,
    batch: Any,
    *,
    device: Literal["cpu", "cuda"] = "cuda",
    precision: PrecisionName = "fp32",
    optimizer: OptimizerLike | None = None,
) -> Profiled:
    """FLOPs, bytes and memory of a step of the unsplit model, found without running it; no device is needed."""
    with arguments_named("sw.profile"):
        if device not in _OF_DEVICE:
            raise ArgumentError(f"got {shown(device)}, expected cpu or cuda", where="device")
        asked = PlanRequest(
            model, _batch(model, batch), _OF_DEVICE[device], None, optimizer, None, {"precision": precision}
        )
        made = _made(config := asked.config(), ("graph", "profile"))
    title = f"{config.choices['model']}, unsplit, {precision} on {device}"
    return Profiled(title, made["graph"].body, made["profile"].body)


def _batch(model: nn.Module, batch: Any) -> Batch:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"got a {type(model).__name__}, expected a torch.nn.Module", where="model")
    return batch_of(arguments_of(model), batch)


def _made(config: Config, kinds: tuple[str, ...]) -> dict[str, Artifact]:
    """The artifacts, each made once."""
    with planning(PACKAGE, _run_of, get_log("plan", QUIET), keeps=False) as planner:
        changed = {"cluster": _cluster(planner, config)} if "cluster" in kinds else None
        return {kind: planner.made(kind, config, changed) for kind in kinds}


def _cluster(planner: Planner, config: Config) -> Cluster:
    digest = config.digest("cluster")
    found = _measured.get(digest) or planner.cluster(config)
    if config.cluster.source is ClusterSource.probe:
        _measured[digest] = found
    return found


def _run_of(stage: str) -> Run:
    run: Run = importlib.import_module(f"shardwright.stages.{stage}.run").run
    return run
