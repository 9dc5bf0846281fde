"""Trace: the user's module becomes a graph of ops. `run` is the table of contents."""

from __future__ import annotations

from pipeline.config import Config, Precision
from pipeline.ir.graph import OpGraph, Role
from pipeline.ir.verify import verify_graph
from pipeline.stage import Inputs, Result
from stages.trace.build import build_model, fake_mode, sample_batch
from stages.trace.chain import find_chain
from stages.trace.export import export_loss
from stages.trace.lower import lower
from stages.trace.simplify import simplify


def run(inputs: Inputs, config: Config) -> Result:
    mode = fake_mode()
    model = build_model(config, mode)
    batch = sample_batch(config.model.batch, mode, config.model.precision)
    program = export_loss(model, batch)
    ops = simplify(lower(program, model, tuple(batch), keep_casts=config.model.precision is Precision.amp))
    graph = find_chain(ops)
    verify_graph(graph)
    return Result(graph, figures(graph))


def figures(graph: OpGraph) -> dict[str, float | int | str]:
    return {
        "ops": len(graph.ops),
        "parameters": sum(v.type.numel for v in graph.of_role(Role.PARAMETER)),
        "links": len(graph.chain),
        "distinct_blocks": len({link.block for link in graph.chain}),
        "common_values": len(graph.common),
    }
