"""The sharded program: the graph's ops with every conversion in its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.pipeline.ir.layout import Layout

GATHERED_ALONE = 4 << 20  # bytes of a whole parameter from which on it is not joined with others of its link


@dataclass(frozen=True)
class Tensor:
    """A value in one layout: what a line of the generated program names."""

    value: str
    layout: Layout


@dataclass(frozen=True)
class Convert:
    """One step of the conversion table."""

    source: Tensor
    target: Tensor
    again: bool = False  # dropped after the link's forward pass, and made once more in its backward pass


@dataclass(frozen=True)
class Call:
    op: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


Step = Convert | Call


@dataclass(frozen=True)
class Program:
    prologue: tuple[Step, ...]  # what depends on no parameter
    shared: tuple[Convert, ...]  # parameters that several links read in a layout they are not stored in
    links: tuple[tuple[Step, ...], ...]
    reduced: dict[str, tuple[int, ...]]  # parameter -> axes over which the step sums its gradient, in buckets
    output: Tensor  # the loss; of a partition before the last, the activation that leaves it
    micro_batches: int = 1  # how often a step runs prologue and links; what is shared is converted once for all of them

    def conversions(self) -> Iterator[Convert]:
        for steps in (self.prologue, self.shared, *self.links):
            yield from (step for step in steps if isinstance(step, Convert))
