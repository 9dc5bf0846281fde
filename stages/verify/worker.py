"""One rank of a verification: `python -m shardwright.stages.verify.worker WORK` under torchrun."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.errors import ShardwrightError, TrainError
from shardwright.pipeline.base.instantiate import instantiate
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.layout import replicated
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.launch.rank import end_after_cause, follow_parent, report_error, write_result
from shardwright.pipeline.launch.rendezvous import init_process_group
from shardwright.pipeline.ops.samples import NormParts
from shardwright.pipeline.runtime.pipelining.pipelined import Places
from shardwright.pipeline.runtime.programs.mesh import set_mesh
from shardwright.pipeline.runtime.programs.source import load_program
from shardwright.pipeline.runtime.step.slices import Slices
from shardwright.pipeline.user.batches import Batches
from shardwright.pipeline.user.optimizer import build_optimizer
from shardwright.stages.verify.compare import Difference, ProgramVerdict, judge
from shardwright.stages.verify.float32 import TRIES, Float32Verdict, judge_in_float32
from shardwright.stages.verify.float64 import draws_alike, split_draws
from shardwright.stages.verify.locate import Case, Fault, foreign_cast, locate, locate_in_float32
from shardwright.stages.verify.truth import Batch, Truth, truth_of, with_parts

AT = "line "  # begins the word of a rank on a program that fails


def main(work: Path) -> None:
    follow_parent()
    job = json.loads((work / "job.json").read_text())
    init_process_group("gloo", timedelta(seconds=job["train"]["wait_s"]))
    rank = dist.get_rank()
    try:
        result = verify(job)
        if rank == 0:
            write_result(work, result)
        dist.barrier()
    except ShardwrightError as error:
        report_error(work, rank, error.line())
        raise SystemExit(1) from None
    except Exception as error:  # the user's model, data and perhaps edited program run here
        report_error(work, rank, f"{failing_line(error, job['module_path'])}{type(error).__name__}: {error}")
        end_after_cause(error)
        raise
    finally:
        dist.destroy_process_group()


def verify(job: dict[str, Any]) -> dict[str, Any]:
    root, path = Path(job["root"]), job["module_path"]
    graphs = [OpGraph.from_json(text) for text in job["graphs"]] or [artifacts.load("graph", root).body]
    graph: OpGraph = graphs[0]
    text = Path(path).read_text()
    plan: Plan = artifacts.load("plan", root).body
    case = Case(graph, plan, job["written"], text, path, *graphs[1:])
    norms = [case.norms[op.name] for op in graph.ops if op.per_rank]  # in the order in which the module runs them
    setting = Setting(job, load_program(path, compiles=False), graph, text, norms)
    truth = setting.truth()
    if split := split_draws(graph, [part.sharding for part in plan.partitions], truth.kind.others):
        raise TrainError(
            f"the program splits {split}, which draws random numbers of its own: they are not those of the model",
            where="runs/checkpoint/plan.json",
            remedy="plan without a rule for that op: it then runs whole",
        )
    verdict = judge(load_program(path, compiles=False), truth, setting.optimizer)
    first = verdict.first()
    if not verdict.equal and first is not None:
        found = _result(verdict, truth, locate(case, setting.truth(), setting.optimizer, first))
    else:
        found = _in_float32(setting, case, verdict, truth)
    return {**found, "norm_parts": sorted({own.parts for own in norms})}


def _in_float32(setting: Setting, case: Case, verdict: ProgramVerdict, truth: Truth) -> dict[str, Any]:
    """The result where all is equal in float64; casts alone where an op draws other numbers in another type."""
    norm, compares = truth.batch_norm, not truth.kind.others
    tries = TRIES if compares else 1
    found = judge_in_float32(setting.module, setting.batches[0], case.path, setting.optimizer, norm, tries)
    asked: list[Any] = [None] * dist.get_world_size()  # partitions are on different ranks; all look at the same line
    dist.all_gather_object(asked, set(found.asked))
    fault = foreign_cast(case, found.step, set().union(*asked))
    if fault is None and compares and not found.equal:
        fault = locate_in_float32(case, found.step, setting.optimizer, norm, found.worst)
    return _result(verdict, truth, fault, found if compares else None)


class Setting:
    """The user's module, data and optimizer."""

    def __init__(
        self, job: dict[str, Any], program: Any, graph: OpGraph, text: str, norms: Sequence[NormParts] = ()
    ) -> None:
        self.norms = norms
        pipelined = hasattr(program, "PARTITIONS")
        self.job, self.draw = job, not pipelined and draws_alike(graph, text)
        if pipelined:
            axes = Places(program).axes
        else:
            set_mesh(program.MESH)
            axes = list(program.MESH)
        slices = Slices(program.SLICES) if hasattr(program, "SLICES") else None
        whole = dict.fromkeys(job["model"]["batch"], replicated(len(axes)))
        dataset = instantiate(job["data"]["dataset"], f"{job['where']['data']}: dataset")
        batches = Batches(dataset, job, whole, axes, slices=slices)
        count = program.MICRO_BATCHES
        every = (batches[number] for number in range(job["steps"] * count))
        self.batches: list[list[Batch]] = [list(islice(every, count)) for _ in range(job["steps"])]

    def truth(self) -> Truth:
        try:
            norm = self.job["train"]["running_stats"]
            return truth_of(self.module, self.batches, self.optimizer, draw=self.draw, batch_norm=norm)
        except RuntimeError as error:
            raise TrainError(
                f"the model does not run in float64: {type(error).__name__}: {str(error).splitlines()[0]}",
                where=f"{self.job['where']['model']}: module",
                remedy="let it take its types from its parameters and inputs",
            ) from error

    def module(self) -> nn.Module:
        torch.manual_seed(self.job["train"]["seed"])
        module = instantiate(self.job["model"]["module"], f"{self.job['where']['model']}: module")
        return with_parts(module, self.norms) if self.norms else module

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(self.job["train"]["optimizer"], f"{self.job['where']['train']}: optimizer", parameters)


def _result(
    verdict: ProgramVerdict, truth: Truth, fault: Fault | None = None, float32: Float32Verdict | None = None
) -> dict[str, Any]:
    """A row for everything that is compared: where it is furthest, by the tolerance that it has there."""
    worst: dict[tuple[str, str], Difference] = {}
    in_float32 = [] if float32 is None or float32.equal else float32.differences
    for d in [*verdict.judged, *(d for d in in_float32 if d.over > 1.0)]:
        worst[d.kind, d.name] = max(worst.get((d.kind, d.name), d), d, key=lambda each: each.over)
    rows = sorted(worst.values(), key=lambda d: -d.over)
    return {
        "equal": fault is None,
        "rows": [asdict(d) for d in rows],
        **asdict(truth.kind),
        "draw": truth.draw,
        "float32": None if float32 is None else asdict(float32.worst),
        "fault": None if fault is None else asdict(fault),
    }


def failing_line(error: BaseException, path: str) -> str:
    """The line of the program that was running, if any."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{AT}{lines[-1]}: " if lines else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
