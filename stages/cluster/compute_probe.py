"""What one device computes: products over sizes and dtypes, copies, launches, ops bound by arithmetic, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from pipeline.cost.compute import optimizer_bytes
from stages.cluster.timing import Clock, Work, slowest

SIDES = {"cpu": (32, 64, 128, 256, 384), "cuda": (128, 512, 1024, 2048, 4096)}
HALF_SIDES = {"cpu": (64, 128, 256), "cuda": (128, 512, 1024, 2048, 4096, 8192)}
HALF_DTYPES = {"cpu": (torch.bfloat16,), "cuda": (torch.bfloat16, torch.float16)}
COPIES = {"cpu": (1 << 14, 1 << 17, 1 << 20, 1 << 22), "cuda": (1 << 18, 1 << 22, 1 << 25, 1 << 27)}
OPTIMIZED = {"cpu": (1 << 8, 1 << 14, 1 << 17), "cuda": (1 << 8, 1 << 20, 1 << 24)}
ROWS, COLUMNS = 128, 512  # of the tensor on which ops bound by arithmetic are timed
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten.gelu.default": F.gelu,
    "aten.silu.default": F.silu,
    "aten.tanh.default": torch.tanh,
    "aten.sigmoid.default": torch.sigmoid,
    "aten.exp.default": torch.exp,
    "aten.softmax.int": lambda x: torch.softmax(x, -1),
    "aten.log_softmax.int": lambda x: torch.log_softmax(x, -1),
    "aten.layer_norm.default": lambda x: F.layer_norm(x, (COLUMNS,)),
    "aten.cross_entropy_loss.default": lambda x: F.cross_entropy(x, torch.arange(ROWS, device=x.device)),
}
LONG_S = 0.01  # a product that takes this long is the last of its dtype
ENOUGH_S, MOST_CALLS = 1e-3, 200  # short work is called again and again in one measurement, up to this


def measure_compute(clock: Clock) -> dict[str, Any]:
    device = clock.device
    on_cpu = device == "cpu"  # on a GPU these ops are bound by memory
    return {
        "matmul": _products(clock, SIDES[device], torch.float32),
        "half": {
            str(dtype).removeprefix("torch."): _products(clock, HALF_SIDES[device], dtype)
            for dtype in HALF_DTYPES[device]
        },
        "copy": [_copy(clock, n) for n in COPIES[device]],
        "launch": _launch(clock),
        "launch_backward": _launch_backward(clock),
        "ops": {name: _op(clock, function) for name, function in OPS.items()} if on_cpu else {},
        "optimizer": [_optimizer(clock, n) for n in OPTIMIZED[device]],
        "processors": None if on_cpu else torch.cuda.get_device_properties(device).multi_processor_count,
    }


def _products(clock: Clock, sides: tuple[int, ...], dtype: torch.dtype) -> list[dict[str, float]]:
    """Up to the first that takes long: a CPU without units for a dtype may need seconds."""
    found: list[dict[str, float]] = []
    for side in sides:
        if not found or found[-1]["seconds"] < LONG_S:
            found.append(_matmul(clock, side, dtype))
    return found


def _matmul(clock: Clock, side: int, dtype: torch.dtype) -> dict[str, float]:
    """A linear layer of a batch of `4 side` rows: the shape that training mostly sees."""
    x = torch.randn(4 * side, side, device=clock.device).to(dtype)
    w = torch.randn(side, side, device=clock.device).to(dtype)
    return {"flops": 8.0 * side**3, "seconds": _seconds(clock, lambda: F.linear(x, w))}


def _copy(clock: Clock, elements: int) -> dict[str, float]:
    a, b = (torch.randn(elements, device=clock.device) for _ in range(2))
    return {"bytes": 12.0 * elements, "seconds": _seconds(clock, lambda: a + b)}


def _seconds(clock: Clock, work: Work) -> float:
    """Of one call, where the first may load libraries and a short one drowns in what it takes to time it."""
    work()
    once = slowest([clock.once(work)])[0]
    return clock.seconds(work, max(1, min(MOST_CALLS, int(ENOUGH_S / once))))


def _op(clock: Clock, function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
    """Seconds for each element, forward and backward."""
    x = torch.randn(ROWS, COLUMNS, requires_grad=True)
    gradient = torch.ones_like(function(x))
    forward = clock.seconds(lambda: function(x))
    both = clock.seconds(lambda: torch.autograd.grad(function(x), x, gradient))
    return {"forward": forward / x.numel(), "backward": max(both - forward, 0.0) / x.numel()}


def _optimizer(clock: Clock, elements: int) -> dict[str, float]:
    """A step of AdamW on one parameter, which keeps two tensors of its size."""
    parameter = torch.nn.Parameter(torch.ones(elements, device=clock.device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    return {"bytes": optimizer_bytes(4.0 * elements, 2), "seconds": clock.seconds(optimizer.step, 5)}


def _launch(clock: Clock) -> float:
    x = torch.ones(1, device=clock.device)
    return clock.seconds(lambda: x + x, 200)


def _launch_backward(clock: Clock) -> float:
    """What a step of the backward pass costs beyond its kernel: a chain of 64 tiny ops, forward seconds taken off."""
    x = torch.ones(1, device=clock.device, requires_grad=True)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(64):
            y = y + y
        return y

    whole, part = clock.seconds(lambda: chain().backward()), clock.seconds(chain)
    return max(whole - part, part) / 64
