"""What a GPU's host takes to issue work, beside a host that is known (`stages.cluster.fit.host_pace`).

What an op costs the host in a step cannot be timed by itself: called again and again it is two or three times as fast.
So `HostPace` was fitted to steps of models on the host of an H200, and the short passes below say how much slower or
faster than that one a host is. Their tensors are so small that the GPU waits for each kernel, and what is timed is the
issuing. It is one figure: times of regions and optimizers by themselves differed by half from one try to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.stages.cluster.timing import Clock, slowest

T = TypeVar("T")
ROWS, WIDTH, ROUNDS = 16, 64, 12
REPEATS = 4  # times as many as other works: this one takes milliseconds


def measure_host(clock: Clock) -> float:
    """Seconds of a forward pass and its backward pass, each on an idle device; the first two are not counted."""
    shapes = (ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,)
    x, weight, bias = (torch.randn(*shape, device=clock.device, requires_grad=True) for shape in shapes)

    def forward() -> Tensor:
        y = x
        for _ in range(ROUNDS):
            y = _ops(y, weight, bias)
        return y

    times = []
    for number in range(REPEATS * clock.repeats + 2):
        result, there = _issued(clock, forward)
        _, back = _issued(clock, result.sum().backward)
        if number > 1:
            times.append(there + back)
    return clock.reduce(slowest(times))


def _ops(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    made = F.linear(F.layer_norm(x, (WIDTH,), bias, bias), weight, bias)
    return F.softmax(F.gelu(made) * x, -1) + x


def _issued(clock: Clock, work: Callable[[], T]) -> tuple[T, float]:
    clock.settle()
    start = time.perf_counter()
    found = work()
    return found, time.perf_counter() - start
