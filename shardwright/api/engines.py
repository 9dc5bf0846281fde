"""The engines of the train stage on objects that the user has: a module, an optimizer, whole batches of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from shardwright.api.given import ArgumentError, Batch, GivenModule, GivenOptimizer
from shardwright.api.gradients import SplitGradients
from shardwright.api.plan import ModelPlan
from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.runtime.context import step as context
from shardwright.pipeline.runtime.pipelining.pipelined import smaller_of
from shardwright.pipeline.runtime.programs.random import seed_apart
from shardwright.pipeline.runtime.step.passes import StepCopies, copies_of
from shardwright.pipeline.runtime.step.slices import Slices
from shardwright.pipeline.user.batches import Batches
from shardwright.pipeline.user.optimizer import build_optimizer
from shardwright.pipeline.user.precision import TYPES, type_of
from shardwright.stages.codegen.run import write_program
from shardwright.stages.train.engines.engine import Engine, Inputs, K, program_of
from shardwright.stages.train.engines.pipelined import PipelinedEngine
from shardwright.stages.train.engines.planned import PlannedEngine
from shardwright.stages.train.engines.tensors import named_tensors, sizes_of
from shardwright.stages.train.job import Job

WHERE = "sw.parallelize"


class StepBatches(Batches):
    """The batches of the step under way, cut as the plan says."""

    def __init__(self, inputs: Inputs, axes: list[str], slices: Slices, step: list[Batch]) -> None:
        self.layouts, self.axes, self.slices, self.step = inputs[1], axes, slices, step

    def __getitem__(self, number: int) -> Batch:
        passed, place = divmod(number, len(self.slices.samples))
        start, size = self.slices.start(place), self.slices.size(place)
        found = {}
        for name in self.layouts:
            rows = self.step[passed][name]
            if len(self.slices.samples) > 1:
                times = len(rows) // self.slices.batch  # rows of a sample: an input may have several
                rows = rows[start * times : (start + size) * times]
            found[name] = self._cut(name, rows, whole=True)
        return found


class OnObjects(Engine):
    """What both engines take from the user's objects in place of a configuration."""

    def __init__(self, plan: ModelPlan, module: nn.Module, optimizer: Optimizer) -> None:
        self.user_module: nn.Module | None = module
        self.user_optimizer = optimizer
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.groups: list[list[str]] = []  # names of the parameters of each group
        self.step_batches: list[Batch] = []
        self.specs: dict[str, Any] = plan.config.plain("model.batch")
        state = torch.get_rng_state()
        super().__init__(job_of(plan, optimizer))  # type: ignore[call-arg]
        torch.set_rng_state(state)
        if self.stream:  # the ranks of a partition draw alike, and not what those of another draw
            torch.manual_seed(seed_apart(torch.initial_seed(), self.stream))
        self.user_module = None  # its weights may go
        self.limited, self.clipping = self.clipping, None  # of no limit yet

    clipping: Any

    def seed(self) -> None:
        """The module is built already."""

    def build_module(self) -> nn.Module:
        assert self.user_module is not None
        return self.user_module

    def placed(self, tensor: Tensor) -> Tensor:
        """What is on the meta device has no values yet: `load_state_dict` brings them."""
        if not tensor.is_meta:
            return super().placed(tensor)
        return torch.empty_like(tensor, device=self.device, dtype=type_of(tensor, self.job["model"]["precision"]))

    def build_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """The user's own, on this rank's shards: its groups stay, and a scheduler that holds it goes on."""
        optimizer = self.user_optimizer
        if optimizer.state:
            what, remedy = "it has taken steps", "give it before its first step, and load its state afterwards"
            raise ArgumentError(what, where=f"{WHERE}: optimizer", remedy=remedy)
        updated = self.updated()
        for group in optimizer.param_groups:
            odd = sum(id(p) not in self.names for p in group["params"])
            if odd:
                what = f"{odd} of its parameters are not of the model"
                raise ArgumentError(what, where=f"{WHERE}: optimizer", remedy="make it of model.parameters()")
            self.groups.append([self.names[id(p)] for p in group["params"]])
        for group, names in zip(optimizer.param_groups, self.groups, strict=True):
            group["params"] = [own for name in names for own in updated.get(name, ())]
        return optimizer

    @abstractmethod
    def updated(self) -> dict[str, list[nn.Parameter]]:
        """What the optimizer updates, by the name of the parameter."""

    def readers(self, of: Mapping[K, Inputs], axes: list[str], slices: Slices | None) -> dict[K, Batches]:
        own = slices or Slices((next(iter(self.specs.values()))["shape"][0],))
        return {key: StepBatches(inputs, axes, own, self.step_batches) for key, inputs in of.items()}

    def take(self, batches: Sequence[Batch]) -> None:
        """The batches of the step that comes."""
        self.step_batches[:] = batches

    @abstractmethod
    def loss_when_evaluating(self) -> float:
        """Of the first batch that was taken."""


class PlannedOnObjects(OnObjects, PlannedEngine):
    """In a loop of the user's own: `forward`, then backward, for each pass of a step; then the optimizer."""

    done = 0  # backward passes of this step that have ended
    newest = 0  # forward passes so far
    unused = False  # whether the gradients before were neither stepped with nor dropped

    def updated(self) -> dict[str, list[nn.Parameter]]:
        return {name: [own] for name, own in zip(self.parameters, self.gradients.updated, strict=True)}

    def forward(self, batch: Batch) -> Tensor:
        """The loss of the whole batch, the same on all ranks; its backward leaves the gradients of the step."""
        self._begin()
        self.take([batch])
        given = self.on_device(self.batch(0))
        last = self.done == self.passes - 1
        if last and self.passes > 1:
            self.gradients.arm()
        with self.autocast():
            loss: Tensor = self.program.forward(**given, **(self.copies.last() if last else self.copies.stand_ins))
        context.settle()  # the user may look at it now
        self.newest += 1
        number = self.newest
        loss.register_hook(lambda _: self._backward_begins(number))
        return loss

    @cached_property
    def split(self) -> SplitGradients:
        sizes = sizes_of(self.axes)
        states = [Layout.parse(self.stored.row(name)[2]).shards(sizes) for name in self.parameters]
        return SplitGradients(zip(self.parameters.values(), self.gradients.updated, states, strict=True))

    def _begin(self) -> None:
        if self.done == self.passes:  # they may be dropped yet: where gradients are infinite a scaler skips the step
            self.done, self.unused = 0, True
        if self.done == 0:
            self.split.unmark()
            self.gradients.start(armed=self.passes == 1)
            with self.autocast():
                self.copies = StepCopies(copies_of(self.program))

    def _backward_begins(self, number: int) -> None:
        if number != self.newest:
            what = "the model has run forward again since this loss was computed"
            raise TrainError(what, where="loss.backward()", remedy="run backward before the next forward pass")
        if self.unused:
            what = f"the {self.passes} backward pass{'es' * (self.passes > 1)} of the plan's step have run"
            remedy = (
                "call optimizer.step(), or zero_grad() to drop them; to add up more plan with gradient_accumulation"
            )
            raise TrainError(what, where="loss.backward()", remedy=remedy)
        self.unused = False
        Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self.done += 1
        if self.done == self.passes:
            self.gradients.wait()
            self.split.mark()

    def drop_gradients(self) -> None:
        """With the optimizer's zero_grad."""
        self.split.unmark()
        self.unused = False
        if self.done == self.passes:
            self.done = 0

    def require_gradients(self) -> None:
        """Before the optimizer steps, and before they are clipped."""
        if self.done != self.passes:
            what = f"{self.done} of the {self.passes} backward passes of the plan's step have run"
            raise TrainError(what, where="optimizer.step()", remedy="run forward and backward for each before it")

    def step(self, first: Batch, later: list[Batch]) -> float:
        """All of it, by `model.step`; gradients of a backward pass before it are dropped."""
        self.drop_gradients()
        return super().step(first, later)

    def before_step(self) -> None:
        self.require_gradients()
        self.split.unmark()

    def publish(self) -> None:
        """After it."""
        self.gradients.publish()
        self.done = 0

    def clip(self, limit: float) -> Tensor:
        assert self.limited is not None
        self.limited.limit = limit
        with torch._C.DisableTorchFunctionSubclass():
            return self.limited.clip()

    def loss_when_evaluating(self) -> float:
        if not hasattr(self, "evaluating"):
            self.evaluating = program_of(self.job, evaluates=True).Program(self.own.tensors)
        self.own.take_first()
        count = len(self._batches.slices.samples)
        losses = [self.loss_of(self.on_device(self.batch(number))) for number in range(count)]
        context.settle()
        return self._batches.slices.mean(losses)


class PipelinedOnObjects(OnObjects, PipelinedEngine):
    def updated(self) -> dict[str, list[nn.Parameter]]:
        found: dict[str, list[nn.Parameter]] = {}
        for partition in self.partitions:
            for name, own in partition.updated.items():
                found.setdefault(name, []).append(own)
        return found

    def loss_when_evaluating(self) -> float:
        if not hasattr(self, "evaluating"):
            program = program_of(self.job, evaluates=True)
            both = program.PARTITIONS, smaller_of(program)
            self.evaluating = [{p.number: own[p.number](p.tensors) for p in self.partitions} for own in both]
        for own in self.own.values():
            own.take_first()
        count = len(self.slices.samples)
        return self.slices.mean(self.loss_of(number, self.batch(number)) for number in range(count))


def job_of(plan: ModelPlan, optimizer: Optimizer) -> Job:
    """As the train stage would write it."""
    settings: dict[str, Any] = {group: plan.config.plain(group) for group in ("model", "data", "train")}
    settings["train"] |= {"optimizer": {"_target_": GivenOptimizer(optimizer)}, "clip_norm": 1.0, "init_from": None}
    job: Any = {
        "module_path": f"<the program of {plan.title}>",
        "program": plan.program,
        "device": plan.decided.device,
        **settings,
        "where": dict.fromkeys(("model", "data", "train", "cluster"), WHERE),
    }
    return job  # type: ignore[no-any-return]


def engine_of(plan: ModelPlan, module: nn.Module, optimizer: Optimizer) -> PlannedOnObjects | PipelinedOnObjects:
    """On this rank, of all that the plan is for; the ranks have met."""
    trial = nn.Parameter(torch.zeros(2, 2))
    build_optimizer({"_target_": GivenOptimizer(optimizer)}, f"{WHERE}: optimizer", [trial])  # one that can step
    require_same_model(plan, module)
    require_own_program(plan, module, WHERE)
    kind = PipelinedOnObjects if plan.decided.pipelined else PlannedOnObjects
    return kind(plan, module, optimizer)


def require_own_program(plan: ModelPlan, module: nn.Module, where: str) -> None:
    """A program that came in a file is run only if it is the one that the plan gives: a saved plan holds no code."""
    if plan.model is not None:
        return
    config = replace(plan.config, model=replace(plan.config.model, module={"_target_": GivenModule(module)}))
    text, _ = write_program(plan.graph, plan.decided, config, plan.made["plan"].digest)
    if text != plan.program:
        what, remedy = "its program is not the one that its plan gives", "plan again, with this version of Shardwright"
        raise ArgumentError(what, where=f"{where}: plan", remedy=remedy)


def require_same_model(plan: ModelPlan, module: nn.Module) -> None:
    """Its class, and of what is trained names, shapes and types; and values for all of it, now or later."""
    name, planned = type(module).__name__, plan.config.choices["model"]
    if name != planned:
        what = f"it is a {name}, and the plan is for a {planned}"
        raise ArgumentError(what, where=f"{WHERE}: model", remedy="give the model that was planned, or plan again")
    own = {name: _in_words(t, tuple(t.shape)) for name, t in named_tensors(module).items()}
    converted = plan.config.model.precision in TYPES
    for value in plan.graph.of_role(Role.PARAMETER):
        found, wanted = own.get(value.origin, "not there"), _in_words(value.type, value.type.shape)
        if found != wanted and not (converted and found.split()[1:] == wanted.split()[1:]):
            what = f"{value.origin} is {found}, and {wanted} in the plan"
            raise ArgumentError(what, where=f"{WHERE}: model", remedy="give the model that was planned, or plan again")
    for name, buffer in module.named_buffers():
        if buffer.is_meta and name not in module.state_dict():
            what = f"the buffer {name} is on the meta device, and no state dict has its values"
            raise ArgumentError(what, where=f"{WHERE}: model", remedy="build the model with real buffers")


def _in_words(of: Any, shape: tuple[int, ...]) -> str:
    return f"{str(of.dtype).removeprefix('torch.')} {list(shape)}"
