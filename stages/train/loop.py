"""The steps of a run, whatever takes them: timed, measured, written down one by one."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.ir.report import Breakdown
from shardwright.pipeline.runtime.compiler.host_calls import why_python
from shardwright.pipeline.runtime.step.memory import measure_peak, storage_bytes
from shardwright.stages.train.breakdown import mean_breakdown, profiled
from shardwright.stages.train.data import Prefetched
from shardwright.stages.train.engines.engine import Batch, Engine
from shardwright.stages.train.job import Job
from shardwright.stages.train.journal import Journal, Note
from shardwright.stages.train.ranks.joining import gathered
from shardwright.stages.train.ranks.peers import Peers
from shardwright.stages.train.ranks.safety import Safety
from shardwright.stages.train.ranks.watchdog import Watchdog
from shardwright.stages.train.snapshots.writer import About

MEASURED_STEP = 1  # memory is measured on the second step taken here: by then the optimizer state exists


class Loop:
    def __init__(
        self, engine: Engine, job: Job, work: Path, watchdog: Watchdog | None = None, peers: Peers | None = None
    ) -> None:
        self.engine, self.job, self.peers = engine, job, peers
        self.journal = Journal(work / "steps.jsonl")
        self.watchdog = watchdog or Watchdog()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.evaluated: list[tuple[int, float]] = []  # step, loss on the held-out data after it
        self.evaluates_first = True  # in this process: blocks may be compiled
        self.peaks: list[int] = []  # of each rank
        self.breakdown: Breakdown | None = None
        self.taken_by: str = job["train"]["engine"]  # the engine of these times and peaks
        self.profiled_at = -1  # place among `seconds` of the step whose parts were measured
        settings = job["train"]
        self.rate = Rate(engine.optimizer, settings["schedule"], settings["steps"], job["where"]["train"])
        self.batches = Prefetched(engine.batches, settings["steps"])
        self.safety = Safety(engine, job, self.watchdog)

    def run(self) -> dict[str, Any]:
        """What was measured; nothing where the run was told to end before its last step."""
        steps = self.job["train"]["steps"]
        self.watchdog.beat("going on from a snapshot", slow=True)
        start = self._resume(steps)
        measured, profiled_step = looked_at(self.job["train"]["trace_step"], start, steps)
        if start <= measured == steps - 1 == self.job["train"]["trace_step"]:
            self._write([{"untraced": measured}])
        for number in range(start, steps):
            if self.peers and self.peers.ends(number):
                self._write(self.safety.stop(number, self._numbers))
                return {}
            self.watchdog.beat(f"step {number}", slow=number in (start, profiled_step))
            self._take(number, number == measured, number == profiled_step)
            self._evaluate(number)
            self._write([self._line(number)])
            if number == start:
                self._write(_python_calls())
            if number == start + 1 and self.engine.not_captured:
                self._write([{"not_captured": self.engine.not_captured}])
            self._write(self.safety.after(number + 1, self._numbers))
        self.batches.close()
        self._write(self.safety.end())
        self.safety.require_last(exports=self.job["train"]["export"])
        return {
            **self._numbers(),
            "ranks": dist.get_world_size(),
            "engine": self.taken_by,
            "samples": self.engine.samples,
            "held_whole": self.engine.held_whole,
            "breakdown": asdict(mean_breakdown(gathered(self.breakdown))) if self.breakdown else None,
        }

    def _resume(self, steps: int) -> int:
        """The first step to take; times and memory are kept if of this engine and plan, or if none will follow."""
        about, notes = self.safety.resume()
        self._write(notes)
        if not about:
            return 0
        self.losses, self.evaluated = about["losses"], [(step, loss) for step, loss in about["evaluated"]]
        if self.safety.same_steps(about) or about["step"] >= steps:
            self.seconds, self.peaks, self.profiled_at = about["seconds"], about["peak_bytes"], about["profiled_at"]
            self.taken_by = about.get("engine", self.taken_by)
        return int(about["step"])

    def _numbers(self) -> About:
        """The series as they are now: a snapshot may be written while they grow."""
        return {
            "losses": [*self.losses],
            "seconds": [*self.seconds],
            "evaluated": [*self.evaluated],
            "peak_bytes": self.peaks,
            "profiled_at": self.profiled_at,
        }

    def _write(self, lines: list[Note]) -> None:
        if dist.get_rank() == 0:
            self.journal.write(lines)

    def _take(self, number: int, measured: bool, profiled_here: bool) -> None:
        self.rate.set(number)
        first, *later = self.batches[number]
        first = self.engine.on_device(first)
        if measured:
            peak = measure_peak(
                lambda: self._timed(first, later),
                lambda: [*self.engine.resident(), *first.values()],
                self.engine.device,
            )
            self.peaks = gathered(peak)
        elif profiled_here:
            self.profiled_at = len(self.seconds)
            traced = self.job["train"]["trace_step"] is not None and dist.get_rank() == 0
            path = Path(self.job["trace_path"]) if traced else None
            self.breakdown = profiled(lambda: self._timed(first, later), self.engine.device, path)
        else:
            self._timed(first, later)
        self._check(self.losses[-1], "loss", number)

    def _check(self, loss: float, what: str, number: int) -> None:
        if not math.isfinite(loss):
            self._write(self.safety.end())
            remedy = self.safety.advice("lower the learning rate")
            raise TrainError(f"the {what} became {loss} at step {number}", remedy=remedy)

    def _timed(self, first: Batch, later: list[Batch]) -> None:
        start = time.perf_counter()
        self.losses.append(self.engine.step(first, later))
        self.seconds.append(time.perf_counter() - start)

    def _evaluate(self, number: int) -> None:
        """After every so many steps, and after the last."""
        every, done = self.job["train"]["evaluate"]["every"], number + 1
        if every and (done % every == 0 or done == self.job["train"]["steps"]):
            beat = self.watchdog.beating(f"a batch of the evaluation after step {number}", slow=self.evaluates_first)
            self.evaluated.append((number, self.engine.evaluate(beat)))
            self.evaluates_first = False
            self._check(self.evaluated[-1][1], "loss on the held-out data", number)

    def _line(self, number: int) -> dict[str, Any]:
        line = {
            "step": number,
            "loss": self.losses[-1],
            "seconds": self.seconds[-1],
            "samples": self.engine.samples,
            "resident_bytes": storage_bytes(self.engine.resident()),
        }
        if (rate := self.rate.now()) is not None:
            line["learning_rate"] = rate
        if self.evaluated and self.evaluated[-1][0] == number:
            line["eval_loss"] = self.evaluated[-1][1]
        return line


def looked_at(trace_step: int | None, start: int, steps: int) -> tuple[int, int]:
    """The step whose memory is measured, and the one that is profiled: the step after, where that would be the same.

    Profiled is the last one, where no other is asked for: after the profiler a host may issue kernels a third slower.
    """
    measured = min(start + MEASURED_STEP, steps - 1)
    profiled_step = steps - 1 if trace_step is None else trace_step
    return measured, profiled_step + (profiled_step == measured)


def _python_calls() -> list[Note]:
    """Once blocks are compiled, where a rank of any host has a C++ compiler that failed."""
    everyone = gathered(why_python())
    failed = [rank for rank, why in enumerate(everyone) if why]
    return [{"python_calls": everyone[failed[0]], "failed": len(failed), "ranks": len(everyone)}] if failed else []


# ---- the learning rate of a step, from its number alone: nothing to keep, and a resumed run goes on where it was


def part_of_rate(schedule: Mapping[str, Any], step: int, steps: int) -> float:
    """The part of the optimizer's rate that this step takes.

    It rises evenly over `warm_up` steps, whole with the last of them, then falls to `least` at step `decay_steps`.
    """
    warm_up, least = schedule["warm_up"], schedule["least"]
    if step < warm_up:
        return float((step + 1) / warm_up)
    if schedule["decay"] == "none":
        return 1.0
    until = schedule["decay_steps"] or steps
    gone = min(1.0, (step - warm_up) / (until - warm_up))
    left = 1 - gone if schedule["decay"] == "linear" else (1 + math.cos(math.pi * gone)) / 2
    return float(least + (1 - least) * left)


class Rate:
    """Sets the rates of an optimizer's groups of parameters, each a part of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Mapping[str, Any], steps: int, where: str) -> None:
        self.groups, self.schedule, self.steps = optimizer.param_groups, schedule, steps
        self.moves = schedule["warm_up"] > 0 or schedule["decay"] != "none"
        self.whole = [float(group["lr"]) for group in self.groups if "lr" in group]
        if self.moves and len(self.whole) < len(self.groups):
            what = f"{type(optimizer).__name__} has no learning rate `lr`"
            raise TrainError(what, where=f"{where}: schedule", remedy="leave `schedule` out, or name another optimizer")

    def set(self, step: int) -> None:
        if not self.moves:
            return
        part = part_of_rate(self.schedule, step, self.steps)
        for group, whole in zip(self.groups, self.whole, strict=True):
            if isinstance(group["lr"], Tensor):  # as optimizers that are captured in graphs want it
                group["lr"].fill_(whole * part)
            else:
                group["lr"] = whole * part

    def now(self) -> float | None:
        """Of the first group; an optimizer may have none."""
        return float(self.groups[0]["lr"]) if self.whole else None
