"""Codegen: the plan as a program that a person reads and edits."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.ir.graph import OpGraph
from pipeline.ir.plan import Plan
from pipeline.ir.verify import verify_sharding
from pipeline.lowering import lower
from pipeline.partitions import part_of
from pipeline.stage import Inputs, Result
from stages.codegen.module import write_module
from stages.codegen.partitions import write_partitions
from stages.codegen.slices import graphs_of_slices


def run(inputs: Inputs, config: Config) -> Result:
    graph, plan = inputs["graph"], inputs["plan"]
    digest = inputs.artifacts["plan"].digest
    text = _piped(graph, plan, config, digest) if plan.pipelined else _alone(graph, plan, digest)
    functions = sum(line.startswith("def ") for line in text.splitlines())
    return Result(text, {"lines": len(text.splitlines()), "functions": functions})


def _alone(graph: OpGraph, plan: Plan, digest: str) -> str:
    verify_sharding(graph, plan.sharding, plan.sizes)
    return write_module(graph, plan, lower(graph, plan.sharding, plan.micro_batches), digest)


def _piped(graph: OpGraph, plan: Plan, config: Config, digest: str) -> str:
    graph, *smaller = graphs_of_slices(graph, plan, config)
    for partition in plan.partitions:
        verify_sharding(part_of(graph, partition.first, partition.last), partition.sharding, partition.sizes)
    return write_partitions(graph, plan, digest, *smaller)
