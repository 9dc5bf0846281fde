"""Ranks of one axis as threads of this process: the runtime's own collectives, without processes or sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardwright.pipeline.runtime.programs import collectives, mesh

AXIS = "d0"


class Group:
    """A process group whose ranks are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=600)
        self.held: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What every rank brought, by rank."""
        self.held[rank] = tensor.detach().clone()
        self.barrier.wait()
        found = list(self.held)
        self.barrier.wait()
        return found


_own = threading.local()


class _Axes(dict):
    def __getitem__(self, name: str) -> mesh.MeshAxis:
        return _own.axes[name]


class Done:
    def wait(self) -> None:
        """Nothing is under way: threads wait for one another in the call."""


def _all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    everyone = torch.stack(group.exchange(_own.axes[AXIS].rank, tensor))
    how = {dist.ReduceOp.MAX: torch.amax, dist.ReduceOp.MIN: torch.amin, dist.ReduceOp.SUM: torch.sum}
    tensor.copy_(how[op](everyone, 0))
    return Done() if async_op else None


def _all_gather(output, tensor, group=None, async_op=False):
    output.copy_(torch.cat(group.exchange(_own.axes[AXIS].rank, tensor)))
    return Done() if async_op else None


def _reduce_scatter(output, tensor, group=None):
    rank = _own.axes[AXIS].rank
    output.copy_(torch.stack(group.exchange(rank, tensor)).sum(0).chunk(group.size)[rank])


@contextmanager
def _simulation() -> Iterator[None]:
    with (
        patch.object(mesh, "_axes", _Axes()),
        patch.object(dist, "all_reduce", _all_reduce),
        patch.object(dist, "get_backend", lambda group: "threads"),
        patch.object(collectives, "all_gather_into", _all_gather),
        patch.object(collectives, "reduce_scatter_from", _reduce_scatter),
    ):
        yield


def one_after_another(ranks: int, function: Callable[[int], object]) -> list:
    """Calls `function(rank)` for each rank in turn, for what needs its rank but no other's word."""
    with _simulation():
        found = []
        for rank in range(ranks):
            _own.axes = {AXIS: mesh.MeshAxis(ranks, rank, None)}
            found.append(function(rank))
        return found


def at_once(ranks: int, function: Callable[[int], object]) -> list:
    """Calls `function(rank)` on all ranks at the same time; what one raises is raised here."""
    group, found, errors = Group(ranks), [None] * ranks, []

    def body(rank: int) -> None:
        _own.axes = {AXIS: mesh.MeshAxis(ranks, rank, group)}
        try:
            found[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
            group.barrier.abort()

    with _simulation():
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return found
