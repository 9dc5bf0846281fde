"""Whether artifacts that are read together can be worked on: their layouts fit the graph, their ops are ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from shardwright.pipeline.base.artifacts import KINDS, Artifact, check_beside
from shardwright.pipeline.base.errors import ArtifactError
from shardwright.pipeline.ir.graph import Op, OpGraph
from shardwright.pipeline.ir.plan import Frontier, Plan, Sharding
from shardwright.pipeline.ir.verify import InvalidSharding, verify_sharding
from shardwright.pipeline.ops.dims import read_line
from shardwright.pipeline.ops.public import overload_of
from shardwright.pipeline.ops.rule import plain_view
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.ops.uneven import uneven_in
from shardwright.pipeline.sharding.partitions import part_of


def check_sound(found: Mapping[str, Artifact]) -> None:
    """Own ops must be known by now (pipeline/user/own_ops.py)."""
    check_beside(found.values())
    if "graph" not in found:
        return
    graph: OpGraph = found["graph"].body
    for op in graph.ops:
        _check_op(graph, op)
    for kind in ("frontier", "plan"):
        if kind in found:
            for own, sharding, sizes in _shardings(graph, found[kind].body):
                try:
                    verify_sharding(own, sharding, sizes, uneven_in(graph).spots)
                except InvalidSharding as error:
                    raise _refusal(kind, str(error)) from error


def _check_op(graph: OpGraph, op: Op) -> None:
    """Torch has it, it does nothing but compute, and its tensors are such as its rule speaks of."""
    rule = rule_of(op)
    if rule is None:
        overload = overload_of(op.target)
        if overload is None:
            raise _refusal("graph", f"{op.name} calls {op.target}, and torch has no such op")
        schema = overload._schema
        if not schema.returns or any(argument.name == "filename" for argument in schema.arguments):
            raise _refusal("graph", f"{op.name} calls {op.target}, which does not compute with tensors alone")
        return
    try:
        read_line(rule.line(view := plain_view(graph, op)), view)
    except Exception as error:  # whatever a rule says to arguments that its op never has
        raise _refusal("graph", f"{op.name} is no {op.target}: {type(error).__name__}: {error}") from error


def _shardings(graph: OpGraph, body: Frontier | Plan) -> Iterator[tuple[OpGraph, Sharding, tuple[int, ...]]]:
    if isinstance(body, Frontier):
        yield from ((graph, point.sharding, body.meshes[point.mesh].sizes) for point in body.points)
        return
    for partition in body.partitions:
        own = part_of(graph, partition.first, partition.last) if body.pipelined else graph
        yield own, partition.sharding, partition.sizes


def _refusal(kind: str, problem: str) -> ArtifactError:
    what, again = f"its body is not valid ({problem})", f"run `dvc repro -f {KINDS[kind].stage}`"
    return ArtifactError(what, where=str(KINDS[kind].path(Path())), remedy=again)
