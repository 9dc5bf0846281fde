"""Trace: the user's module becomes a graph of ops (pipeline/tracing)."""

from __future__ import annotations

from shardwright.pipeline.base.stage import Inputs, Result
from shardwright.pipeline.config import Config
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.tracing.trace import trace


def run(inputs: Inputs, config: Config) -> Result:
    graph = trace(config)
    return Result(graph, figures(graph))


def figures(graph: OpGraph) -> dict[str, float | int | str]:
    return {
        "ops": len(graph.ops),
        "parameters": sum(v.type.numel for v in graph.of_role(Role.PARAMETER)),
        "links": len(graph.chain),
        "distinct_blocks": len({link.block for link in graph.chain}),
        "common_values": len(graph.common),
    }
