"""One rank of a verification: `python -m stages.verify.worker WORK` under torchrun."""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import asdict
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeline import artifacts
from pipeline.errors import ShardwrightError, TrainError
from pipeline.instantiate import instantiate
from pipeline.ir.graph import OpGraph
from pipeline.ir.layout import replicated
from pipeline.ir.plan import Plan
from pipeline.launch import follow_parent, report_error
from pipeline.lowering import lower
from pipeline.optimizer import build_optimizer
from pipeline.runtime.batches import Batches
from pipeline.runtime.mesh import set_mesh
from pipeline.runtime.piped import Places
from pipeline.runtime.slices import Slices
from pipeline.runtime.source import load_program
from stages.verify.float64 import draws_alike, split_draws
from stages.verify.locate import Case, locate
from stages.verify.locate_piped import in_pass_of
from stages.verify.piped import judge_pipeline
from stages.verify.steps import Difference, Verdict, judge
from stages.verify.truth import Batch, Truth, truth_of

AT = "line "  # begins the word of a rank on a program that fails


def main(work: Path) -> None:
    follow_parent()
    job = json.loads((work / "job.json").read_text())
    dist.init_process_group("gloo", timeout=timedelta(seconds=job["train"]["wait_s"]))
    rank = dist.get_rank()
    try:
        result = verify(job)
        if rank == 0:
            (work / "result.json").write_text(json.dumps(result))
        dist.barrier()
    except ShardwrightError as error:
        report_error(work, rank, error.line())
        raise SystemExit(1) from None
    except Exception as error:  # the user's model, data and perhaps edited program run here
        report_error(work, rank, f"{failing_line(error, job['module_path'])}{type(error).__name__}: {error}")
        raise
    finally:
        dist.destroy_process_group()


def verify(job: dict[str, Any]) -> dict[str, Any]:
    root, path = Path(job["root"]), job["module_path"]
    graphs = [OpGraph.from_json(text) for text in job["graphs"]] or [artifacts.load("graph", root).body]
    graph: OpGraph = graphs[0]
    text = Path(path).read_text()
    written = load_program(path, compiles=False)
    piped = hasattr(written, "PARTITIONS")
    setting = Setting(job, written, draw=not piped and draws_alike(graph, text))
    truth = setting.truth()
    plan: Plan = artifacts.load("plan", root).body
    if split := split_draws(graph, [part.sharding for part in plan.partitions], truth.kind.others):
        raise TrainError(
            f"the program splits {split}, which draws random numbers of its own: they are not those of the model",
            where="runs/checkpoint/plan.json",
            remedy="plan without a rule for that op: it then runs whole",
        )
    verdict = (judge_pipeline if piped else judge)(load_program(path, compiles=False), truth, setting.optimizer)
    fault = None
    first = verdict.first()
    if not verdict.equal and first is not None:
        program = None if piped else lower(graph, plan.sharding, plan.micro_batches)
        case = Case(graph, program, job["written"], text, path, *graphs[1:])
        in_pass = in_pass_of(plan) if piped else None
        fault = asdict(locate(case, setting.truth(), setting.optimizer, first, in_pass))
    return _result(verdict, truth) | {"fault": fault}


class Setting:
    """The user's module, data and optimizer."""

    def __init__(self, job: dict[str, Any], program: Any, *, draw: bool) -> None:
        self.job, self.draw = job, draw
        if hasattr(program, "PARTITIONS"):
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
            norm = self.job["train"]["batch_norm"]
            return truth_of(self.module, self.batches, self.optimizer, draw=self.draw, batch_norm=norm)
        except RuntimeError as error:
            raise TrainError(
                f"the model does not run in float64: {type(error).__name__}: {str(error).splitlines()[0]}",
                where=f"{self.job['where']['model']}: module",
                remedy="let it take its types from its parameters and inputs",
            ) from error

    def module(self) -> nn.Module:
        torch.manual_seed(self.job["train"]["seed"])
        return instantiate(self.job["model"]["module"], f"{self.job['where']['model']}: module")

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(self.job["train"]["optimizer"], f"{self.job['where']['train']}: optimizer", parameters)


def _result(verdict: Verdict, truth: Truth) -> dict[str, Any]:
    """A row for everything that is compared: where it is furthest, by the tolerance that it has there."""
    worst: dict[tuple[str, str], Difference] = {}
    for d in verdict.judged:
        worst[d.kind, d.name] = max(worst.get((d.kind, d.name), d), d, key=lambda each: each.over)
    rows = sorted(worst.values(), key=lambda d: -d.over)
    return {"equal": verdict.equal, "rows": [asdict(d) for d in rows], **asdict(truth.kind), "draw": truth.draw}


def failing_line(error: BaseException, path: str) -> str:
    """The line of the program that was running, if any."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{AT}{lines[-1]}: " if lines else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
