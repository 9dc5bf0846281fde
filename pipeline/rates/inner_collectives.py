"""Seconds of the collectives that are inside an op's local form, such as the statistics of a batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.pipeline.ir.cluster import Axis
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Strategy
from shardwright.pipeline.ops.rule import FEW_RANKS, GATHER_FEW, SUM_FEW, Sent, plain_view
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.rates.compute import Seconds
from shardwright.pipeline.rates.joined_axes import joined_link


def talk_seconds(graph: OpGraph, name: str, strategy: Strategy, axes: tuple[Axis, ...]) -> Seconds:
    op = graph.op(name)
    rule = rule_of(op)
    if not strategy.body or rule is None or rule.talks is None:
        return Seconds(0.0, 0.0)
    there, back = rule.talks(plain_view(graph, op))
    over = [axis for axis, body in zip(axes, strategy.body.split(","), strict=False) if body]
    backward = any(graph.values[output].grad for output in op.outputs)
    return Seconds(_seconds(there, over), _seconds(back, over) if backward else 0.0)


def _seconds(sent: Sent, axes: Sequence[Axis]) -> float:
    collective, nbytes = sent
    ranks = prod(axis.size for axis in axes)
    if collective == GATHER_FEW or (collective == SUM_FEW and ranks <= FEW_RANKS):
        collective, nbytes = "all_gather", ranks * nbytes
    elif collective == SUM_FEW:
        collective = "all_reduce"
    link = joined_link(collective, axes)
    return link.seconds(nbytes) if link and nbytes else 0.0
