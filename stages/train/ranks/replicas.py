"""Whether ranks that should hold the same piece of a tensor do: by an exact checksum of its bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.runtime.programs.collectives import as_real
from stages.train.engines.engine import Engine
from stages.train.snapshots.boxes import Piece

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Seen = dict[tuple[str, Any], int]  # name of a tensor and place of the piece in it -> its checksum


def checksum(tensor: Tensor) -> int:
    """The sum of all words as integers, modulo 2^64: any one that differs changes it."""
    plain = as_real(tensor)
    words = plain.detach().contiguous().view(-1).view(_WORDS[plain.element_size()])
    return int(words.sum(dtype=torch.int64))


def compare(engine: Engine) -> str:
    """The first tensor whose replicas differ, and on which ranks, or nothing; all ranks ask together."""
    own: Seen = {}
    for piece in (Piece.of(held) for held in engine.state() if not held.drifts):
        own[piece.name, tuple((tuple(b.offsets), tuple(b.sizes)) for b in piece.boxes)] = checksum(piece.tensor)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return difference(everyone)


def difference(everyone: Iterable[Seen]) -> str:
    first: dict[tuple[str, Any], tuple[int, int]] = {}
    for rank, seen in enumerate(everyone):
        for key, value in seen.items():
            other, expected = first.setdefault(key, (rank, value))
            if value != expected:
                return f"{key[0]} differs between rank {other} and rank {rank}"
    return ""
