"""Parameters on one rank: taking a rank's pieces, and summing gradients over the ranks in buckets during backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.ir.layout import Layout
from pipeline.runtime.collectives import piece
from pipeline.runtime.mesh import MeshAxis, axis_of


def piece_of(tensor: Tensor, layout: Layout, axes: Iterable[str]) -> Tensor:
    """This rank's piece of an unsplit tensor."""
    held = [axis_of(name) for name in axes]
    for split in layout.splits(tuple(axis.size for axis in held)):
        tensor = piece(tensor, held[split.axis], split.dim, split.parts)
    return tensor.contiguous().clone()


def scope(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a module's name, by their names inside it."""
    start = f"{prefix}." if prefix else ""
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


class GradientSum:
    """Sums the gradients of replicated parameters over an axis, in buckets, while backward still runs.

    Each gradient is a view of its bucket. A bucket is sent when its last gradient is there and every bucket before it
    has been sent: all ranks send in one order. Buckets follow the parameters in reverse, the order in which backward
    finishes them; the first is small so that the first message leaves early.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], axis: str, first_mb: float = 1, bucket_mb: float = 25
    ) -> None:
        self.axis: MeshAxis = axis_of(axis)
        self.buckets = [_Bucket(group) for group in _grouped(list(parameters), first_mb, bucket_mb)]
        self.next = 0
        self.order: list[int] = []  # buckets in the order they were sent in this step
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def _hook(self, bucket: _Bucket) -> Any:
        def ready(parameter: nn.Parameter) -> None:
            bucket.missing -= 1
            self._send_ready()

        return ready

    def _send_ready(self) -> None:
        while self.next < len(self.buckets) and self.buckets[self.next].missing == 0:
            self._send(self.next)

    def _send(self, index: int) -> None:
        bucket = self.buckets[index]
        if self.axis.size > 1:
            bucket.work = dist.all_reduce(bucket.flat, group=self.axis.group, async_op=True)
        self.order.append(index)
        self.next = index + 1

    def start(self) -> None:
        """Before the forward pass of a step."""
        self.next = 0
        self.order = []
        for bucket in self.buckets:
            bucket.reset()

    def wait(self) -> None:
        """After backward: sends what no gradient reached, and waits for all sums."""
        while self.next < len(self.buckets):
            self._send(self.next)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None


class _Bucket:
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        self.work: Any = None
        self.missing = len(parameters)
        offset = 0
        for parameter in parameters:
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def reset(self) -> None:
        self.flat.zero_()
        self.missing = len(self.parameters)


def _grouped(parameters: list[nn.Parameter], first_mb: float, bucket_mb: float) -> list[list[nn.Parameter]]:
    """Runs of parameters of one dtype up to a size, last parameter first."""
    groups: list[list[nn.Parameter]] = []
    size = 0.0
    for parameter in reversed(parameters):
        limit = (first_mb if len(groups) <= 1 else bucket_mb) * 1e6
        nbytes = parameter.numel() * parameter.element_size()
        if not groups or size + nbytes > limit or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            size = 0.0
        groups[-1].append(parameter)
        size += nbytes
    return groups
