"""The graph of a micro-batch that is a part of a pass: the model is traced again, for so many samples.

The graph of a pass has its batch in it as plain numbers, which do not tell what they are in a smaller one: 8 samples
that are viewed as (2, 4) may be two groups of any size, or groups of four. The user's module tells. The plan speaks of
the graph of a pass, by the names of its ops and values: both graphs must have the same, and the smaller sizes must
still divide as the plan splits them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from pipeline.config import Config
from pipeline.errors import SolveError, TraceError
from pipeline.ir.graph import Op, OpGraph
from pipeline.ir.plan import Plan
from pipeline.ir.verify import InvalidSharding, verify_sharding
from pipeline.partitions import part_of
from pipeline.tracing.trace import trace


def graph_of_slice(graph: OpGraph, plan: Plan, config: Config) -> OpGraph:
    """For a micro-batch of the plan; `graph` is that of a pass."""
    if plan.slices == 1:
        return graph
    try:
        own = trace(config, plan.slices)
    except TraceError as error:
        raise _refusal(plan, config, f"with fewer samples {error.what}") from error
    if (difference := next(_differences(graph, own), None)) is not None:
        raise _refusal(plan, config, f"the model does something else with fewer samples: {difference}")
    for number, partition in enumerate(plan.partitions):
        try:
            verify_sharding(part_of(own, partition.first, partition.last), partition.sharding, partition.sizes)
        except InvalidSharding as error:
            raise _refusal(plan, config, f"partition {number} cannot be split as planned: {error}") from error
    return own


def _differences(graph: OpGraph, own: OpGraph) -> Iterator[str]:
    """What is not the same in both, but for sizes."""
    for op, other in zip_longest(graph.ops, own.ops):
        if op is None or other is None or _call(op) != _call(other):
            there = f"{op.name} ({op.target}) of {op.module or 'the model'}" if op else "no op"
            yield f"{there} is {f'{other.name} ({other.target})' if other else 'not there'}"
    if _links(graph) != _links(own):
        yield "its ops make other links"
    for name, value in graph.values.items():
        if name not in own.values or value.type.dtype != own.values[name].type.dtype:
            yield f"{name} is not there, or of another type"


def _call(op: Op) -> tuple[object, ...]:
    return op.name, op.target, op.inputs, op.outputs, op.mutates


def _links(graph: OpGraph) -> list[tuple[object, ...]]:
    return [(link.ops, link.input, link.output, link.common) for link in graph.chain]


def _refusal(plan: Plan, config: Config, why: str) -> SolveError:
    passes = plan.micro_batches // plan.slices
    return SolveError(
        f"the pipeline cuts each pass into {plan.slices} micro-batches, and {why}",
        where=f"conf/checkpoint/{config.choices['checkpoint']}.yaml: micro_batches",
        remedy=f"ask for fewer than {plan.micro_batches}, a multiple of {passes}, or null",
    )
