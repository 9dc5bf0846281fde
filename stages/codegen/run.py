"""Codegen: the plan as a program that a person reads and edits."""

from __future__ import annotations

from shardwright.pipeline.base.errors import CodegenError
from shardwright.pipeline.base.stage import Inputs, Result
from shardwright.pipeline.config import Config
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.ir.verify import verify_sharding
from shardwright.pipeline.ops.uneven import uneven_in
from shardwright.pipeline.sharding.partitions import part_of
from shardwright.stages.codegen.module import write_module
from shardwright.stages.codegen.partitions import write_partitions


def run(inputs: Inputs, config: Config) -> Result:
    text, _ = write_program(inputs["graph"], inputs["plan"], config, inputs.artifacts["plan"].digest)
    functions = sum(line.startswith("def ") for line in text.splitlines())
    return Result(text, {"lines": len(text.splitlines()), "functions": functions})


def write_program(graph: OpGraph, plan: Plan, config: Config, digest: str = "") -> tuple[str, tuple[OpGraph, ...]]:
    """The text, and the graphs that it is of: where it cuts passes into slices, those of its slices."""
    smaller: list[OpGraph] = []
    if len(plan.slices) > 1:
        from shardwright.stages.codegen.slices import graphs_of_slices  # traces again: torch is slow to import

        graph, *smaller = graphs_of_slices(graph, plan, config)
    if not plan.pipelined:
        verify_sharding(graph, plan.sharding, plan.sizes, uneven_in(graph).spots)
        text = write_module(graph, plan, digest)
        return check_parses(text), (graph,)
    for partition in plan.partitions:
        part = part_of(graph, partition.first, partition.last)
        verify_sharding(part, partition.sharding, partition.sizes, uneven_in(graph).spots)
    return check_parses(write_partitions(graph, plan, digest, *smaller)), (graph, *smaller)


def check_parses(text: str) -> str:
    """A program that Python does not take is a fault of ours, and is not written."""
    try:
        compile(text, "runs/codegen/module.py", "exec")
    except (MemoryError, RecursionError, SyntaxError, ValueError) as error:
        line = text.splitlines()[(getattr(error, "lineno", None) or 1) - 1 :][:1]
        raise CodegenError(
            f"the program of this plan does not parse ({error}){f': {line[0].strip()}' if line else ''}",
            remedy="run `dvc repro -f`; where that does not help, report it with runs/trace/graph.json",
        ) from error
    return text
