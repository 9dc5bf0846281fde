"""Plans without a pipeline, of their parts."""

from __future__ import annotations

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import Layout, R
from shardwright.pipeline.ir.plan import Partition, Plan, Prediction, Region, Sharding, Strategy


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


def replicated(graph: OpGraph, axes: int = 1) -> Sharding:
    """Every op as it is, on all devices of so many axes."""
    whole = Layout((R,) * axes)
    return Sharding(
        {op.name: Strategy("R", (whole,) * len(op.inputs), (whole,) * len(op.outputs)) for op in graph.ops},
        {value.origin: whole for value in graph.of_role(Role.PARAMETER)},
        {value.name: whole for value in graph.of_role(Role.INPUT)},
    )
