"""What a run is known by among others: a name, a few tags, and the figures that one looks at first.

MLflow sorts metrics by name, so there the figures are numbered in the order in which they matter. For DVC they lie in
`runs/<stage>/metrics.json`: `dvc metrics show` has one column for each, where the whole summaries would fill screens.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.pipeline.base.artifacts import Artifact
from shardwright.pipeline.config import Config, TrainEngine
from shardwright.pipeline.ir.plan import Plan

Figures = Mapping[str, float | int | str]

HEADLINES = {  # name -> the stage that finds it, and its name in that stage's summary
    "step_ms": ("train", "median_step_ms"),
    "predicted_step_ms": ("checkpoint", "step_ms"),
    "step_ratio": ("train", "step_ratio"),
    "samples_per_second": ("train", "median_samples_per_second"),
    "peak_mb": ("train", "peak_mb"),
    "predicted_peak_mb": ("checkpoint", "peak_mb"),
    "peak_ratio": ("train", "peak_ratio"),
    "final_loss": ("train", "final_loss"),
}


def headlines(stage: str, figures: Figures) -> dict[str, float | int | str]:
    """Those that this stage found; nothing for most stages."""
    return {name: figures[own] for name, (maker, own) in HEADLINES.items() if maker == stage and own in figures}


def numbered(stage: str, figures: Figures) -> dict[str, float | int | str]:
    """The same as MLflow has them: `1_step_ms` sorts before `2_...`, and all before `checkpoint/...`."""
    order = list(HEADLINES)
    return {f"{order.index(name) + 1}_{name}": value for name, value in headlines(stage, figures).items()}


def run_name(config: Config, plan: Artifact | None) -> str:
    """`gpt_small on local_cpu, d0=2, 8 GB`, or what the user calls it; mesh and budget once there is a plan."""
    if config.tracking.run_name:
        return config.tracking.run_name
    name = f"{config.choices['model']} on {config.choices['cluster']}"
    if config.train.engine is not TrainEngine.planned:
        return f"{name} with {config.train.engine.value}"  # which does not run the plan
    return f"{name}, {mesh_text(plan.body)}, {_gigabytes(plan.body)} GB" if plan else name


def run_tags(config: Config, plan: Artifact | None) -> dict[str, str]:
    """By which runs are found and grouped: `tags.mesh = "d0=2"`."""
    tags = {group: config.choices[group] for group in ("model", "cluster")} | {"engine": config.train.engine.value}
    if plan is None:
        return tags
    short = plan.digest.removeprefix("sha256:")[:12]
    return tags | {"mesh": mesh_text(plan.body), "budget_gb": _gigabytes(plan.body), "plan": short}


def mesh_text(plan: Plan) -> str:
    """`d0=2 x d1=4`; of a pipeline `pp=2 x d0=4`, or `pp=2 of d0=4, d0=2` where its partitions differ."""
    meshes = [" x ".join(f"{name}={size}" for name, size in part.axes) or "1 device" for part in plan.partitions]
    kinds = list(dict.fromkeys(meshes))
    if not plan.pipelined:
        return kinds[0]
    groups = f"pp={len(plan.partitions) // plan.chunks}"
    return f"{groups} x {kinds[0]}" if len(kinds) == 1 else f"{groups} of {', '.join(kinds)}"


def _gigabytes(plan: Plan) -> str:
    return f"{plan.budget_bytes / 1e9:.4g}"
