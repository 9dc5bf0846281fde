"""The plan's program on this rank's shards of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.runtime.compiler.compiled import use_kernels_of
from shardwright.pipeline.runtime.programs.mesh import set_mesh
from shardwright.pipeline.runtime.step.cuda_graphs import GraphedPasses, NotCaptured
from shardwright.pipeline.runtime.step.gradients import Clipping, Gradients
from shardwright.pipeline.runtime.step.passes import run_passes
from shardwright.pipeline.runtime.step.running_stats import statistics_of
from shardwright.pipeline.runtime.step.slices import Slices
from shardwright.pipeline.user.weights import Shape
from shardwright.stages.train.data import held_out_batches
from shardwright.stages.train.engines.engine import Batch, Engine, StateShard, program_of, unchanged
from shardwright.stages.train.engines.tensors import OwnTensors, StoredRows, refuse_optimizer
from shardwright.stages.train.job import Job
from shardwright.stages.train.ranks.watchdog import Beat, unwatched


class PlannedEngine(Engine):
    def __init__(self, job: Job) -> None:
        program = program_of(job)
        captures = getattr(program, "CUDA_GRAPHS", False)
        if captures:
            torch.cuda.set_stream(torch.cuda.Stream())
        super().__init__(job, program.DEVICE, program.MICRO_BATCHES)
        set_mesh(program.MESH)
        use_kernels_of(program)
        self.axes = list(program.MESH)
        self.stored = StoredRows.of(program, program.PARAMETERS, self.axes)
        self.own = OwnTensors(self, self.stored)
        self.held_whole = self.own.held_whole
        self.parameters = {name: t for name, t in self.own.tensors.items() if isinstance(t, nn.Parameter)}
        self.program = program.Program(self.own.tensors)
        self.statistics = statistics_of(job["train"]["running_stats"], self.own.tensors.items())
        rows = [self.stored.row(name) for name in self.parameters]
        self.gradients = Gradients(self.parameters.values(), rows, self.axes)
        limit = job["train"]["clip_norm"]
        self.clipping = Clipping(self.gradients.updated, rows, self.axes, limit) if limit is not None else None
        refuse_optimizer(self, [(self.stored, name, self.own.shapes[name]) for name in self.parameters])
        self.optimizer = self.build_optimizer(list(self.gradients.updated))
        layouts = {name: Layout.parse(text) for name, text in program.INPUTS.items()}
        slices = Slices(program.SLICES) if hasattr(program, "SLICES") else None
        self._batches = self.readers({"": (job, layouts)}, self.axes, slices)[""]
        self.samples = self._batches.slices.start(self.passes)
        if job["train"]["evaluate"]["every"]:
            self.evaluating = program_of(job, evaluates=True).Program(self.own.tensors)
            self.held_out = held_out_batches(job, layouts, self.axes, slices)
        self.graphed = GraphedPasses(self._run_passes, self.device) if captures else None

    def step(self, first: Batch, later: list[Batch]) -> float:
        """But for the first, each batch goes to the device when its turn comes."""
        losses = self._losses(chain([first], map(self.on_device, later)))
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
            what = f"the step cannot be captured as a CUDA graph: {self.not_captured}"
            raise TrainError(what, where=self.where("model", "cuda_graphs"), remedy="set it to auto or false")
        return self._run_passes(given)

    def _run_passes(self, batches: Iterable[Mapping[str, Tensor]]) -> list[Tensor]:
        with self.statistics():
            return run_passes(self.program, self.gradients, batches, self.passes, self.autocast)

    def evaluate(self, beat: Beat = unwatched) -> float:
        if self.graphed is not None:
            self.graphed.release()  # its memory is needed now
        self.own.take_first()
        return self.mean_loss(self.loss_of, beat)

    def loss_of(self, batch: Batch) -> float:
        program = self.evaluating
        with torch.no_grad(), self.autocast(), unchanged(self.own.tensors.values()):
            copies = program.copies() if hasattr(program, "copies") else {}
            return float(program.forward(**batch, **copies))

    def tensors(self) -> Iterable[Tensor]:
        return [*self.own.tensors.values(), *self.gradients.buffers()]

    def state(self) -> Iterator[StateShard]:
        updated = dict(zip(self.parameters, self.gradients.updated, strict=True))
        return self.own.shards(self, updated, self.own.tensors)

    def exported(self) -> tuple[dict[str, str], dict[str, tuple[torch.dtype, Shape]]]:
        return self.own.state, {name: (t.dtype, self.own.shapes[name]) for name, t in self.own.tensors.items()}

    def whole(self, name: str) -> Tensor:
        return self.own.whole(name)
