"""Seconds of the collectives that are inside an op's local form, such as the statistics of a batch norm."""

from __future__ import annotations

from pipeline.ir.cluster import Axis
from pipeline.ir.graph import OpGraph
from pipeline.ir.plan import Strategy
from pipeline.ops.rule import plain_view
from pipeline.ops.table import rule_of
from pipeline.rates.compute import Seconds


def talk_seconds(graph: OpGraph, name: str, strategy: Strategy, axes: tuple[Axis, ...]) -> Seconds:
    op = graph.op(name)
    rule = rule_of(op)
    if not strategy.body or rule is None or rule.talks is None:
        return Seconds(0.0, 0.0)
    (there, sent), (back, returned) = rule.talks(plain_view(graph, op))
    over = [axis for axis, body in zip(axes, strategy.body.split(","), strict=False) if body]
    backward = any(graph.values[output].grad for output in op.outputs)
    return Seconds(
        sum(axis.links[there].seconds(sent) for axis in over) if sent else 0.0,
        sum(axis.links[back].seconds(returned) for axis in over) if backward and returned else 0.0,
    )
