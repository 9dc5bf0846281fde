"""What stays on a device for the whole step, by parameter and by class: for refusals that say what is in the way."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.sharding.sharded import Sharded


class Kept(StrEnum):
    values = "values"
    gradients = "gradients"
    state = "optimizer state"
    buffers = "buffers"


@dataclass(frozen=True)
class ResidentPart:
    """Bytes on one device; what equal layers have counts together, as `layers.*.up.weight`."""

    kept: Kept
    names: tuple[str, ...]  # of parameters, or of buffers
    shards: int  # into which each of them is cut
    nbytes: int

    @property
    def label(self) -> str:
        count = len(self.names)
        name = self.names[0] if count == 1 else f"{_pattern(self.names[0])} ({count} of them)"
        return f"{self.kept} {name}" if self.kept is Kept.buffers else f"{self.kept} of {name}"


def resident_parts(sharded: Sharded, optimizer_copies: float) -> tuple[ResidentPart, ...]:
    """Largest first; of equal ones the optimizer's state, which is the easiest to shard."""
    graph, sizes = sharded.graph, sharded.sizes
    found: dict[tuple[str, Kept, int], list[tuple[str, float]]] = defaultdict(list)
    for value in graph.of_role(Role.PARAMETER):
        stored, state = sharded.sharding.storage[value.origin], sharded.states[value.name]
        ratio = state.shards(sizes) // stored.shards(sizes)
        value_bytes, state_bytes = (sharded.local_bytes(value.name, layout) for layout in (stored, state))
        for kept, layout, nbytes in (
            (Kept.values, stored, value_bytes),
            (Kept.gradients, stored, max(value_bytes, ratio * state_bytes)),
            (Kept.state, state, optimizer_copies * state_bytes),
        ):
            found[_pattern(value.origin), kept, layout.shards(sizes)].append((value.origin, nbytes))
    for value in graph.of_role(Role.BUFFER):
        found[_pattern(value.origin), Kept.buffers, 1].append((value.origin, value.type.nbytes))
    parts = [
        ResidentPart(kept, tuple(name for name, _ in own), shards, round(sum(nbytes for _, nbytes in own)))
        for (_, kept, shards), own in found.items()
    ]
    order = (Kept.state, Kept.values, Kept.gradients, Kept.buffers)
    return tuple(sorted(parts, key=lambda part: (-part.nbytes, order.index(part.kept), part.names)))


def total_of(parts: tuple[ResidentPart, ...], kept: Kept) -> int:
    return sum(part.nbytes for part in parts if part.kept is kept)


def _pattern(name: str) -> str:
    """The name with a star for each number between dots."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.4g} GB"


def budget_of(nbytes: float) -> str:
    """The same rounded up, to be set as a budget."""
    if nbytes <= 0:
        return gigabytes(nbytes)
    digit = 10.0 ** (math.floor(math.log10(nbytes)) - 3)
    return gigabytes(math.ceil(nbytes / digit - 1e-9) * digit)
