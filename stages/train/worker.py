"""One rank of the training run: `python -m stages.train.worker WORK` under torchrun."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.errors import ShardwrightError, TrainError
from pipeline.instantiate import instantiate
from pipeline.ir.layout import Layout
from pipeline.launch import follow_parent, report_error
from pipeline.optimizer import build_optimizer
from pipeline.runtime.batches import Batches
from pipeline.runtime.clipping import Clipping
from pipeline.runtime.gradients import Gradients
from pipeline.runtime.memory import measure_peak, storage_bytes
from pipeline.runtime.mesh import set_mesh
from pipeline.runtime.passes import run_passes
from pipeline.runtime.source import load_program
from stages.train.tensors import OwnTensors, Stored

Batch = dict[str, Tensor]  # of one micro-batch
MEASURED_STEP = 1  # memory is measured on the second step: by then the optimizer state exists


def main(work: Path) -> None:
    follow_parent()
    job = json.loads((work / "job.json").read_text())
    dist.init_process_group("gloo", timeout=timedelta(seconds=job["train"]["timeout_s"]))
    rank = dist.get_rank()
    try:
        trainer = Trainer(job, work)
        result = trainer.train()
        if job["train"]["export"]:
            trainer.own.export(Path(job["weights_path"]))
        if rank == 0:
            (work / "result.json").write_text(json.dumps(result))
        dist.barrier()
    except ShardwrightError as error:
        report_error(work, rank, error.line())
        raise SystemExit(1) from None
    except Exception as error:  # the user's model and data run here; the traceback stays in the log
        report_error(work, rank, f"{type(error).__name__}: {error}")
        raise
    finally:
        dist.destroy_process_group()


class Trainer:
    def __init__(self, job: dict[str, Any], work: Path) -> None:
        self.job, self.work = job, work
        program = load_program(job["module_path"])
        set_mesh(program.MESH)
        self.device = program.DEVICE
        self.axes = list(program.MESH)
        self.micro_batches: int = program.MICRO_BATCHES
        self.precision: str = job["model"]["precision"]
        stored = Stored(program.PARAMETERS, self.axes)
        self.own = self._own_tensors(stored)
        self.tensors = self.own.tensors
        self.parameters = {name: t for name, t in self.tensors.items() if isinstance(t, nn.Parameter)}
        self.program = program.Program(self.tensors)
        rows = [stored.row(name) for name in self.parameters]
        self.gradients = Gradients(self.parameters.values(), rows, self.axes)
        limit = job["train"]["clip_norm"]
        self.clipping = Clipping(self.gradients.updated, rows, self.axes, limit) if limit is not None else None
        where = f"{job['where']['train']}: optimizer"
        self.optimizer = build_optimizer(job["train"]["optimizer"], where, list(self.gradients.updated))
        layouts = {name: Layout.parse(text) for name, text in program.INPUTS.items()}
        dataset = instantiate(job["data"]["dataset"], f"{job['where']['data']}: dataset")
        self.batches = Batches(dataset, job, layouts, self.axes)

    def _own_tensors(self, stored: Stored) -> OwnTensors:
        torch.manual_seed(self.job["train"]["seed"])
        where = f"{self.job['where']['train']}: init_from"
        return OwnTensors(self._build, stored, self._in_precision, self.job["train"]["init_from"], where)

    def _build(self) -> nn.Module:
        model: nn.Module = instantiate(self.job["model"]["module"], f"{self.job['where']['model']}: module")
        return model.train()

    def _on_device(self, batch: Batch) -> Batch:
        return {name: self._in_precision(tensor) for name, tensor in batch.items()}

    def _in_precision(self, tensor: Tensor) -> Tensor:
        """On the device; floating numbers in bfloat16 where that is what is trained in."""
        half = self.precision == "bf16" and tensor.is_floating_point()
        return tensor.to(self.device, torch.bfloat16 if half else None)

    def train(self) -> dict[str, Any]:
        losses: list[float] = []
        seconds: list[float] = []
        peak = 0
        steps = self.job["train"]["steps"]
        notes = self.work / "steps.jsonl" if dist.get_rank() == 0 else os.devnull  # a late rank must not empty the file
        with open(notes, "w", buffering=1) as log:
            for number in range(steps):
                batches = [self.batches[number * self.micro_batches + n] for n in range(self.micro_batches)]
                first, later = self._on_device(batches[0]), batches[1:]
                if number == min(MEASURED_STEP, steps - 1):
                    peak = self._measure(first, later, losses, seconds)
                else:
                    self._timed_step(first, later, losses, seconds)
                if not math.isfinite(losses[-1]):
                    raise TrainError(f"the loss became {losses[-1]} at step {number}", remedy="lower the learning rate")
                if dist.get_rank() == 0:
                    line = {
                        "step": number,
                        "loss": losses[-1],
                        "seconds": seconds[-1],
                        "samples": self._samples,
                        "resident_bytes": self._resident(),
                    }
                    log.write(json.dumps(line) + "\n")
        return {
            "ranks": dist.get_world_size(),
            "losses": losses,
            "seconds": seconds,
            "samples": self._samples,
            "peak_bytes": self._gather(peak),
            "held_whole": self.own.whole,
        }

    @property
    def _samples(self) -> int:
        """Of a step."""
        return self.batches.size * self.micro_batches

    def _measure(self, first: Batch, later: list[Batch], losses: list[float], seconds: list[float]) -> int:
        """A step under the memory profiler; its time does not count as a step's."""
        held = (tensor for tensor in [*self._held(), *first.values()])  # lets go of old gradients once it is read
        return measure_peak(lambda: self._timed_step(first, later, losses, seconds), held, self.device)

    def _timed_step(self, first: Batch, later: list[Batch], losses: list[float], seconds: list[float]) -> None:
        start = time.perf_counter()
        losses.append(self._step(first, later))
        seconds.append(time.perf_counter() - start)

    def _step(self, first: Batch, later: list[Batch]) -> float:
        """The mean loss of the micro-batches; but for the first, each goes to the device when its turn comes."""
        batches = chain([first], map(self._on_device, later))
        losses = run_passes(self.program, self.gradients, batches, self.micro_batches, self._autocast)
        if self.clipping is not None:
            self.clipping.clip()
        self.optimizer.step()
        self.gradients.publish()
        return sum(map(float, losses)) / len(losses)

    def _autocast(self) -> torch.autocast:
        """Without its cache, which would hold cast weights of recomputed regions until the end of the forward pass."""
        amp = self.precision == "amp"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=amp, cache_enabled=False)

    def _held(self) -> list[Tensor]:
        """Parameters, gradients and optimizer state: what stays between steps."""
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return [*self.tensors.values(), *gradients, *self.gradients.buffers(), *state]

    def _resident(self) -> int:
        return storage_bytes(self._held())

    def _gather(self, number: int) -> list[int]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, number)
        return [int(n) for n in everyone]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
