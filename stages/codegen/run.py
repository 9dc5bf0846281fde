"""Codegen: the plan as a program that a person reads and edits."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.errors import SolveError
from pipeline.ir.graph import OpGraph
from pipeline.ir.plan import Plan
from pipeline.ir.verify import verify_sharding
from pipeline.lowering import lower
from pipeline.partitions import part_of
from pipeline.stage import Inputs, Result
from stages.codegen.module import write_module
from stages.codegen.partitions import write_partitions


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
    _check_slices(plan, config)
    for partition in plan.partitions:
        verify_sharding(part_of(graph, partition.first, partition.last), partition.sharding, partition.sizes)
    return write_partitions(graph, plan, digest)


def _check_slices(plan: Plan, config: Config) -> None:
    """Sizes in the program are those of the graph, which is traced for a pass."""
    if plan.slices > 1:
        files = {group: f"conf/{group}/{config.choices[group]}.yaml" for group in ("checkpoint", "model", "train")}
        raise SolveError(
            f"the pipeline cuts each pass of the train file into {plan.slices} micro-batches, and the model is traced "
            "for a pass: its program cannot be written yet",
            where="runs/checkpoint/plan.json",
            remedy=f"set `micro_batches: null` in {files['checkpoint']}; for smaller ones, a smaller `batch` in "
            f"{files['model']} and more `micro_batches` in {files['train']}",
        )
