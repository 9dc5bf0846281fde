"""The plan's program on this rank's pieces of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.base.errors import TrainError
from pipeline.base.instantiate import instantiate
from pipeline.ir.layout import Layout
from pipeline.runtime.compiler.compiled import use_kernels_of
from pipeline.runtime.programs.mesh import set_mesh
from pipeline.runtime.step.cuda_graphs import GraphedPasses, NotCaptured
from pipeline.runtime.step.gradients import Clipping, Gradients
from pipeline.runtime.step.passes import run_passes
from pipeline.runtime.step.running_stats import statistics_of
from pipeline.runtime.step.slices import Slices
from pipeline.user.batches import Batches
from pipeline.user.optimizer import build_optimizer, refuse_mixing, refuse_moving_zeros
from stages.train.engines.engine import Batch, Held, Job
from stages.train.engines.precision import Precision
from stages.train.engines.program import program_of
from stages.train.engines.tensors import OwnTensors, Stored
from stages.train.held_out import HeldOut, held_out_batches
from stages.train.ranks.watchdog import Beat, unwatched
from stages.train.snapshots.optimizer_state import optimizer_state


class Planned:
    def __init__(self, job: Job) -> None:
        self.job = job
        program = program_of(job)
        if getattr(program, "CUDA_GRAPHS", False):
            torch.cuda.set_stream(torch.cuda.Stream())
        set_mesh(program.MESH)
        use_kernels_of(program)
        self.device: torch.device = program.DEVICE
        self.axes = list(program.MESH)
        self.passes: int = program.MICRO_BATCHES
        self.precision = Precision(self.device, job["model"]["precision"])
        self.stored = Stored(program.PARAMETERS, self.axes)
        self.own = self._own_tensors()
        self.held_whole, self.stream = self.own.held_whole, 0
        self.parameters = {name: t for name, t in self.own.tensors.items() if isinstance(t, nn.Parameter)}
        self.program = program.Program(self.own.tensors)
        self.statistics = statistics_of(job["train"]["batch_norm"], self.own.tensors.items())
        rows = [self.stored.row(name) for name in self.parameters]
        self.gradients = Gradients(self.parameters.values(), rows, self.axes)
        limit = job["train"]["clip_norm"]
        self.clipping = Clipping(self.gradients.updated, rows, self.axes, limit) if limit is not None else None
        where = f"{job['where']['train']}: optimizer"
        if split := next((name for name in self.parameters if self.stored.splits_state(name)), None):
            refuse_mixing(job["train"]["optimizer"], where, split, self.device.type)
        if padded := next((n for n in self.parameters if self.stored.pads(n, self.own.shapes[n])), None):
            refuse_moving_zeros(job["train"]["optimizer"], where, padded, self.device.type)
        self.optimizer = build_optimizer(job["train"]["optimizer"], where, list(self.gradients.updated))
        layouts = {name: Layout.parse(text) for name, text in program.INPUTS.items()}
        dataset = instantiate(job["data"]["dataset"], f"{job['where']['data']}: dataset")
        self.slices = Slices(program.SLICES) if hasattr(program, "SLICES") else None
        self._batches = Batches(dataset, job, layouts, self.axes, slices=self.slices)
        self.samples = self._batches.slices.start(self.passes)
        self.held_out = self._held_out(layouts) if job["train"]["evaluate"]["every"] else None
        self.not_captured = ""
        captures = getattr(program, "CUDA_GRAPHS", False)
        self.graphed = GraphedPasses(self._run_passes, self.device) if captures else None

    def _held_out(self, layouts: dict[str, Layout]) -> HeldOut:
        """The data to evaluate on, with the program as the model is then."""
        program = program_of(self.job, evaluates=True).Program(self.own.tensors)
        return HeldOut(held_out_batches(self.job, layouts, self.axes, self.slices), partial(self._loss_of, program))

    def _own_tensors(self) -> OwnTensors:
        torch.manual_seed(self.job["train"]["seed"])
        where = f"{self.job['where']['train']}: init_from"
        return OwnTensors(self._build, self.stored, self.precision.tensor, self.job["train"]["init_from"], where)

    def _build(self) -> nn.Module:
        model: nn.Module = instantiate(self.job["model"]["module"], f"{self.job['where']['model']}: module")
        return model.train()

    def batches(self, step: int) -> list[Batch]:
        return [self._batches[step * self.passes + n] for n in range(self.passes)]

    def on_device(self, batch: Batch) -> Batch:
        return self.precision.batch(batch)

    def step(self, first: Batch, later: list[Batch]) -> float:
        """But for the first, each batch goes to the device when its turn comes."""
        batches = chain([first], map(self.on_device, later))
        losses = self._losses(batches)
        if self.clipping is not None:
            self.clipping.clip()
        if self.graphed is None:
            self.optimizer.step()
        else:
            self.graphed.step(self.optimizer)
        self.gradients.publish()
        return sum(map(float, losses)) / len(losses)

    def _losses(self, batches: Iterable[Batch]) -> list[Tensor]:
        if self.graphed is None:
            return self._run_passes(batches)
        given = list(batches)
        try:
            return self.graphed(given)
        except NotCaptured as why:
            self.graphed, self.not_captured = None, str(why)
        if self.job["model"]["cuda_graphs"] is True:
            raise TrainError(
                f"the step cannot be captured as a CUDA graph: {self.not_captured}",
                where=f"{self.job['where']['model']}: cuda_graphs",
                remedy="set it to auto or false",
            )
        return self._run_passes(given)

    def _run_passes(self, batches: Iterable[Mapping[str, Tensor]]) -> list[Tensor]:
        with self.statistics():
            return run_passes(self.program, self.gradients, batches, self.passes, self.precision.autocast)

    def evaluate(self, beat: Beat = unwatched) -> float:
        assert self.held_out is not None, "evaluate.every is 0"
        if self.graphed is not None:
            self.graphed.release()  # its memory is needed now
        return self.held_out.mean_loss(self.on_device, beat)

    def _loss_of(self, program: Any, batch: Batch) -> float:
        buffers = {name: t for name, t in self.own.tensors.items() if not isinstance(t, nn.Parameter)}
        kept = {name: t.clone() for name, t in buffers.items()}
        with torch.no_grad(), self.precision.autocast():
            copies = program.copies() if hasattr(program, "copies") else {}
            found = float(program.forward(**batch, **copies))
            for name, tensor in kept.items():
                buffers[name].copy_(tensor)
        return found

    def resident(self) -> list[Tensor]:
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return [*self.own.tensors.values(), *gradients, *self.gradients.buffers(), *state]

    def state(self) -> Iterator[Held]:
        axes = tuple(self.axes)
        for name, tensor in self.own.tensors.items():
            layout = self.stored.layout(name, tensor)
            yield Held(f"weights/{name}", tensor.detach(), self.own.shapes[name], layout, axes)
        for name, updated in zip(self.parameters, self.gradients.updated, strict=True):
            about = name, self.own.shapes[name], Layout.parse(self.stored.row(name)[2])
            yield from optimizer_state(self.optimizer, updated, about, axes, self.job["where"]["train"])

    def restored(self) -> None:
        """Nothing is held twice."""

    def export(self, path: Path, beat: Beat = unwatched) -> None:
        self.own.export(path, beat)
