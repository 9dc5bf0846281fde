"""Plans without a pipeline, of their parts."""

from __future__ import annotations

from shardwright.pipeline.ir.plan import Partition, Plan, Prediction, Region, Sharding


def whole_plan(
    axes: tuple[tuple[str, int], ...],
    device: str,
    budget_bytes: int,
    sharding: Sharding,
    regions: tuple[Region, ...],
    prediction: Prediction,
    micro_batches: int = 1,
) -> Plan:
    last = regions[-1].last if regions else 0
    only = Partition(0, last, axes, sharding, regions, 1, prediction.peak_bytes, prediction.step_seconds)
    return Plan(device, budget_bytes, (only,), prediction, (), micro_batches)
