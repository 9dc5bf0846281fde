"""Codegen: the plan as a program that a person reads and edits."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.errors import SolveError
from pipeline.ir.verify import verify_sharding
from pipeline.lowering import lower
from pipeline.stage import Inputs, Result
from stages.codegen.module import write_module


def run(inputs: Inputs, config: Config) -> Result:
    graph, plan = inputs["graph"], inputs["plan"]
    if plan.pipelined:
        raise SolveError(
            f"module.py for pipelines is not written yet, and the plan is one of {len(plan.partitions)} partitions",
            where="runs/checkpoint/plan.json",
            remedy=f"set `pipeline: off` in conf/checkpoint/{config.choices['checkpoint']}.yaml",
        )
    verify_sharding(graph, plan.sharding, plan.sizes)
    program = lower(graph, plan.sharding, plan.micro_batches)
    text = write_module(graph, plan, program, inputs.artifacts["plan"].digest)
    functions = sum(line.startswith("def ") for line in text.splitlines())
    return Result(text, {"lines": len(text.splitlines()), "functions": functions})
