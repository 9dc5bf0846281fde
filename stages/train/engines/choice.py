"""Which engine takes the steps, on how many ranks; read before anything is started, so without torch."""

from __future__ import annotations

from math import prod

from pipeline.base.errors import TrainError
from pipeline.config import Config, TrainEngine
from pipeline.ir.plan import Plan


def ranks_of(plan: Plan, engine: TrainEngine) -> int:
    """All devices of the plan; partitions that take turns on the same ones count once."""
    if engine is TrainEngine.single:
        return 1
    return sum(prod(partition.sizes) for partition in plan.partitions) // plan.chunks


def check_batch(config: Config, ranks: int) -> None:
    """The program of a plan cuts its batch as the plan says; the other engines cut every input into equal parts."""
    if config.train.engine is TrainEngine.planned:
        return
    for name, spec in config.model.batch.items():
        if spec.shape[0] % ranks:
            raise TrainError(
                f"{name} has {spec.shape[0]} samples, which do not divide over the {ranks} ranks of"
                f" `engine: {config.train.engine.value}`",
                where=f"conf/model/{config.choices['model']}.yaml: batch.{name}.shape",
                remedy=f"give a multiple of {ranks}, or train with `engine: planned`",
            )
