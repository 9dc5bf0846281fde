"""A pipeline's partition as a graph and a sharding of its own: lowered, checked and printed like a whole model.

What crosses the cut before it enters like an input: the activation, and the common values that it or a later partition
reads; the latter pass through a partition that does not read them. Of the prologue it has what its links need: every
partition computes that for itself, from the batch.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.plan import Plan, Sharding
from shardwright.pipeline.sharding.lowering import home_layouts, written_layouts
from shardwright.pipeline.sharding.sharded import Sharded


def crossing(graph: OpGraph, cut: int) -> tuple[str, ...]:
    """What is sent over the cut before a link: the activation, then common values in the order of writing."""
    if cut == len(graph.chain) or graph.chain[cut].input is None:
        return ()
    later = {name for link in graph.chain[cut:] for name in graph.reads_common(link)}
    common = (name for name, writer in graph.common.items() if writer < cut and name in later)
    return (graph.chain[cut].input or "", *common)


def part_of(graph: OpGraph, first: int, last: int) -> OpGraph:
    """The links first..last and the prologue that they need; its output is the activation that leaves, or the loss."""
    chain = graph.chain[first : last + 1]
    prologue = _needed(graph, first, last)
    ops = tuple(graph.op(name) for name in (*prologue, *(name for link in chain for name in link.ops)))
    enters = crossing(graph, first)
    used = {name for op in ops for name in (*op.inputs, *op.outputs)}.union(enters)
    values = {name: value for name, value in graph.values.items() if name in used}
    values |= {name: replace(values[name], role=Role.ENTERS) for name in enters}
    return OpGraph(values, ops, chain[-1].output, prologue, chain)


def sharded_parts(plan: Plan, graph: OpGraph) -> tuple[Sharded, ...]:
    """Each partition as it runs, or the whole model; of a graph of one micro-batch."""
    return tuple(
        Sharded(
            part_of(graph, part.first, part.last) if plan.pipelined else graph,
            part.sharding,
            part.sizes,
            plan.micro_batches,
            to_loss=part is plan.partitions[-1],
        )
        for part in plan.partitions
    )


def restricted(graph: OpGraph, sharding: Sharding, first: int, last: int) -> Sharding:
    """What a partition needs of a sharding: its own ops, what they read, and how what enters and leaves it lies."""
    own, home = part_of(graph, first, last), home_layouts(graph, sharding)
    origins = {value.origin for value in own.of_role(Role.PARAMETER)}
    inputs = [value.name for value in own.values.values() if value.role in (Role.INPUT, Role.ENTERS)]
    if written_layouts(own, sharding).get(own.output, home[own.output]) != home[own.output]:
        inputs.append(own.output)  # how it leaves, where that is not how it is written
    return Sharding(
        strategies={op.name: sharding.strategies[op.name] for op in own.ops},
        storage={name: layout for name, layout in sharding.storage.items() if name in origins},
        inputs={name: home[name] for name in inputs},
        paths={name: way for name, way in sharding.paths.items() if name.split(": ")[0] in own.values},
        state={name: layout for name, layout in sharding.state.items() if name in origins},
        regathered=tuple(name for name in sharding.regathered if name in origins),
    )


def _needed(graph: OpGraph, first: int, last: int) -> tuple[str, ...]:
    """The ops of the prologue that the links read, at first or second hand.

    One that changes a buffer which nothing reads counts for the first partition.
    """
    read = {name for link in graph.chain[first : last + 1] for op in link.ops for name in graph.op(op).inputs}
    found: list[str] = []
    for op in map(graph.op, reversed(graph.prologue)):
        if read.intersection(op.outputs) or (op.mutates and (first == 0 or read.intersection(op.mutates))):
            found.insert(0, op.name)
            read.update(op.inputs)
    return tuple(found)


def busiest(plan: Plan) -> tuple[int, ...]:
    """The partitions on the devices that wait least: the prediction's seconds by kind are theirs."""
    if not plan.pipelined:
        return (0,)
    shards = len(plan.partitions) // plan.chunks
    busy = [0.0] * shards
    for total in plan.timeline.totals:
        if total.what != "waiting":
            busy[total.partition % shards] += total.seconds
    device = max(range(shards), key=busy.__getitem__)
    return tuple(range(device, len(plan.partitions), shards))
