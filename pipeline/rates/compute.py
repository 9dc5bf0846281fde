"""Seconds of one op on one rank: a roofline over the calibrated matmul rate and memory bandwidth, plus the launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardwright.pipeline.ir.cluster import Compute, Curve, Pace
from shardwright.pipeline.ir.graph import ITEM_SIZE, Op, OpGraph, TensorType
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.plan import Strategy
from shardwright.pipeline.ir.profile import OpCost
from shardwright.pipeline.ops.rule import plain_view
from shardwright.pipeline.ops.table import rule_of

NO_PACE = Pace(0.0, 0.0)


@dataclass(frozen=True)
class Seconds:
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def local_bytes(graph: OpGraph, value: str, layout: Layout, sizes: tuple[int, ...]) -> int:
    return shard_bytes(graph.values[value].type, layout, sizes)


@lru_cache(maxsize=1 << 16)
def shard_bytes(kind: TensorType, layout: Layout, sizes: tuple[int, ...]) -> int:
    """Of one rank's shard, with its padding where the shards are uneven."""
    if not layout.holds(kind.shape, sizes):  # in a smaller batch than the one that was planned for
        return kind.nbytes // layout.shards(sizes)
    return prod(layout.local_shape(kind.shape, sizes)) * ITEM_SIZE[kind.dtype]


def op_seconds(
    graph: OpGraph, op: str, cost: OpCost, strategy: Strategy, compute: Compute, sizes: tuple[int, ...]
) -> Seconds:
    backward = any(graph.values[o].grad for o in graph.op(op).outputs)
    if cost.free:
        return Seconds(compute.launch, compute.launch_backward if backward else 0.0)
    share, kept = part_of_work(strategy, sizes), part_of_bytes(graph, op, strategy, sizes)
    target = graph.op(op).target
    matmul = compute.matmul_of(graph.values[graph.op(op).outputs[0]].type.dtype)
    calibrated = compute.ops.get(target, NO_PACE)
    own = compute.flops.get(_pace_name(graph, graph.op(op)))
    elements = share * max(t.numel for t in graph.types((*graph.op(op).inputs, *graph.op(op).outputs)))
    flops, moved = cost.flops_forward * share, cost.bytes_forward * kept
    worked = flops * own.forward if own else _product(flops, moved, matmul, compute.product_bytes.forward)
    done = max(worked, moved / compute.memory_rate, calibrated.forward * elements)
    beside = [compute.bodies[body] for body in {*strategy.body.split(",")} if body in compute.bodies]
    forward = done + compute.launch * max(1, cost.kernels_forward) + sum(pace.forward for pace in beside)
    if not backward:
        return Seconds(forward, 0.0)
    flops, moved = cost.flops_backward * share, cost.bytes_backward * kept
    worked = flops * own.backward if own else _product(flops, moved, matmul, compute.product_bytes.backward)
    done = max(worked, moved / compute.memory_rate, calibrated.backward * elements)
    done += sum(pace.backward for pace in beside)
    return Seconds(forward, done + compute.launch_backward * max(1, cost.kernels_backward))


def _pace_name(graph: OpGraph, op: Op) -> str:
    """The op, with its form where its rule tells several apart."""
    rule = rule_of(op)
    form = rule.form(plain_view(graph, op)) if rule and rule.form else ""
    return f"{op.target}, {form}" if form else op.target


def part_of_bytes(graph: OpGraph, op: str, strategy: Strategy, sizes: tuple[int, ...]) -> float:
    """The part of the op's tensors that one rank holds."""
    tensors = _tensors(graph, op, strategy)
    whole = sum(graph.values[value].type.nbytes for value, _ in tensors)
    return sum(local_bytes(graph, value, layout, sizes) for value, layout in tensors) / max(1, whole)


def _product(flops: float, moved: float, matmul: Curve, per_byte: float) -> float:
    """Small ones are slower for each FLOP, those of few rows for each byte; what has no FLOPs is no product."""
    return max(flops / matmul.at(flops), flops / max(matmul.rates) + moved * per_byte) if flops else 0.0


def part_of_work(strategy: Strategy, sizes: tuple[int, ...]) -> float:
    """The part of the op's arithmetic that one rank does: an axis on which a tensor is split divides it."""
    share, layouts = 1.0, (*strategy.inputs, *strategy.outputs)
    for axis, size in enumerate(sizes):
        share /= size if any(layout.states[axis].kind == "S" for layout in layouts) else 1
    return share


def _tensors(graph: OpGraph, op: str, strategy: Strategy) -> list[tuple[str, Layout]]:
    found = graph.op(op)
    return [*zip(found.inputs, strategy.inputs, strict=True), *zip(found.outputs, strategy.outputs, strict=True)]


def optimizer_seconds(nbytes: float, copies: float, compute: Compute) -> float:
    """An optimizer step for one parameter of that many bytes: reads and writes its tensors once or twice."""
    rate = compute.optimizer_rate or compute.memory_rate
    return optimizer_bytes(nbytes, copies) / rate + max(compute.optimizer_launch, compute.launch)


def optimizer_bytes(nbytes: float, copies: float) -> float:
    """The parameter is read and written, its gradient read, each state tensor read and written."""
    return nbytes * (3 + 2 * copies)
