"""How ranks find one another, which device each has, and what they talk over: gloo, and on GPUs NCCL beside it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeline.base.errors import TrainError
from pipeline.launch.rendezvous import local_store

GLOO, NCCL = "gloo", "cpu:gloo,cuda:nccl"
PAUSE_S = 0.02

T = TypeVar("T")


def gathered(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank has, by their numbers."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def join(device: str, timeout: timedelta) -> dist.Store:
    """NCCL takes one rank for each GPU; where ranks share one they talk over gloo alone. The store that they share."""
    store, rank, ranks = _meet(timeout)

    def talk_over(backend: str) -> None:
        own = dist.PrefixStore(f"over {backend}", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=timeout)

    talk_over(GLOO)
    if device != "cuda":
        return store
    number = gpu_of(os.environ, torch.cuda.device_count())
    torch.cuda.set_device(number)
    if backend_for(gathered(str(torch.cuda.get_device_properties(number).uuid))) == NCCL:
        dist.destroy_process_group()
        talk_over(NCCL)
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


def _meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """A store, this rank and the number of ranks.

    As torch does it, but for torchrun's own store: it outlives a start, with what ranks that are gone left there.
    Torch tells starts apart by how often torchrun has restarted ranks, which is not the same number on all hosts.
    """
    own = local_store(timeout)
    if own is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
        return store, rank, ranks
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if own is not None:
        return own, rank, ranks
    port = int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"start {agree_on_start(shared, rank, ranks, timeout)}", shared), rank, ranks


def agree_on_start(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """A word that the first rank of this start gives to all others of this start, and that no start before has had.

    Each asks by a number that it has drawn; one that died unanswered may have left a question, which then is answered,
    too, and helps nobody. The first rank answers until everyone has said that it has heard.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"question of {rank}", own)
        store.wait([f"answer to {own}"], timeout)
        word = str(store.get(f"answer to {own}").decode())
        store.set(f"{word} heard by {rank}", "")
        return word
    deadline = time.monotonic() + timeout.total_seconds()
    waiting = set(range(1, ranks))
    while waiting:
        for other in waiting:
            if store.check([f"question of {other}"]):
                store.set(f"answer to {store.get(f'question of {other}').decode()}", own)
        waiting = {other for other in waiting if not store.check([f"{own} heard by {other}"])}
        if waiting and time.monotonic() > deadline:
            raise TrainError(f"rank {min(waiting)} did not come", remedy="see why it was not started, or raise wait_s")
        time.sleep(PAUSE_S if waiting else 0)
    return own
