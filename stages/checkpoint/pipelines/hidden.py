"""A pipeline with what its partitions send behind what they compute, played again.

Cuts are searched for with all of a partition's seconds one after the other. Of the pipelines that are worked out the
gathers of a partition's parameters then run ahead of its links, in each micro-batch, and its gradient sums behind its
last backward pass, as without a pipeline (pipeline.cost.traffic). A schedule that defers gradients of weights sums them
when they are made: there nothing of the sums is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.pipeline.cost.pipelines.play import simulate
from shardwright.pipeline.cost.pipelines.schedules import Pipeline
from shardwright.pipeline.cost.traffic import Ran, RunKind, lines_of
from shardwright.stages.checkpoint.pipelines.refine import PartitionPlan, PipelinePlan
from shardwright.stages.checkpoint.pipelines.submesh_costs import SubmeshCosts


@dataclass(frozen=True)
class Hidden:
    """Seconds of a partition that are hidden: of each micro-batch, and once a step."""

    each: float = 0.0
    once: float = 0.0


def overlapped(plan: PipelinePlan, fills: Sequence[SubmeshCosts]) -> tuple[PipelinePlan, tuple[Hidden, ...]]:
    sums = plan.pipeline is not Pipeline.ZERO_BUBBLE
    pairs = [_overlapped(part, own, sums) for part, own in zip(plan.partitions, fills, strict=True)]
    hidden = tuple(found for _, found in pairs)
    if not any(found.each or found.once for found in hidden):
        return plan, hidden
    parts = tuple(part for part, _ in pairs)
    timeline = simulate(plan.order, [part.load for part in parts], plan.sending)
    return replace(plan, partitions=parts, timeline=timeline, seconds=timeline.seconds), hidden


def _overlapped(part: PartitionPlan, own: SubmeshCosts, sums: bool) -> tuple[PartitionPlan, Hidden]:
    costs, load = own.linear.costs[part.first : part.last + 1], part.load
    forward, backward = (sum(getattr(cost.ways[0], way) for cost in costs) for way in ("forward", "backward"))
    if not forward or not backward:
        return part, Hidden()
    slower = load.forward / forward, load.backward / backward  # with what is computed again
    ran = [Ran(c.first, c.last_link, RunKind.FORWARD, slower[0] * c.ways[0].forward) for c in costs]
    ran += [Ran(c.first, c.last_link, RunKind.BACKWARD, slower[1] * c.ways[0].backward) for c in reversed(costs)]
    lines = lines_of(own.priced, ran, (costs[0].first, costs[-1].last_link))
    if not lines.behind or not lines.hidden:
        return part, Hidden()
    number = lines.micro_batches - 1
    each, last = replace(lines, buckets=()).durations(number), lines.durations(number)
    sent = sum(one.seconds for bucket in lines.buckets for one in bucket.sums)
    hidden = Hidden(max(0.0, load.time - sum(each)), max(0.0, sent - (sum(last) - sum(each))) if sums else 0.0)
    there = sum(each[: len(costs)])
    found = replace(load, forward=there, backward=sum(each) - there) if hidden.each else load
    return replace(part, load=replace(found, once=load.once - hidden.once)), hidden
