"""How ranks find one another, which device each has, and what they talk over: gloo, and on GPUs NCCL beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeline.launch import restart_count

GLOO, NCCL = "gloo", "cpu:gloo,cuda:nccl"


def join(device: str, timeout: timedelta) -> None:
    """NCCL takes one rank for each GPU; where ranks share one they talk over gloo alone."""
    found = next(dist.rendezvous("env://", timeout=timeout))
    _join(GLOO, found, timeout)
    if device != "cuda":
        return
    number = gpu_of(os.environ, torch.cuda.device_count())
    torch.cuda.set_device(number)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, str(torch.cuda.get_device_properties(number).uuid))
    if backend_for(everyone) == NCCL:
        dist.destroy_process_group()
        _join(NCCL, found, timeout)


def gpu_of(environment: Mapping[str, str], gpus: int) -> int:
    """A launcher may show each rank its own GPU alone, which has the number 0 then."""
    return int(environment.get("LOCAL_RANK", "0")) % gpus


def backend_for(gpus: Sequence[str]) -> str:
    """`gpus` names that of each rank, over all hosts."""
    return NCCL if len(set(gpus)) == len(gpus) else GLOO


def _join(backend: str, found: tuple[dist.Store, int, int], timeout: timedelta) -> None:
    """As `init_process_group` does under torchrun, but for the names by which ranks find one another.

    After a restart torchrun gives the ranks the same store, where those that are gone have left their addresses.
    """
    store, rank, ranks = found
    own = dist.PrefixStore(f"start {restart_count()} over {backend}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=timeout)
