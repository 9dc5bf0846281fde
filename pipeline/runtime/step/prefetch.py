"""Gathers that begin before they are asked for.

A program asks for its parameters in the same order in every step, forward, backward and in what it runs again. So the
order of one step tells the next: when a gather has been handed out, the one that followed it begins, and is under way
while the ops between the two are computed. One is under way at a time, and none from one step to the next, as the
optimizer changes what is gathered. Every rank runs the same program, so all begin the same gathers at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.runtime.programs.collectives import Joining, Split
from pipeline.runtime.programs.mesh import MeshAxis


@dataclass(frozen=True, eq=False)
class Request:
    """What is gathered: pieces that lie where they are for the whole training."""

    pieces: tuple[Tensor, ...]
    splits: tuple[Split, ...]
    axis: MeshAxis

    def is_for(self, other: Request) -> bool:
        return self.axis == other.axis and self.splits == other.splits and self._places() == other._places()

    def _places(self) -> list[tuple[int, torch.Size]]:
        return [(piece.data_ptr(), piece.shape) for piece in self.pieces]


class Ahead:
    """The gathers of a training: those of the last step in their order, those of this one so far."""

    def __init__(self) -> None:
        self.last: list[Request] = []
        self.seen: list[Request] = []
        self.begun: tuple[Request, Joining] | None = None
        self.used = 0  # gathers of this step that had begun when they were asked for

    def start(self) -> None:
        """A step begins."""
        global _current
        self.stop()
        self.last, self.seen, self.used = self.seen, [], 0
        _current = self

    def stop(self) -> None:
        """Before the optimizer; what has begun and was not asked for is waited for, as the other ranks take part."""
        global _current
        _current = None
        if self.begun is not None:
            self.begun[1].finish()
            self.begun = None

    def gather(self, request: Request) -> list[Tensor]:
        found = self._begun(request) or Joining(request.pieces, request.splits, request.axis)
        wholes = found.finish()
        place = len(self.seen)
        self.seen.append(request)
        if place + 1 < len(self.last) and self.last[place].is_for(request):
            following = self.last[place + 1]
            self.begun = following, Joining(following.pieces, following.splits, following.axis, waits=False)
        return wholes

    def _begun(self, request: Request) -> Joining | None:
        if self.begun is None:
            return None
        (expected, joining), self.begun = self.begun, None
        if expected.is_for(request):
            self.used += 1
            return joining
        joining.finish()
        return None


_current: Ahead | None = None  # of the training whose step this is


def gather(pieces: Sequence[Tensor], splits: Sequence[Split], axis: MeshAxis) -> list[Tensor]:
    """The wholes of pieces of parameters."""
    if _current is None:
        return Joining(pieces, splits, axis).finish()
    return _current.gather(Request(tuple(piece.detach() for piece in pieces), tuple(splits), axis))
