"""Which device each rank has, and what ranks talk over: gloo, and on GPUs NCCL beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.launch.rendezvous import init_process_group
from shardwright.pipeline.runtime.step.memory import allocate_exactly, keep_freed_memory

GLOO, NCCL = "gloo", "cpu:gloo,cuda:nccl"

T = TypeVar("T")


def gathered(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank has, by their numbers."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def join(device: str, timeout: timedelta) -> dist.Store:
    """NCCL takes one rank for each GPU; where ranks share one they talk over gloo alone. The store that they share."""
    store = init_process_group(GLOO, timeout)
    if device != "cuda":
        keep_freed_memory()
        return store
    number = gpu_of(os.environ, torch.cuda.device_count())
    torch.cuda.set_device(number)
    allocate_exactly()
    if backend_for(gathered(str(torch.cuda.get_device_properties(number).uuid))) == NCCL:
        dist.destroy_process_group()
        init_process_group(NCCL, timeout, store)
    return store


def require_gpu(where: str) -> None:
    if not torch.cuda.is_available():
        what = "the plan is for GPUs, and this machine has none that torch can use"
        raise TrainError(what, where=where, remedy="train on a machine with GPUs, or plan for `device: cpu`")


def gpu_of(environment: Mapping[str, str], gpus: int) -> int:
    """A launcher may show each rank its own GPU alone, which has the number 0 then."""
    return int(environment.get("LOCAL_RANK", "0")) % gpus


def backend_for(gpus: Sequence[str]) -> str:
    """`gpus` names that of each rank, over all hosts."""
    return NCCL if len(set(gpus)) == len(gpus) else GLOO
