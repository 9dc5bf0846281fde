"""Where the samples of a batch lie in each activation, and how far a batch norm of each rank's own part splits them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwright.pipeline.ir.graph import Op, OpGraph, Role
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.plan import Plan, Sharding, Strategy
from shardwright.pipeline.ops.factors import letters_of, once_per_graph
from shardwright.pipeline.ops.mesh import op_strategies, view_op


@dataclass(frozen=True)
class SamplesOfGraph:
    fed: frozenset[str]  # ops into which something of the step's inputs comes
    places: dict[str, tuple[int, int]]  # value -> the dim of its samples, and the parts in which that lies

    def split(self, value: str, layout: Layout, sizes: tuple[int, ...]) -> int:
        """In how many parts its samples are split."""
        dim, outer = self.places.get(value, (0, 1))
        states = zip(layout.states, sizes, strict=True)
        return prod(size for state, size in states if (state.kind, state.dim, state.outer) == ("S", dim, outer))


@once_per_graph
def samples_of(graph: OpGraph) -> SamplesOfGraph:
    """Samples lie on dim 0 of the inputs, then where ops put them; on dim 0 where that is not known."""
    places = {value.name: (0, 1) for value in graph.of_role(Role.INPUT)}
    values, fed = set(places), dict[str, tuple[str, ...]]()
    for op in graph.ops:
        if not values.intersection(op.inputs):
            continue
        values.update(op.outputs)
        fed[op.name] = op.outputs
        for _, _, spots in letters_of(graph, op.name):
            if any(places.get(name) == (dim, parts) for (name, dim), parts in spots if name in op.inputs):
                for (name, dim), parts in (each for each in spots if each[0][0] in op.outputs):
                    places.setdefault(name, (dim, parts))
    unknown = dict.fromkeys((name for outputs in fed.values() for name in outputs), (0, 1))
    return SamplesOfGraph(frozenset(fed), unknown | places)


def strategies_in(graph: OpGraph, op: Op, sizes: tuple[int, ...]) -> tuple[Strategy, ...]:
    """Every way an op may run in its graph. Batch norms of each rank's own part split the samples as far as they can.

    So their results depend on how many devices there are, but not on the plan.
    """
    options = op_strategies(view_op(graph, op), sizes)
    if not op.per_rank:
        return options
    split = [samples_of(graph).split(op.inputs[0], one.inputs[0], sizes) for one in options]
    return tuple(one for one, parts in zip(options, split, strict=True) if parts == max(split))


@dataclass(frozen=True)
class NormParts:
    """How the samples of a batch norm's input are split: `outer` runs of them lie one after another."""

    parts: int
    outer: int


def norm_parts(graph: OpGraph, sharding: Sharding, sizes: tuple[int, ...]) -> dict[str, NormParts]:
    """Of each batch norm that takes the statistics of a rank's own part of the batch."""
    samples, found = samples_of(graph), dict[str, NormParts]()
    for op in (op for op in graph.ops if op.per_rank and op.name in sharding.strategies):
        layout = sharding.strategies[op.name].inputs[0]
        parts = samples.split(op.inputs[0], layout, sizes)
        found[op.name] = NormParts(parts, samples.places.get(op.inputs[0], (0, 1))[1])
    return found


def norm_parts_of_plan(graph: OpGraph, plan: Plan) -> dict[str, NormParts]:
    """The same, in all partitions."""
    parts = (norm_parts(graph, part.sharding, part.sizes) for part in plan.partitions)
    return {name: own for part in parts for name, own in part.items()}


def norms_in_words(graph: OpGraph, plan: Plan) -> str:
    """Nothing, where batch norms have the statistics of the whole batch."""
    found = norm_parts_of_plan(graph, plan).values()
    count = " or ".join(map(str, sorted({own.parts for own in found})))
    return f"of each rank's own samples: {len(found)}, of {count} parts of the batch" if found else ""
