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

from pipeline.runtime.recompute.regions import replaying

COUNTER = "num_batches_tracked"  # of a torch.nn.BatchNorm: a program adds one for each micro-batch


class Moments(NamedTuple):
    """Of numbers of each channel: how many, their mean, and the sum of their squared deviations from it."""

    numbers: int
    mean: Tensor
    squares: Tensor


def combined(parts: Iterable[Moments]) -> Moments:
    """Of all these numbers together."""
    first, *rest = parts
    count, mean, squares = first
    for part in rest:
        before, count = count, count + part.numbers
        apart = part.mean - mean
        mean = mean + apart * (part.numbers / count)
        squares = squares + part.squares + apart.square() * (before * part.numbers / count)
    return Moments(count, mean, squares)


@dataclass(frozen=True)
class _Seen:
    """A micro-batch at a batch norm, whose mean and unbiased variance are written while it runs."""

    count: int
    mean: Tensor
    variance: Tensor

    def moments(self) -> Moments:
        wide = torch.promote_types(self.mean.dtype, torch.float32)
        return Moments(self.count, self.mean.to(wide), self.variance.to(wide) * (self.count - 1))


@dataclass(frozen=True)
class _Norm:
    """A batch norm in a step."""

    mean: Tensor  # its running statistics
    variance: Tensor
    momentum: float
    seen: list[_Seen]

    def commit(self) -> None:
        count, mean, squares = combined(each.moments() for each in self.seen)
        self.mean.lerp_(mean.to(self.mean.dtype), self.momentum)
        self.variance.lerp_((squares / (count - 1)).to(self.variance.dtype), self.momentum)


class Deferred:
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
        _Here.collector = self
        try:
            yield
        finally:
            _Here.collector = None
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
        seen = _Seen(count, torch.zeros_like(mean), torch.zeros_like(variance))
        if not replaying():
            self.norms.setdefault(mean.data_ptr(), _Norm(mean, variance, momentum, [])).seen.append(seen)
        return seen.mean, seen.variance


def statistics_of(setting: str, tensors: Iterable[tuple[str, Tensor]]) -> Callable[[], AbstractContextManager[None]]:
    """What is around the passes of each step, by `batch_norm` of the train file."""
    return Deferred(tensors).step if setting == "deferred" else nullcontext


class _Here:
    collector: Deferred | None = None


def collecting() -> Deferred | None:
    """Who collects the statistics of the step that runs; nobody where they change with each micro-batch."""
    return _Here.collector
