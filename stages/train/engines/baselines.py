"""What users have today, to hold the plan against: the user's own unsplit module under plain PyTorch.

| engine | the module                                                      | on                  |
|--------|-----------------------------------------------------------------|---------------------|
| single | as it is                                                        | one rank            |
| ddp    | `DistributedDataParallel`                                       | the plan's devices  |
| fsdp2  | `fully_shard` of each numbered block, then of what is left      | the plan's devices  |

Ranks split the batch. A rank's loss is the mean over its part, and so are gradients: where parts count differently, as
with an `ignore_index`, the mean of these means is not that of the whole batch. That is how these tools are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.ir.layout import Layout, S, replicated
from shardwright.pipeline.runtime.programs.mesh import set_mesh, take_first
from shardwright.pipeline.user.batches import Batches
from shardwright.pipeline.user.loss import pick_loss
from shardwright.pipeline.user.precision import in_precision
from shardwright.pipeline.user.weights import Shape, match_names, open_weights, read_shard
from shardwright.stages.train.data import held_out_batches
from shardwright.stages.train.engines.engine import Batch, Engine, StateShard, unchanged
from shardwright.stages.train.engines.tensors import named_tensors, state_names
from shardwright.stages.train.job import Job
from shardwright.stages.train.ranks.watchdog import Beat, unwatched

AXIS = "ranks"
WHOLE, SPLIT = replicated(1), Layout((S(0),))


class SingleEngine(Engine):
    def __init__(self, job: Job) -> None:
        super().__init__(job, torch.device(job["device"]), job["train"]["gradient_accumulation"])
        self.stream = dist.get_rank()  # by intent
        self.ranks: int = dist.get_world_size()
        set_mesh({AXIS: self.ranks})
        torch.manual_seed(job["train"]["seed"])  # the same on all ranks; what is drawn later, as for dropout, is not
        module = self.build_module()
        if job["train"]["init_from"]:
            read_weights(module, Path(job["train"]["init_from"]), self.where("train", "init_from"))
        if self.stream:
            torch.manual_seed(job["train"]["seed"] + self.stream)
        self.module = in_precision(module, job["model"]["precision"]).to(self.device)
        self.called = self._wrapped()
        self.named = named_tensors(self.module)
        self.parameters = {name: t for name, t in self.named.items() if isinstance(t, nn.Parameter) and t.requires_grad}
        self.optimizer = self.build_optimizer(list(self.parameters.values()))
        layouts = dict.fromkeys(job["model"]["batch"], SPLIT)
        self._batches = Batches(self.build_dataset(), job, layouts, [AXIS])
        self.samples = self._batches.size * self.passes
        if job["train"]["evaluate"]["every"]:
            self.held_out = held_out_batches(job, layouts, [AXIS])

    def _wrapped(self) -> nn.Module:
        return self.module

    def _adds_up(self, last: bool) -> AbstractContextManager[Any]:
        """Around a pass: gradients are brought together in the last one alone."""
        return nullcontext()

    def step(self, first: Batch, later: list[Batch]) -> float:
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(chain([first], map(self.on_device, later)), start=1):
            last = number == self.passes
            with self._adds_up(last):
                with self.autocast(cache=True):
                    loss = pick_loss(self.called(**batch))
                total += loss.detach()
                summing = _sum_of_ranks(total) if last else None  # with backward to hide behind
                (loss / self.passes if self.passes > 1 else loss).backward()
        limit = self.job["train"]["clip_norm"]
        if limit is not None:
            nn.utils.clip_grad_norm_(self.parameters.values(), limit)
        self.optimizer.step()
        if summing is not None:
            summing.wait()
        return float(total) / self.passes / self.ranks

    def evaluate(self, beat: Beat = unwatched) -> float:
        self.called.eval()
        try:
            return self.mean_loss(self.loss_of, beat)
        finally:
            self.called.train()

    def loss_of(self, batch: Batch) -> float:
        with torch.no_grad(), self.autocast(cache=True), unchanged(self.named.values()):
            found = pick_loss(self.called(**batch)).detach().float()
        summing = _sum_of_ranks(found)
        if summing is not None:
            summing.wait()
        return float(found) / self.ranks

    def tensors(self) -> Iterable[Tensor]:
        return self.named.values()

    def resident(self) -> list[Tensor]:
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in super().resident()]

    def state(self) -> Iterator[StateShard]:
        for name, tensor in self.named.items():
            drifts = not isinstance(tensor, nn.Parameter)  # statistics are of a rank's part of the batch
            yield state_shard(f"weights/{name}", tensor.detach(), drifts)
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    yield state_shard(f"optimizer/{name}/{key}", value)

    def exported(self) -> tuple[dict[str, str], dict[str, tuple[torch.dtype, Shape]]]:
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.named.items()}
        return state_names(self.module, self.named), specs

    def whole(self, name: str) -> Tensor:
        tensor = self.named[name]
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class DDP(SingleEngine):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        size = sum(p.numel() * p.element_size() for p in self.parameters.values())
        self.buckets = torch.empty(size, dtype=torch.uint8, device="meta")

    def _wrapped(self) -> nn.Module:
        return DistributedDataParallel(self.module)

    def step(self, first: Batch, later: list[Batch]) -> float:
        loss = super().step(first, later)
        spare = next((name for name, p in self.parameters.items() if p.grad is None), None)
        if spare is not None:  # its bucket was never summed; torch would say so in the next step, in many words
            what = f"{spare} takes no part in the loss, which DistributedDataParallel does not allow"
            remedy = "freeze it (`requires_grad_(False)`), or train with another engine"
            raise TrainError(what, where=self.where("model", "module"), remedy=remedy)
        return loss

    def evaluate(self, beat: Beat = unwatched) -> float:
        """By the buffers of rank 0: torch takes them with the first batch alone, and `loss_of` puts them back."""
        take_first((tensor for tensor in self.named.values() if not isinstance(tensor, nn.Parameter)), [AXIS])
        return super().evaluate(beat)

    def _adds_up(self, last: bool) -> AbstractContextManager[Any]:
        wrapped: Any = self.called
        return nullcontext() if last else wrapped.no_sync()

    def resident(self) -> list[Tensor]:
        """The buckets of gradients, which Python cannot reach, are counted by a stand-in of their size."""
        return [*super().resident(), self.buckets]


class FSDP2(SingleEngine):
    def _wrapped(self) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for block in numbered_blocks(self.module):
            fully_shard(block, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        return self.module

    def _adds_up(self, last: bool) -> AbstractContextManager[Any]:
        wrapped: Any = self.called
        wrapped.set_requires_gradient_sync(last)
        return nullcontext()


ENGINES: dict[str, type[SingleEngine]] = {"single": SingleEngine, "ddp": DDP, "fsdp2": FSDP2}


def numbered_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that stand in a list or a sequence and have parameters; a list itself is not called."""
    for name, child in module.named_children():
        called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if name.isdecimal() and called:
            if next(child.parameters(), None) is not None:
                yield child
        else:
            yield from numbered_blocks(child)


def read_weights(module: nn.Module, path: Path, where: str) -> None:
    named = named_tensors(module)
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    weights = open_weights(path, where)
    with torch.no_grad():
        for name, key in match_names(weights, state_names(module, named), shapes, where).items():
            named[name].copy_(read_shard(weights, key, [((0, size),) for size in shapes[name]]))


def state_shard(name: str, tensor: Tensor, drifts: bool = False) -> StateShard:
    """`fully_shard` has split the first dim of a tensor, all others are whole on every rank."""
    shape, ranks = tuple(tensor.shape), dist.get_world_size()
    if not isinstance(tensor, DTensor):
        return StateShard(name, tensor, shape, WHOLE, (AXIS,), drifts)
    if not SPLIT.fits(shape, (ranks,)):
        raise TrainError(
            f"{name} has {shape[0] if shape else 1} rows, which {ranks} ranks hold in unequal shards",
            remedy="set `snapshots.every` and `compare_replicas_every` to 0, or train with another engine",
        )
    return StateShard(name, tensor.to_local(), shape, SPLIT, (AXIS,), drifts)


def _sum_of_ranks(total: Tensor) -> dist.Work | None:
    """Under way."""
    return dist.all_reduce(total, async_op=True) if dist.get_world_size() > 1 else None
