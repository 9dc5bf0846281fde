"""What a GPU's host takes to issue work, beside a host that is known (`stages.cluster.fit.host_pace`).

What an op costs the host in a step cannot be timed by itself: called again and again it is two or three times as fast.
So `HostPace` was fitted to steps of models on the host of an H200, and the short works below say how much slower or
faster than that one a host is: at ops, backward passes, recompute regions and optimizers. Their tensors are so small
that the GPU waits for each kernel, and what is timed is the issuing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.runtime.recompute.regions import kept, recompute
from stages.cluster.timing import Clock, slowest

T = TypeVar("T")
ROWS, WIDTH, ROUNDS, PARAMETERS = 16, 64, 12, 96


def measure_host(clock: Clock) -> dict[str, float]:
    """Seconds of the works in `stages.cluster.fit.KNOWN_HOST`."""
    x, weight, bias = (
        torch.randn(*shape, device=clock.device, requires_grad=True)
        for shape in ((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,))
    )

    def once(y: Tensor) -> Tensor:
        return _ops(y, weight, bias)

    def many() -> Tensor:
        y = x
        for _ in range(ROUNDS):
            y = once(y)
        return y

    forward, backward = _both(clock, many)
    region, keeping = (
        sum(_both(clock, run))
        for run in (lambda: recompute(once, x), lambda: recompute(lambda y: _ops(y, weight, bias, kept), x))
    )
    return {
        "forward": forward,
        "backward": backward,
        "region": region,
        "kept": max(0.0, keeping - region),
        "optimizer": _optimizer(clock),
    }


def _ops(x: Tensor, weight: Tensor, bias: Tensor, run: Callable[..., Tensor] | None = None) -> Tensor:
    normed = F.layer_norm(x, (WIDTH,), bias, bias)
    made = run(F.linear, normed, weight, bias) if run else F.linear(normed, weight, bias)
    return F.softmax(F.gelu(made) * x, -1) + x


def _both(clock: Clock, run: Callable[[], Tensor]) -> tuple[float, float]:
    """Of a forward pass and its backward pass, each on an idle device; the first two are not counted."""
    forward, backward = [], []
    for number in range(clock.repeats + 2):
        result, there = _issued(clock, run)
        _, back = _issued(clock, result.sum().backward)
        if number > 1:
            forward.append(there)
            backward.append(back)
    return clock.reduce(slowest(forward)), clock.reduce(slowest(backward))


def _optimizer(clock: Clock) -> float:
    parameters = [nn.Parameter(torch.randn(WIDTH, device=clock.device)) for _ in range(PARAMETERS)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    times = [_issued(clock, optimizer.step)[1] for _ in range(clock.repeats + 2)]
    return clock.reduce(slowest(times[2:]))


def _issued(clock: Clock, work: Callable[[], T]) -> tuple[T, float]:
    clock.settle()
    start = time.perf_counter()
    found = work()
    return found, time.perf_counter() - start
