"""A batch of the model in several micro-batches, which need not have as many samples: 10 in four are 3, 3, 2 and 2.

Larger ones come first, and there are at most two sizes. Every pass of a step is cut alike, so that micro-batch n of a
step, or of the data, is number n modulo that of the slices. A loss is a mean over samples, and the loss of a step one
over those of all its micro-batches: each counts by its share of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle


@dataclass(frozen=True)
class Slices:
    samples: tuple[int, ...]  # of the micro-batches of one batch of the model

    @property
    def batch(self) -> int:
        return sum(self.samples)

    @property
    def uneven(self) -> bool:
        return self.samples[-1] < self.samples[0]

    def size(self, number: int) -> int:
        return self.samples[number % len(self.samples)]

    def start(self, number: int) -> int:
        """How many samples come before a micro-batch."""
        before, place = divmod(number, len(self.samples))
        return before * self.batch + sum(self.samples[:place])

    def is_smaller(self, number: int) -> bool:
        return self.size(number) < self.samples[0]

    def parts(self, micro_batches: int) -> list[float]:
        """For each micro-batch of a step: how many of its size would have the samples of the step."""
        return [self.start(micro_batches) / self.size(number) for number in range(micro_batches)]

    def mean(self, losses: Iterable[float]) -> float:
        """Over all samples, from the losses of micro-batches one after another, the first of a batch first."""
        pairs = list(zip(losses, cycle(self.samples), strict=False))
        return sum(loss * size for loss, size in pairs) / sum(size for _, size in pairs)
