"""The steps of a run, whatever takes them: timed, measured, written down one by one."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from pipeline.errors import TrainError
from pipeline.ir.report import Breakdown
from pipeline.runtime.memory import measure_peak, storage_bytes
from stages.train.breakdown import mean_of, profiled
from stages.train.engine import Batch, Engine, Job
from stages.train.prefetch import Prefetched
from stages.train.schedule import Rate

MEASURED_STEP = 1  # memory is measured on the second step: by then the optimizer state exists
PROFILED_STEP = 2  # where `trace_step` names no other; still one of the steps that warm up

T = TypeVar("T")


class Loop:
    def __init__(self, engine: Engine, job: Job, work: Path) -> None:
        self.engine, self.job, self.work = engine, job, work
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.evaluated: list[tuple[int, float]] = []  # step, loss on the held-out data after it
        self.peak = 0
        self.breakdown: Breakdown | None = None
        settings = job["train"]
        self.profiled_step: int = PROFILED_STEP if settings["trace_step"] is None else settings["trace_step"]
        self.rate = Rate(engine.optimizer, settings["schedule"], settings["steps"], job["where"]["train"])
        self.batches = Prefetched(engine.batches, settings["steps"])

    def run(self) -> dict[str, Any]:
        steps = self.job["train"]["steps"]
        notes = self.work / "steps.jsonl" if dist.get_rank() == 0 else os.devnull  # a late rank must not empty the file
        with open(notes, "w", buffering=1) as log:
            for number in range(steps):
                self._take(number, measured=number == min(MEASURED_STEP, steps - 1))
                self._evaluate(number)
                if dist.get_rank() == 0:
                    log.write(json.dumps(self._line(number)) + "\n")
        self.batches.close()
        return {
            "ranks": dist.get_world_size(),
            "losses": self.losses,
            "evaluated": self.evaluated,
            "seconds": self.seconds,
            "samples": self.engine.samples,
            "peak_bytes": _gathered(self.peak),
            "held_whole": self.engine.held_whole,
            "profiled_step": self.profiled_step,
            "breakdown": self._breakdown(),
        }

    def _take(self, number: int, measured: bool) -> None:
        self.rate.set(number)
        first, *later = self.batches[number]
        first = self.engine.on_device(first)
        if measured:
            held = (tensor for tensor in [*self.engine.resident(), *first.values()])  # lets go of old gradients
            self.peak = measure_peak(lambda: self._timed(first, later), held, self.engine.device)
        elif number == self.profiled_step:
            self.breakdown = profiled(lambda: self._timed(first, later), self.engine.device, self._trace())
        else:
            self._timed(first, later)
        self._check(self.losses[-1], "loss", number)

    def _check(self, loss: float, what: str, number: int) -> None:
        if not math.isfinite(loss):
            raise TrainError(f"the {what} became {loss} at step {number}", remedy="lower the learning rate")

    def _timed(self, first: Batch, later: list[Batch]) -> None:
        start = time.perf_counter()
        self.losses.append(self.engine.step(first, later))
        self.seconds.append(time.perf_counter() - start)

    def _trace(self) -> Path | None:
        asked = self.job["train"]["trace_step"] is not None and dist.get_rank() == 0
        return Path(self.job["trace_path"]) if asked else None

    def _breakdown(self) -> dict[str, float] | None:
        if self.breakdown is None:
            return None
        return asdict(mean_of(_gathered(self.breakdown)))

    def _evaluate(self, number: int) -> None:
        """After every so many steps, and after the last."""
        every, done = self.job["train"]["evaluate"]["every"], number + 1
        if every and (done % every == 0 or done == self.job["train"]["steps"]):
            self.evaluated.append((number, self.engine.evaluate()))
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


def _gathered(own: T) -> list[T]:
    """Of all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone
