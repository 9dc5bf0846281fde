"""A recompute schedule played on the two lines of pipeline.cost.two_lines, and as the runs of pipeline.cost.traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.pipeline.cost.links import LinkCosts
from shardwright.pipeline.cost.traffic import Ran, RunKind
from shardwright.pipeline.cost.two_lines import Pair, ends_of
from shardwright.stages.checkpoint.recompute.chain import LAST
from shardwright.stages.checkpoint.recompute.schedule import OpKind, ScheduledOp
from shardwright.stages.checkpoint.recompute.simulate import Outcome


def played(outcome: Outcome, costs: Sequence[LinkCosts]) -> Outcome:
    """As it runs where the links know of a host: each step from the end of the one before on the device to its own."""
    if any(own.ways[0].lines is None for own in costs):
        return outcome
    parts = [_seconds(step.op, costs) for step in outcome.steps]
    ends = list(ends_of(parts))
    steps = (
        replace(step, seconds=end - before)
        for step, before, end in zip(outcome.steps, [0.0, *ends], ends, strict=False)
    )
    return replace(outcome, steps=tuple(steps), time=ends[-1], waited=ends[-1] - sum(device for _, device in parts))


def _seconds(op: ScheduledOp, costs: Sequence[LinkCosts]) -> Pair:
    own = costs[op.link]
    if op.kind in (OpKind.F_CK, OpKind.F_NONE):
        return own.dropped_host, own.ways[0].device.forward
    way = own.last if op.option == LAST else own.ways[op.option]
    assert way.lines is not None
    host, device = way.lines.host, way.lines.device
    if op.kind is OpKind.F_ALL:
        return host.forward, device.forward
    if op.link == len(costs) - 1:  # the loss runs both ways at once
        return host.total, device.total
    return host.backward, device.backward


def runs_of(outcome: Outcome, costs: Sequence[LinkCosts]) -> list[Ran]:
    """What ran, by links of the graph; where nothing of one is kept, its forward pass is a run of its own."""
    found = []
    for step in outcome.steps:
        op, own = step.op, costs[step.op.link]
        kind = RunKind.FORWARD
        if op.kind is OpKind.B and op.link == len(costs) - 1:
            kind = RunKind.BOTH
        elif op.kind is OpKind.B:
            kept = None if op.option == LAST else own.ways[op.option].kept
            kind = RunKind.BACKWARD if kept is None else RunKind.AGAIN
        found.append(Ran(own.first, own.last_link, kind, step.seconds))
    return found
