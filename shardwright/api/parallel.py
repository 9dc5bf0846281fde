"""`parallelize`: a plan's program in the place of the user's module, in a training loop of the user's own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from shardwright.api.engines import WHERE, PipelinedOnObjects, PlannedOnObjects, engine_of
from shardwright.api.given import ArgumentError, Batch, arguments_of, batch_of
from shardwright.api.plan import ModelPlan
from shardwright.api.state import OptimizerState, WeightState
from shardwright.pipeline.base.errors import TrainError
from shardwright.stages.train.ranks.joining import GLOO, NCCL, gathered, gpu_of, require_gpu


def parallelize(module: nn.Module, optimizer: Optimizer, plan: ModelPlan) -> tuple[ParallelModule, Optimizer]:
    """The module and its optimizer as the plan splits them, on this rank: a training loop goes on as it was.

    Every rank calls it with the same weights (or with a module on the meta device, and `load_state_dict` after it), and
    gives each step the whole batch, of which a rank takes its part. The optimizer is the user's own with this rank's
    shards in its groups. Under torchrun the ranks meet here, unless they have met already. One module for each process.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"got a {type(module).__name__}, expected a torch.nn.Module", where=f"{WHERE}: model")
    if not isinstance(optimizer, Optimizer):
        what = f"got a {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        raise ArgumentError(what, where=f"{WHERE}: optimizer")
    if not isinstance(plan, ModelPlan):
        what, remedy = f"got a {type(plan).__name__}", "give what sw.plan or sw.load returned"
        raise ArgumentError(what, where=f"{WHERE}: plan", remedy=remedy)
    meet(plan)
    return ParallelModule(engine_of(plan, module, optimizer), arguments_of(module), plan), optimizer


def meet(plan: ModelPlan) -> None:
    """The ranks of this run, which must be those of the plan, and have the same one."""
    device = plan.decided.device
    if device == "cuda":
        require_gpu(f"{WHERE}: plan")
        torch.cuda.set_device(gpu_of(os.environ, torch.cuda.device_count()))
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != plan.ranks:
        what = f"the plan is for {plan.ranks} devices, and {ranks} rank{'s run' if ranks > 1 else ' runs'}"
        remedy = f"start it with `torchrun --nproc-per-node={plan.ranks}`, or plan for {ranks}"
        raise ArgumentError(what, where=f"{WHERE}: plan", remedy=remedy)
    if not dist.is_initialized():
        alone = "RANK" not in os.environ
        known = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
        shared = device == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
        dist.init_process_group(NCCL if device == "cuda" and not shared else GLOO, **known)
    digests = gathered(plan.digest)
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        what = f"rank {other} and rank 0 have different plans"
        remedy = "plan once, save it, and let all ranks load that file"
        raise ArgumentError(what, where=f"{WHERE}: plan", remedy=remedy)


class ParallelModule(nn.Module):
    """A module whose forward pass is the plan's program; its state dict is that of the unsplit module.

    `parameters()` are this rank's shards. In training mode one forward and backward pass, or as many as the plan has in
    a step, come before `optimizer.step()`; in `eval()` mode the module evaluates, without gradients.
    """

    def __init__(self, engine: PlannedOnObjects | PipelinedOnObjects, arguments: list[str], plan: ModelPlan) -> None:
        super().__init__()
        self.engine, self.plan = engine, plan
        self.arguments = arguments  # of the user's forward
        self.stepping = False  # `step` does what hooks of the optimizer do in a loop
        optimizer = engine.optimizer
        self.weights, self.optimizer_state = WeightState(engine), OptimizerState(engine, self)
        optimizer.register_step_pre_hook(lambda _, given, named: self._before_step(*given, **named))
        optimizer.register_step_post_hook(lambda *_: self._after_step())
        self.zero_optimizer = optimizer.zero_grad
        optimizer.zero_grad = self._zero_optimizer  # type: ignore[method-assign]
        optimizer.state_dict = self.optimizer_state.state_dict  # type: ignore[method-assign]
        optimizer.load_state_dict = self.optimizer_state.load_state_dict  # type: ignore[method-assign]

    # ---- a loop of the user's own

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """The loss of the whole batch, which every rank is given."""
        batch = self._batch({**batch_of(self.arguments, args), **named} if args else named)
        if not self.training or not torch.is_grad_enabled():
            return self._evaluate(batch)
        if isinstance(self.engine, PipelinedOnObjects) or len(self.plan.decided.slices) > 1:
            what = "a pipeline" if isinstance(self.engine, PipelinedOnObjects) else "cut into micro-batches"
            remedy = "replace forward, backward and optimizer.step() by `loss = model.step(batch, optimizer)`"
            what = f"a step of this plan is {what}: it has no single forward pass"
            raise TrainError(what, where="model(...)", remedy=remedy)
        return self.engine.forward(batch)

    def _evaluate(self, batch: Batch) -> Tensor:
        self.engine.take([batch])
        graph = self.plan.graph
        dtype = getattr(torch, graph.values[graph.output].type.dtype)
        with torch.no_grad():
            return torch.tensor(self.engine.loss_when_evaluating(), dtype=dtype, device=self.engine.device)

    def step(self, batch: Any, optimizer: Optimizer, *, clip_norm: float | None = None) -> float:
        """A whole step of any plan: forward and backward passes, clipping, the optimizer. The loss of the whole batch.

        `batch` is one batch, or a list of as many as the plan's `gradient_accumulation`; the step is that of their mean
        loss. `clip_norm` is the largest norm of all gradients together.
        """
        engine = self.engine
        if optimizer is not engine.optimizer:
            raise ArgumentError("it is not the one that parallelize returned", where="model.step: optimizer")
        batches = [self._batch(one) for one in (batch if self._several(batch) else [batch])]
        count = engine.passes // max(1, len(self.plan.decided.slices))
        if len(batches) != count:
            what = f"got {len(batches)}, and a step of the plan has {count}"
            raise ArgumentError(what, where="model.step: batch", remedy="give a list of so many batches")
        engine.take(batches)
        first, *later = engine.batches(0)
        engine.clipping = engine.limited if clip_norm is not None else None
        if engine.clipping is not None:
            engine.clipping.limit = clip_norm
        self.stepping = True
        try:
            return engine.step(engine.on_device(first), later)
        finally:
            self.stepping, engine.clipping = False, None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """After backward and before the optimizer, in place of `torch.nn.utils.clip_grad_norm_`: over all shards."""
        if isinstance(self.engine, PipelinedOnObjects):
            remedy = "give model.step(..., clip_norm=...)"
            raise TrainError("a pipeline clips within its step", where="clip_grad_norm_", remedy=remedy)
        self.engine.require_gradients()
        return self.engine.clip(max_norm)

    def _zero_optimizer(self, set_to_none: bool = True) -> None:
        self.zero_optimizer(set_to_none)
        if isinstance(self.engine, PlannedOnObjects):
            self.engine.drop_gradients()

    def _before_step(self, _: Optimizer, closure: Any = None, *more: Any, **named: Any) -> None:
        if callable(closure):
            what, remedy = "it takes no closure here", "run forward and backward before it, and call it without"
            raise TrainError(what, where="optimizer.step(closure)", remedy=remedy)
        if not self.stepping and isinstance(self.engine, PlannedOnObjects):
            self.engine.before_step()
        elif not self.stepping:
            what, remedy = "a pipeline steps as a whole", "call model.step(batch, optimizer)"
            raise TrainError(what, where="optimizer.step()", remedy=remedy)

    def _after_step(self) -> None:
        if not self.stepping and isinstance(self.engine, PlannedOnObjects):
            self.engine.publish()

    # ---- batches

    def _several(self, batch: Any) -> bool:
        """A list of batches, and not the tensors of one by position."""
        return isinstance(batch, Sequence) and not isinstance(batch[0] if batch else None, Tensor)

    def _batch(self, given: Any) -> Batch:
        """Of the names, sizes and types that the plan is for."""
        batch, specs = batch_of(self.arguments, given), self.engine.specs
        if odd := batch.keys() ^ specs.keys():
            what = f"{', '.join(sorted(odd))}: in the plan's batch or in this one alone"
            raise ArgumentError(what, where="batch", remedy=f"give {', '.join(specs)}")
        for name, tensor in batch.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            found, wanted = f"{dtype} {list(tensor.shape)}", f"{specs[name]['dtype']} {specs[name]['shape']}"
            if found != wanted:
                remedy = "give whole batches (drop_last=True), or plan for such"
                raise ArgumentError(f"{name} is {found}, and the plan is for {wanted}", where="batch", remedy=remedy)
        return batch

    # ---- as a module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, by the names of the unsplit module."""
        start = f"{prefix}." if prefix else ""
        parameters = set(self.engine.names.values())
        for name, own in self.weights.tensors().items():
            if name in parameters:  # the engine has frozen ones as plain tensors
                yield f"{start}{name}", own if isinstance(own, nn.Parameter) else nn.Parameter(own, requires_grad=False)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        start = f"{prefix}." if prefix else ""
        parameters = set(self.engine.names.values())
        yield from ((f"{start}{n}", t) for n, t in self.weights.tensors().items() if n not in parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.optimizer.zero_grad(set_to_none)

    def state_dict(self, *args: Any, gathered: bool = False, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        """By the names of the unsplit module, for torch.distributed.checkpoint: tensors, and `SplitTensor` where split.

        `gathered`: whole tensors on the CPU, on rank 0 alone; other ranks take part and have none.
        """
        prefix = named.get("prefix", "")
        found = self.weights.gathered() if gathered else self.weights.entries()
        return {f"{prefix}{name}": tensor for name, tensor in found.items()}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """What `state_dict` gave on any number of ranks, or whole tensors, as the unsplit module's state dict has."""
        return _IncompatibleKeys(*self.weights.load(state_dict, strict))

    def extra_repr(self) -> str:
        return self.plan.title
