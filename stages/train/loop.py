"""The steps of a run, whatever takes them: timed, measured, written down one by one."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.errors import TrainError
from pipeline.runtime.memory import measure_peak, storage_bytes
from stages.train.engine import Batch, Engine, Job
from stages.train.safety import Note, Safety
from stages.train.snapshots import About

MEASURED_STEP = 1  # memory is measured on the second step taken here: by then the optimizer state exists


class Loop:
    def __init__(self, engine: Engine, job: Job, work: Path) -> None:
        self.engine, self.job, self.work = engine, job, work
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peaks: list[int] = []  # of each rank
        self.safety = Safety(engine, job, work)

    def run(self) -> dict[str, Any]:
        steps = self.job["train"]["steps"]
        start = self._resume(steps)
        for number in range(start, steps):
            self._take(number, measured=number == min(start + MEASURED_STEP, steps - 1))
            self._write([self._line(number)])
            self._write(self.safety.after(number + 1, self._numbers))
        self._write(self.safety.end())
        return {
            "ranks": dist.get_world_size(),
            "losses": self.losses,
            "seconds": self.seconds,
            "samples": self.engine.samples,
            "peak_bytes": self.peaks,
            "held_whole": self.engine.held_whole,
        }

    def _resume(self, steps: int) -> int:
        """The first step to take; times and memory are kept where they are those of this plan, or none will follow."""
        about, notes = self.safety.resume()
        self._write(notes)
        if not about:
            return 0
        self.losses = about["losses"]
        if self.safety.same_plan(about) or about["step"] >= steps:
            self.seconds, self.peaks = about["seconds"], about["peak_bytes"]
        return int(about["step"])

    def _numbers(self) -> About:
        return {"losses": self.losses.copy(), "seconds": self.seconds.copy(), "peak_bytes": self.peaks}

    def _write(self, lines: list[Note]) -> None:
        """Ranks that are started again go on in the same file."""
        if dist.get_rank() == 0:
            with open(self.work / "steps.jsonl", "a") as log:
                log.writelines(json.dumps(line) + "\n" for line in lines)

    def _take(self, number: int, measured: bool) -> None:
        first, *later = self.engine.batches(number)
        first = self.engine.on_device(first)
        if measured:
            held = (tensor for tensor in [*self.engine.resident(), *first.values()])  # lets go of old gradients
            self.peaks = _gathered(measure_peak(lambda: self._timed(first, later), held, self.engine.device))
        else:
            self._timed(first, later)
        if not math.isfinite(self.losses[-1]):
            self._write(self.safety.end())
            what = f"the loss became {self.losses[-1]} at step {number}"
            raise TrainError(what, remedy=self.safety.advice("lower the learning rate"))

    def _timed(self, first: Batch, later: list[Batch]) -> None:
        start = time.perf_counter()
        self.losses.append(self.engine.step(first, later))
        self.seconds.append(time.perf_counter() - start)

    def _line(self, number: int) -> dict[str, Any]:
        return {
            "step": number,
            "loss": self.losses[-1],
            "seconds": self.seconds[-1],
            "samples": self.engine.samples,
            "resident_bytes": storage_bytes(self.engine.resident()),
        }


def _gathered(number: int) -> list[int]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, number)
    return [int(n) for n in everyone]
