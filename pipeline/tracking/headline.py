"""What a run is known by among others: a name, a few tags, and the figures that one looks at first.

MLflow sorts metrics by name, so there the figures are numbered in the order in which they matter. For DVC they lie in
`runs/<stage>/metrics.json`: `dvc metrics show` has one column for each, where the whole summaries would fill screens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.base.artifacts import Artifact
from pipeline.config import Config, TrainEngine
from pipeline.ir.plan import Partition, Plan


@dataclass(frozen=True)
class Headline:
    name: str
    stage: str  # that finds it,
    figure: str  # under this name in its summary


HEADLINES = (
    Headline("step_ms", "train", "median_step_ms"),
    Headline("predicted_step_ms", "checkpoint", "step_ms"),
    Headline("step_ratio", "train", "step_ratio"),
    Headline("samples_per_second", "train", "median_samples_per_second"),
    Headline("peak_mb", "train", "peak_mb"),
    Headline("predicted_peak_mb", "checkpoint", "peak_mb"),
    Headline("peak_ratio", "train", "peak_ratio"),
    Headline("final_loss", "train", "final_loss"),
)


def headlines(stage: str, figures: Mapping[str, float | int | str]) -> dict[str, float | int | str]:
    """Those that this stage found; nothing for most stages."""
    return {one.name: figures[one.figure] for one in HEADLINES if one.stage == stage and one.figure in figures}


def numbered(stage: str, figures: Mapping[str, float | int | str]) -> dict[str, float | int | str]:
    """The same as MLflow is told them: `1_step_ms` sorts before `2_...`, and all before `checkpoint/...`."""
    order = {one.name: number for number, one in enumerate(HEADLINES, 1)}
    return {f"{order[name]}_{name}": value for name, value in headlines(stage, figures).items()}


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
    kinds = list(dict.fromkeys(_axes(partition) for partition in plan.partitions))
    if not plan.pipelined:
        return kinds[0]
    pieces = f"pp={len(plan.partitions) // plan.chunks}"
    return f"{pieces} x {kinds[0]}" if len(kinds) == 1 else f"{pieces} of {', '.join(kinds)}"


def _axes(partition: Partition) -> str:
    return " x ".join(f"{name}={size}" for name, size in partition.axes) or "1 device"


def _gigabytes(plan: Plan) -> str:
    return f"{plan.budget_bytes / 1e9:.4g}"
