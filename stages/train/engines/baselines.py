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

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pipeline.base.errors import TrainError
from pipeline.base.instantiate import instantiate
from pipeline.ir.layout import Layout, S, replicated
from pipeline.runtime.programs.mesh import set_mesh
from pipeline.user.batches import Batches
from pipeline.user.loss import pick_loss
from pipeline.user.optimizer import build_optimizer
from pipeline.user.weights import match_names, open_weights, read_piece, write_weights
from stages.train.engines.engine import Batch, Held, Job
from stages.train.engines.precision import Precision
from stages.train.engines.tensors import state_names
from stages.train.held_out import HeldOut, held_out_batches
from stages.train.ranks.watchdog import Beat, unwatched, with_beats

AXIS = "ranks"
WHOLE, SPLIT = replicated(1), Layout((S(0),))


class Single:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = torch.device(job["device"])
        self.precision = Precision(self.device, job["model"]["precision"])
        self.passes: int = job["train"]["micro_batches"]
        self.held_whole, self.not_captured, self.stream = "", "", dist.get_rank()  # by intent
        set_mesh({AXIS: dist.get_world_size()})
        self.module = self._built()
        self.called = self._wrapped()
        self.named: dict[str, Tensor] = {
            **dict(self.module.named_buffers()),
            **dict(self.module.named_parameters()),
        }
        self.parameters = {name: t for name, t in self.named.items() if isinstance(t, nn.Parameter) and t.requires_grad}
        where = f"{job['where']['train']}: optimizer"
        self.optimizer = build_optimizer(job["train"]["optimizer"], where, list(self.parameters.values()))
        dataset = instantiate(job["data"]["dataset"], f"{job['where']['data']}: dataset")
        self._batches = Batches(dataset, job, dict.fromkeys(job["model"]["batch"], SPLIT), [AXIS])
        self.samples = self._batches.size * self.passes
        self.held_out = self._held_out() if job["train"]["evaluate"]["every"] else None

    def _held_out(self) -> HeldOut:
        batches = held_out_batches(self.job, dict.fromkeys(self.job["model"]["batch"], SPLIT), [AXIS])
        return HeldOut(batches, self.loss)

    def _built(self) -> nn.Module:
        """The same on all ranks; what is drawn later, as for dropout, is not."""
        seed = self.job["train"]["seed"]
        torch.manual_seed(seed)
        module: nn.Module = instantiate(self.job["model"]["module"], f"{self.job['where']['model']}: module")
        if self.job["train"]["init_from"]:
            read_weights(module, Path(self.job["train"]["init_from"]), f"{self.job['where']['train']}: init_from")
        if dist.get_rank():
            torch.manual_seed(seed + dist.get_rank())
        return module.train().to(self.device, torch.bfloat16 if self.precision.name == "bf16" else None)

    def _wrapped(self) -> nn.Module:
        return self.module

    def _adds_up(self, last: bool) -> AbstractContextManager[Any]:
        """Around a pass: gradients are brought together in the last one alone."""
        return nullcontext()

    def batches(self, step: int) -> list[Batch]:
        return [self._batches[step * self.passes + n] for n in range(self.passes)]

    def on_device(self, batch: Batch) -> Batch:
        return self.precision.batch(batch)

    def step(self, first: Batch, later: list[Batch]) -> float:
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(chain([first], map(self.on_device, later)), start=1):
            last = number == self.passes
            with self._adds_up(last):
                with self.precision.autocast(cache=True):
                    loss = pick_loss(self.called(**batch))
                total += loss.detach()
                told = _sum_later(total) if last else None  # with backward to hide behind
                (loss / self.passes if self.passes > 1 else loss).backward()
        limit = self.job["train"]["clip_norm"]
        if limit is not None:
            nn.utils.clip_grad_norm_(self.parameters.values(), limit)
        self.optimizer.step()
        if told is not None:
            told.wait()
        return float(total) / self.passes / _ranks()

    def evaluate(self, beat: Beat = unwatched) -> float:
        assert self.held_out is not None, "evaluate.every is 0"
        self.called.eval()
        try:
            return self.held_out.mean_loss(self.on_device, beat)
        finally:
            self.called.train()

    def loss(self, batch: Batch) -> float:
        buffers = [tensor for tensor in self.named.values() if not isinstance(tensor, nn.Parameter)]
        kept = [tensor.clone() for tensor in buffers]
        with torch.no_grad(), self.precision.autocast(cache=True):
            found = pick_loss(self.called(**batch)).detach().float()
            for tensor, before in zip(buffers, kept, strict=True):
                tensor.copy_(before)
        told = _sum_later(found)
        if told is not None:
            told.wait()
        return float(found) / _ranks()

    def resident(self) -> list[Tensor]:
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return [local_of(tensor) for tensor in (*self.named.values(), *gradients, *state)]

    def state(self) -> Iterator[Held]:
        for name, tensor in self.named.items():
            drifts = not isinstance(tensor, nn.Parameter)  # statistics are of a rank's part of the batch
            yield replace(held(f"weights/{name}", tensor.detach()), drifts=drifts)
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    yield held(f"optimizer/{name}/{key}", value)

    def restored(self) -> None:
        """Nothing is held twice."""

    def export(self, path: Path, beat: Beat = unwatched) -> None:
        names = state_names(self.module, self.named)
        specs = {key: (self.named[name].dtype, tuple(self.named[name].shape)) for key, name in names.items()}
        whole = with_beats((whole_of(self.named[name]) for name in names.values()), beat)
        if dist.get_rank() == 0:
            write_weights(path, specs, whole, {"format": "pt"})
        else:
            for _ in whole:
                pass


class DDP(Single):
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
            raise TrainError(
                f"{spare} takes no part in the loss, which DistributedDataParallel does not allow",
                where=f"{self.job['where']['model']}: module",
                remedy="freeze it (`requires_grad_(False)`), or train with another engine",
            )
        return loss

    def _adds_up(self, last: bool) -> AbstractContextManager[Any]:
        wrapped: Any = self.called
        return nullcontext() if last else wrapped.no_sync()

    def resident(self) -> list[Tensor]:
        """The buckets of gradients, which Python cannot reach, are counted by a stand-in of their size."""
        return [*super().resident(), self.buckets]


class FSDP2(Single):
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


ENGINES: dict[str, type[Single]] = {"single": Single, "ddp": DDP, "fsdp2": FSDP2}


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
    named = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    weights = open_weights(path, where)
    with torch.no_grad():
        for name, key in match_names(weights, state_names(module, named), shapes, where).items():
            named[name].copy_(read_piece(weights, key, [((0, size),) for size in shapes[name]]))


def held(name: str, tensor: Tensor) -> Held:
    """A tensor of the state: `fully_shard` has split its first dim, all others are whole on every rank."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Held(name, tensor, shape, WHOLE, (AXIS,))
    if not SPLIT.fits(shape, (dist.get_world_size(),)):
        raise TrainError(
            f"{name} has {shape[0] if shape else 1} rows, which {dist.get_world_size()} ranks hold in unequal pieces",
            remedy="set `snapshots.every` and `compare_replicas_every` to 0, or train with another engine",
        )
    return Held(name, tensor.to_local(), shape, SPLIT, (AXIS,))


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _ranks() -> int:
    return int(dist.get_world_size())


def _sum_later(total: Tensor) -> dist.Work | None:
    if dist.get_world_size() == 1:
        return None
    return dist.all_reduce(total, async_op=True)
