"""Ops that run whole on every rank for lack of a rule: which they are, how many, and their part of the step.

An op of which a split is known, by its rule or by trying, is none of them: the solver left it whole, or its sizes do
not divide. Nor is one that has no dim to divide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwright.pipeline.cost.op_prices import OpPrices
from shardwright.pipeline.cost.step import Priced
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.graph import Op, OpGraph
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.ops.mesh import view_op
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.sharding.partitions import busiest, sharded_parts
from shardwright.pipeline.sharding.slices import sliced

LACK = "whole on every rank for lack of a rule"


@dataclass(frozen=True)
class WholeOp:
    """All ops of one target."""

    target: str
    count: int
    seconds: float  # of a step
    share: float  # of the step

    def __str__(self) -> str:
        times = f" x {self.count}" if self.count > 1 else ""
        return f"{self.target}{times} ({self.share:.1%} of the step)"


def whole_ops(priced: Priced, step_seconds: float) -> tuple[WholeOp, ...]:
    """Of a sharded model, the dearest first."""
    return _joined(_seconds(priced), step_seconds)


def whole_ops_of(plan: Plan, graph: OpGraph, profile: Profile, cluster: Cluster) -> tuple[WholeOp, ...]:
    """Of the plan; of a pipeline those on its busiest devices, which the step waits for. The graph is as it runs."""
    cut, costs = sliced(graph, profile, plan.slices)
    parts = sharded_parts(plan, cut)
    ops = OpPrices(cut, costs, cluster)
    found = [one for n in busiest(plan) for one in _seconds(Priced(parts[n], ops, 0.0))]
    return _joined(found, plan.prediction.step_seconds)


def _seconds(priced: Priced) -> Iterator[tuple[str, float]]:
    for op in priced.graph.ops:
        if lacks_rule(priced.graph, op, priced.sharded.sizes):
            yield op.target, priced.sharded.micro_batches * priced.op(op.name).total


def _joined(found: Iterable[tuple[str, float]], step_seconds: float) -> tuple[WholeOp, ...]:
    by_target: dict[str, list[float]] = defaultdict(list)
    for target, seconds in found:
        by_target[target].append(seconds)
    made = [WholeOp(target, len(own), sum(own), _share(sum(own), step_seconds)) for target, own in by_target.items()]
    return tuple(sorted(made, key=lambda one: (-one.seconds, one.target)))


def lacks_rule(graph: OpGraph, op: Op, sizes: tuple[int, ...]) -> bool:
    """Whether nobody knows how the op may be split, and the mesh could divide a dim of what it reads or writes."""
    dims = {size for kind in graph.types((*op.inputs, *op.outputs)) for size in kind.shape}
    if rule_of(op) is not None or not any(axis > 1 and size and size % axis == 0 for axis in sizes for size in dims):
        return False
    from shardwright.pipeline.ops.discovery.discover import find  # needs torch, and only ops without a rule need it

    return not any(state.kind == "S" for one in find(view_op(graph, op)) for state in (*one.inputs, *one.outputs))


def in_words(found: Sequence[WholeOp]) -> str:
    return ", ".join(map(str, found))


def figures_of(found: Sequence[WholeOp]) -> dict[str, float | int | str]:
    """For the summary of a stage and the tracked run: their names where there are any, and their part of the step."""
    named: dict[str, float | int | str] = {"whole_ops": in_words(found)} if found else {}
    return named | {"whole_ops_share": round(sum(one.share for one in found), 4)}


def _share(seconds: float, step_seconds: float) -> float:
    """What is predicted of a plan may be measured of whole links, and so be less than the sum of its ops."""
    return min(1.0, seconds / step_seconds) if step_seconds else 0.0
