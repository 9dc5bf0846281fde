"""The training steps that benchmarks.overhead compares: ours and those of torch's own tools, one after the other.

Every step is zero_grad, forward, backward and AdamW, and returns its loss. Peers are set up as their documentation does
it. Two steps are timed in turn, the first of a pair now the one and now the other; the figure is the median of the
ratios of the pairs, in which what else the machine does falls out.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.names import look_up
from shardwright.pipeline.runtime.programs.mesh import set_mesh
from shardwright.pipeline.runtime.programs.parameters import shard_of
from shardwright.pipeline.runtime.step.gradients import Gradients
from shardwright.pipeline.runtime.step.passes import run_passes

Step = Callable[[], Tensor]
RATE = 1e-5  # of learning: small, so that rounding does not grow from step to step


@dataclass(frozen=True)
class Compared:
    ours_ms: float
    theirs_ms: float
    ratio: float
    noise: float  # two standard errors of the ratio
    losses: tuple[float, float]  # of the last pair, ours and theirs
    differ: float  # the largest relative difference of a pair's losses


def compare(ours: Step, theirs: Step, pairs: int, warm_up: int = 3) -> Compared:
    """Steps in the order A B B A: neither is always the first after the other."""
    times: dict[Step, list[float]] = {ours: [], theirs: []}
    losses: dict[Step, list[float]] = {ours: [], theirs: []}
    for number in range(warm_up + pairs):
        for step in (ours, theirs) if number % 2 else (theirs, ours):
            torch.manual_seed(number)  # the same dropout for both
            seconds, loss = timed(step)
            losses[step].append(loss)
            if number >= warm_up:
                times[step].append(seconds)
    ratio, noise = middle([a / b for a, b in zip(times[ours], times[theirs], strict=True)])
    milliseconds = [1e3 * statistics.median(times[step]) for step in (ours, theirs)]
    differ = max(abs(a - b) / abs(b) for a, b in zip(losses[ours], losses[theirs], strict=True))
    return Compared(*milliseconds, ratio, noise, (losses[ours][-1], losses[theirs][-1]), differ)


def middle(ratios: list[float]) -> tuple[float, float]:
    """The median, and twice its standard error as the quartiles have it."""
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return ratio, 2 * 1.253 * (high - low) / 1.349 / len(ratios) ** 0.5


def timed(step: Step) -> tuple[float, float]:
    """Seconds until the step is done, all ranks having begun together; and the ranks' mean loss.

    A peer of data parallelism knows the loss of its own part of the batch alone, ours is that of the whole.
    """
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    loss = step()
    seconds = time.perf_counter() - start
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss = loss / dist.get_world_size()
    return seconds, float(loss)


# -------------------------------------------------------------------------------------------------------------- ours


def our_step(program: ModuleType, model: nn.Module, batch: dict[str, Tensor]) -> Step:
    """A step of the program as the train stage runs it, from the model's values."""
    set_mesh(program.MESH)
    axes = list(program.MESH)
    tensors: dict[str, Tensor] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        layout, *_ = look_up(program.PARAMETERS, name)
        tensors[name] = nn.Parameter(shard_of(parameter.detach(), Layout.parse(layout), axes))
    parameters = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter)}
    gradients = Gradients(parameters.values(), [look_up(program.PARAMETERS, name) for name in parameters], axes)
    optimizer = torch.optim.AdamW(gradients.updated, lr=RATE)
    own = {name: shard_of(t, Layout.parse(program.INPUTS[name]), axes) for name, t in batch.items()}
    body = program.Program(tensors)

    def step() -> Tensor:
        (loss,) = run_passes(body, gradients, [own], 1, nullcontext)
        optimizer.step()
        gradients.publish()
        return loss

    return step


# ------------------------------------------------------------------------------------------------------------- peers


def plain_step(model: Callable[..., Any], parameters: Iterable[nn.Parameter], batch: dict[str, Tensor]) -> Step:
    optimizer = torch.optim.AdamW(parameters, lr=RATE)

    def step() -> Tensor:
        optimizer.zero_grad()
        output = model(**batch)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def half(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part."""
    return {name: t.chunk(dist.get_world_size())[dist.get_rank()].contiguous() for name, t in batch.items()}


def ddp_step(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model), **options)
    return plain_step(wrapped, wrapped.parameters(), half(batch))


def fsdp_step(model: Any, batch: dict[str, Tensor]) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_step(model, model.parameters(), half(batch))


def tensor_step(model: Any, batch: dict[str, Tensor]) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(
        model,
        mesh,
        {
            "token": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        columns = {name: ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "up")}
        parallelize_module(layer, mesh, {**columns, "attention.out": RowwiseParallel(), "down": RowwiseParallel()})
    return plain_step(model, model.parameters(), batch)
