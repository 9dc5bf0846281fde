"""A plan on a submesh of the cluster, and the terms under which a partition of it runs (partition_times.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from shardwright.stages.checkpoint.recompute.chain import SLOTS, Chain, ChainError, Slots


class Recompute(Enum):
    """What a partition computes again: the best within the memory, or one of GPipe's three."""

    SOLVED = "solved"
    NEVER = "never"
    ALWAYS = "always"  # all of it, from its input
    EXCEPT_LAST = "except_last"  # the same, but for the last micro-batch
    MARKED = "marked"  # the spans of links that are given, as far as they lie in it


class Sent(Enum):
    """How long what a partition sends stays in its memory."""

    UNCOUNTED = "uncounted"
    UNTIL_THE_NEXT = "until the next"
    TO_THE_END = "to the end of the step"


@dataclass(frozen=True)
class SubmeshPlan:
    """A plan of the whole model on a mesh of some devices, priced for one size of micro-batch.

    Link i of the chain, the loss included, has `resident[i]` bytes on each device and `once[i]` seconds once a step
    (gradient sums, optimizer); `weight[i]` seconds of its backward make weight gradients. It holds `held[i]` bytes
    beside the chain for each micro-batch in flight, and `put_off[i]` more while its weight gradients are put off
    (zero_bubble). `crosses[i]` bytes beside its input cross a cut before it. () is none.
    """

    name: str
    devices: int
    chain: Chain
    resident: tuple[float, ...]
    once: tuple[float, ...] = ()
    weight: tuple[float, ...] = ()
    mesh: str = ""  # partitions on the same devices (interleaved) have plans of one mesh
    loss_held: float = 0.0
    held: tuple[float, ...] = ()
    put_off: tuple[float, ...] = ()
    crosses: tuple[float, ...] = ()
    everywhere: float = 0.0  # bytes of any partition
    everywhere_held: float = 0.0  # and for each of its micro-batches in flight

    def __post_init__(self) -> None:
        links = self.chain.length + 1
        for name in ("resident", "once", "weight", "held", "put_off", "crosses"):
            values = tuple(getattr(self, name)) or (0.0,) * links
            object.__setattr__(self, name, values)
            if len(values) != links or not all(math.isfinite(x) and x >= 0 for x in values):
                raise ChainError(f"{name} needs {links} numbers that are not negative", where=f"submesh {self.name}")
        if self.devices < 1:
            raise ChainError("a submesh has at least one device", where=f"submesh {self.name}")

    def putting_off(self) -> SubmeshPlan:
        """As any micro-batch in flight may have put off its weight gradients."""
        held = tuple(a + b for a, b in zip(self.held, self.put_off, strict=True))
        return replace(self, held=held, put_off=())

    @property
    def links(self) -> int:
        """The loss included."""
        return self.chain.length + 1


@dataclass(frozen=True)
class Terms:
    """Under which a partition runs."""

    memory: int  # of a device
    micro_batches: int
    recompute: Recompute = Recompute.SOLVED
    share: float = 1.0  # of the memory
    sent: Sent = Sent.UNCOUNTED
    slots: Slots = SLOTS
    spans: tuple[tuple[int, int], ...] = ()  # first and last links of what MARKED recomputes
