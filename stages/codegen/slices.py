"""The graph of a micro-batch that is a part of a pass: the model is traced again, for so many samples.

The graph of a pass has its batch in it as plain numbers, which do not tell what they are in a smaller one: 8 samples
that are viewed as (2, 4) may be two groups of any size, or groups of four. The user's module tells. The plan speaks of
the graph of a pass, by the names of its ops and values: both graphs must have the same, and the smaller sizes must
still divide as the plan splits them. Ops that do nothing in a batch of one sample (`expand`, `contiguous`) stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from shardwright.pipeline.base.errors import SolveError, TraceError
from shardwright.pipeline.config import Config
from shardwright.pipeline.ir.graph import Op, OpGraph
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.ir.verify import InvalidSharding, verify_sharding
from shardwright.pipeline.ops.uneven import uneven_in
from shardwright.pipeline.sharding.partitions import part_of
from shardwright.pipeline.tracing.chain import find_chain
from shardwright.pipeline.tracing.lower import Ops
from shardwright.pipeline.tracing.trace import trace
from shardwright.stages.codegen.growth import STAYS, UNKNOWN, loss_growth

CONTIGUOUS = "aten.contiguous.default"


def graphs_of_slices(graph: OpGraph, plan: Plan, config: Config) -> tuple[OpGraph, ...]:
    """For the micro-batches of the plan, the larger and the smaller ones if they differ; `graph` is that of a pass."""
    return tuple(_graph_of(samples, graph, plan, config) for samples in dict.fromkeys(plan.slices))


def _graph_of(samples: int, graph: OpGraph, plan: Plan, config: Config) -> OpGraph:
    try:
        own = with_contiguous(trace(config, samples, stay={op.name for op in graph.ops}), graph)
    except TraceError as error:
        raise _refusal(plan, config, f"with {_told(samples)} {error.what}") from error
    if (difference := next(_differences(graph, own), None)) is not None:
        raise _refusal(plan, config, f"the model does something else with {_told(samples)}: {difference}")
    if (powers := loss_growth(graph, own)) not in (STAYS, UNKNOWN):
        some = "" if 0 not in powers else "a part of "
        why = f"{some}the model's loss does not stay the same with more samples of a kind: theirs cannot be averaged"
        raise _refusal(plan, config, why, "let the model's loss be a mean over samples, or ask for null")
    for number, partition in enumerate(plan.partitions):
        try:
            part = part_of(own, partition.first, partition.last)
            verify_sharding(part, partition.sharding, partition.sizes, uneven_in(own).spots)
        except InvalidSharding as error:
            raise _refusal(plan, config, f"partition {number} cannot be split as planned: {error}") from error
    return own


def with_contiguous(own: OpGraph, graph: OpGraph) -> OpGraph:
    """With the `contiguous` of the larger graph, which is not exported where memory is in order already."""
    there = {op.name: op for op in own.ops}
    added = {op.name for op in graph.ops if op.target == CONTIGUOUS and op.name not in there}
    if not added or {op.name for op in graph.ops} != added | there.keys():
        return own
    values, ops = dict(own.values), []
    for op in graph.ops:
        if op.name in added:
            (source,), (result,) = op.inputs, op.outputs
            values[result] = replace(graph.values[result], type=values[source].type)
            ops.append(op)
        else:
            names = {graph.op(name).inputs[0]: name for name in op.inputs if name in added}
            ops.append(replace(there[op.name], args=there[op.name].args.renamed(names)))
    return find_chain(Ops({name: values[name] for name in graph.values if name in values}, tuple(ops), own.output))


def _differences(graph: OpGraph, own: OpGraph) -> Iterator[str]:
    """What is not the same in both, but for sizes."""
    for op, other in zip_longest(graph.ops, own.ops):
        if op is None or other is None or _call(op) != _call(other):
            there = f"{op.name} ({op.target}) of {op.module or 'the model'}" if op else "no op"
            yield f"{there} is {f'{other.name} ({other.target})' if other else 'not there'}"
    links = [[(link.ops, link.input, link.output, link.common) for link in one.chain] for one in (graph, own)]
    if links[0] != links[1]:
        yield "its ops make other links"
    for name, value in graph.values.items():
        if name not in own.values or value.type.dtype != own.values[name].type.dtype:
            yield f"{name} is not there, or of another type"


def _call(op: Op) -> tuple[object, ...]:
    return op.name, op.target, op.inputs, op.outputs, op.mutates


def _told(samples: int) -> str:
    return f"{samples} samples" if samples > 1 else "one sample"


def _refusal(plan: Plan, config: Config, why: str, remedy: str = "") -> SolveError:
    passes = plan.micro_batches // len(plan.slices)
    return SolveError(
        f"the plan cuts each pass into {len(plan.slices)} micro-batches, and {why}",
        where=f"conf/checkpoint/{config.choices['checkpoint']}.yaml: micro_batches",
        remedy=remedy or f"ask for fewer than {plan.micro_batches}, a multiple of {passes}, or null",
    )
