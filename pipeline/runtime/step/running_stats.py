"""Running statistics of batch norms that change once a step, with those of all its micro-batches together.

Each micro-batch is normalised by its own mean and variance. These go into tensors of their own, and are combined when
the step ends: for a mean m and a sum of squared deviations s of n numbers each (Chan, Golub and LeVeque),

    n = n1 + n2    m = m1 + (m2 - m1) n2 / n    s = s1 + s2 + (m2 - m1)^2 n1 n2 / n
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.pipeline.runtime.context import setting, step

COUNTER = "num_batches_tracked"  # of a torch.nn.BatchNorm: a program adds one for each micro-batch


class ChannelMoments(NamedTuple):
    """Of numbers of each channel: how many, their mean, and the sum of their squared deviations from it."""

    numbers: int
    mean: Tensor
    squares: Tensor


def combined(parts: Iterable[ChannelMoments]) -> ChannelMoments:
    """Of all these numbers together."""
    first, *rest = parts
    count, mean, squares = first
    for part in rest:
        before, count = count, count + part.numbers
        apart = part.mean - mean
        mean = mean + apart * (part.numbers / count)
        squares = squares + part.squares + apart.square() * (before * part.numbers / count)
    return ChannelMoments(count, mean, squares)


@dataclass(frozen=True)
class _Norm:
    """A batch norm in a step, with its running statistics."""

    mean: Tensor
    variance: Tensor
    momentum: float
    seen: list[tuple[int, Tensor, Tensor]]  # numbers of each micro-batch, its mean and unbiased variance when it ran

    def commit(self) -> None:
        wide = torch.promote_types(self.mean.dtype, torch.float32)
        parts = (ChannelMoments(n, mean.to(wide), var.to(wide) * (n - 1)) for n, mean, var in self.seen)
        count, mean, squares = combined(parts)
        self.mean.lerp_(mean.to(self.mean.dtype), self.momentum)
        self.variance.lerp_((squares / (count - 1)).to(self.variance.dtype), self.momentum)


class DeferredStatistics:
    """`tensors` are a rank's tensors of the model, by name."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.counters = [tensor for name, tensor in tensors if name.rpartition(".")[2] == COUNTER]
        self.norms: dict[int, _Norm] = {}  # by where the running mean lies in memory
        self.scratch = torch.compiler.disable(self._scratch)  # not to be part of what is compiled

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the passes of a step; statistics and counters change when it ends."""
        before = [counter.clone() for counter in self.counters]
        self.norms.clear()
        with setting(step, statistics=self):
            yield
        with torch.no_grad():
            for norm in self.norms.values():
                norm.commit()
            for counter, start in zip(self.counters, before, strict=True):
                counter.copy_(torch.minimum(counter, start + 1))
        self.norms.clear()

    def _scratch(self, mean: Tensor, variance: Tensor, momentum: float, count: int) -> tuple[Tensor, Tensor]:
        """What stands for the running statistics while a micro-batch of so many numbers a channel is normalised.

        With a momentum of one it then has the statistics of the micro-batch, which the second run of a recompute region
        has seen already.
        """
        own = torch.zeros_like(mean), torch.zeros_like(variance)
        if not step.thread.replaying:
            self.norms.setdefault(mean.data_ptr(), _Norm(mean, variance, momentum, [])).seen.append((count, *own))
        return own


def statistics_of(how: str, tensors: Iterable[tuple[str, Tensor]]) -> Callable[[], AbstractContextManager[None]]:
    """What is around the passes of each step, by `batch_norm` of the train file."""
    return DeferredStatistics(tensors).step if how == "deferred" else nullcontext
