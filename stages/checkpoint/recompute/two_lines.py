"""A schedule played on two lines: the host issues kernels, the device runs them.

    host     F0 |F1 |F2 |..B2..|..B1..|          the host is ahead as far as it can be
    device      |F0 |F1 |-|F2 |....B2....|....B1....|

A link ends when the device is through with it: after the one before, and not before its last kernel was issued. Where
the host takes longer than the device, the device waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.cost.links import LinkCosts
from stages.checkpoint.recompute.chain import LAST
from stages.checkpoint.recompute.schedule import OpKind, ScheduledOp
from stages.checkpoint.recompute.simulate import Outcome

Pair = tuple[float, float]  # seconds of the host and of the device


def played(outcome: Outcome, costs: Sequence[LinkCosts]) -> Outcome:
    """As it runs where the links know of a host: each step from the end of the one before on the device to its own."""
    if any(own.ways[0].lines is None for own in costs):
        return outcome
    issued = ended = worked = 0.0
    steps = []
    for step in outcome.steps:
        host, device = _seconds(step.op, costs)
        begun, issued = issued, issued + host
        before, ended = ended, max(ended + device, begun + device, issued)
        worked += device
        steps.append(replace(step, seconds=ended - before))
    return replace(outcome, steps=tuple(steps), time=ended, waited=ended - worked)


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
