"""Sums over ranks that nobody reads before the gradients are there, as that of the loss.

Inside a step (from `Gradients.start` to `Gradients.wait`) such a sum rides in a bucket of gradients that is summed over
the same ranks, or is under way on its own while backward runs; outside of one it is waited for at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeline.runtime.programs.mesh import MeshAxis


@dataclass(eq=False)
class Seat:
    """Room for one number in what is summed over an axis anyway."""

    axis: MeshAxis
    place: Tensor
    rider: Tensor | None = None

    def takes(self, total: Tensor, axis: MeshAxis) -> bool:
        here = total.dtype == self.place.dtype and total.device == self.place.device and total.numel() == 1
        return self.rider is None and here and self.axis == axis

    def leave(self) -> None:
        """Before the sum."""
        if self.rider is None:
            self.place.zero_()
        else:
            self.place.copy_(self.rider.detach().view(1))

    def arrive(self) -> None:
        """After it."""
        if self.rider is not None:
            self.rider.detach().copy_(self.place.view_as(self.rider))
            self.rider = None


_under_way: list[Any] = []
_steps: dict[int, list[Seat]] = {}  # that have begun, one for each partition that this rank runs


def start(seats: list[Seat]) -> None:
    _steps[id(seats)] = seats


def in_step() -> bool:
    return bool(_steps)


def add_up(total: Tensor, axis: MeshAxis) -> None:
    """The sum takes the tensor's place by the end of the step."""
    assert _steps, "no step has begun"
    seat = next((seat for seats in _steps.values() for seat in seats if seat.takes(total, axis)), None)
    if seat is None:
        _under_way.append(dist.all_reduce(total, group=axis.group, async_op=True))
    else:
        seat.rider = total


def settle() -> None:
    """Waits for what is under way, and sums at once what would ride; the steps go on."""
    for seats in _steps.values():
        _sum_at_once(seats)
    while _under_way:
        _under_way.pop().wait()


def finish(seats: list[Seat]) -> None:
    """Of the step that began with these."""
    _sum_at_once(seats)
    del _steps[id(seats)]
    while _under_way and not _steps:
        _under_way.pop().wait()


def _sum_at_once(seats: list[Seat]) -> None:
    """What boarded after the bucket had left."""
    for seat in seats:
        if seat.rider is not None:
            dist.all_reduce(seat.rider.detach(), group=seat.axis.group)
            seat.rider = None
