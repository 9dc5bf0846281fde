"""Plans that can be written as a program and not yet be run."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.errors import TrainError
from pipeline.ir.plan import Plan


def refuse_pipeline(plan: Plan, config: Config) -> None:
    if plan.pipelined:
        raise TrainError(
            f"pipelines cannot be run yet, and the plan is one of {len(plan.partitions)} partitions",
            where="runs/checkpoint/plan.json",
            remedy=f"set `pipeline: off` in conf/checkpoint/{config.choices['checkpoint']}.yaml",
        )
