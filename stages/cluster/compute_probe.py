"""What one device computes: products over sizes and dtypes, copies, launches, ops with a pace of their own, AdamW."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from shardwright.pipeline.rates.compute import optimizer_bytes
from shardwright.pipeline.runtime.programs.local_ops import batch_norm
from shardwright.pipeline.runtime.programs.mesh import set_meshes
from shardwright.stages.cluster.host_probe import measure_host
from shardwright.stages.cluster.timing import Clock, Work, slowest

SIDES = {"cpu": (32, 64, 128, 256, 384), "cuda": (128, 512, 1024, 2048, 4096)}
HALF_SIDES = {"cpu": (64, 128, 256), "cuda": (128, 512, 1024, 2048, 4096, 8192)}
HALF_DTYPES = {"cpu": (torch.bfloat16,), "cuda": (torch.bfloat16, torch.float16)}
# On a GPU more than its caches hold: from there a small copy comes faster than memory can move it.
COPIES = {"cpu": (1 << 14, 1 << 17, 1 << 20, 1 << 22), "cuda": (1 << 26, 1 << 27, 1 << 28)}
OPTIMIZED = {"cpu": (1 << 8, 1 << 14, 1 << 17, 1 << 20), "cuda": (1 << 8, 1 << 20, 1 << 24)}
ROWS, COLUMNS = 128, 512  # of the tensor on which ops bound by arithmetic are timed
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten.gelu.default": F.gelu,
    "aten.silu.default": F.silu,
    "aten.tanh.default": torch.tanh,
    "aten.sigmoid.default": torch.sigmoid,
    "aten.exp.default": torch.exp,
    "aten.softmax.int": lambda x: torch.softmax(x, -1),
    "aten.log_softmax.int": lambda x: torch.log_softmax(x, -1),
    "aten.batch_norm.default": lambda x: F.batch_norm(x.view(8, 16, -1), None, None, training=True),
    "aten.layer_norm.default": lambda x: F.layer_norm(x, (COLUMNS,)),
    "aten.cross_entropy_loss.default": lambda x: F.cross_entropy(x, torch.arange(ROWS, device=x.device)),
}
CONVOLUTIONS = ((8, 32, 32), (8, 64, 16))  # batch, channels, pixels; kernels of 3 x 3
ATTENTIONS = ((8, 4, 64, 32), (4, 4, 128, 64))  # batch, heads, length, width of a head
THIN = ((8, 1024, 1024), (8, 512, 2048), (8, 2048, 512))  # rows, inputs, outputs
CACHES = "/sys/devices/system/cpu/cpu0/cache"  # of Linux, with a folder for each
CACHE = 32 << 20  # bytes of the largest one, where they are not told
MOST_TENSORS = 64  # that are gone through in turn, so that none is in a cache
FASTER = 0.9  # of the seconds with oneDNN
LONG_S = 0.01  # a product that takes this long is the last of its dtype
ENOUGH_S, MOST_CALLS = 1e-3, 200  # short work is called again and again in one measurement, up to this


def measure_compute(clock: Clock) -> dict[str, Any]:
    device = clock.device
    on_cpu = device == "cpu"  # on a GPU these ops are bound by memory
    onednn = not on_cpu or onednn_is_faster(clock)
    torch.backends.mkldnn.enabled = onednn and torch.backends.mkldnn.enabled
    workspace, biased = (0, 0) if on_cpu else _workspaces(clock)  # before other products have a bias
    # Before all the rest and after it: a host may be slower for seconds (one was taken for a host 1.4 times as slow).
    hosts = [] if on_cpu else [measure_host(clock)]
    found = {
        "onednn": onednn,
        "matmul": _products(clock, SIDES[device], torch.float32),
        "half": {
            str(dtype).removeprefix("torch."): half_products(clock, HALF_SIDES[device], dtype)
            for dtype in HALF_DTYPES[device]
        },
        "copy": [_copy(clock, n) for n in COPIES[device]],
        "launch": _launch(clock),
        "launch_backward": _launch_backward(clock),
        "ops": _own_paces(clock) if on_cpu else {},
        "flops": _own_flops(clock) if on_cpu else {},
        "bodies": _bodies(clock) if on_cpu else {},
        "thin": _thin(clock) if on_cpu else None,
        "optimizer": [_optimizer(clock, n) for n in OPTIMIZED[device]],
        "processors": None if on_cpu else torch.cuda.get_device_properties(device).multi_processor_count,
        "workspace": workspace,
        "workspace_biased": biased,
    }
    return found | {"host": None if on_cpu else min(*hosts, measure_host(clock))}


def _workspaces(clock: Clock) -> tuple[int, int]:
    """What cuBLAS keeps when all tensors are gone, for each thread that calls it: of products, and more with a bias."""
    kept = []
    for work in (products, recomputed_products):
        for dtype in (torch.float32, *HALF_DTYPES[clock.device]):
            work(torch.randn(512, 512, device=clock.device, dtype=dtype, requires_grad=True))
        clock.settle()
        gc.collect()
        kept.append(int(torch.cuda.memory_allocated()))
    return kept[0], (kept[1] - kept[0]) // 2  # once for forward, once for what backward repeats


def products(x: torch.Tensor) -> None:
    F.linear(x, x).sum().backward()


def recomputed_products(x: torch.Tensor) -> None:
    """With a bias, in the thread of backward too: the first of two, as what is repeated ends before the last."""
    found: Any = checkpoint(lambda x: F.linear(F.linear(x, x, x[0]), x, x[0]), x, use_reentrant=False)
    found.sum().backward()


def onednn_is_faster(clock: Clock) -> bool:
    """Of a convolution, a linear layer and GELU; where it hardly matters it stays as torch has it."""
    seconds = {}
    before = torch.backends.mkldnn.enabled
    usual: list[tuple[Any, ...]] = [
        (partial(F.conv2d, padding=1), torch.randn(8, 64, 16, 16), torch.randn(64, 64, 3, 3)),
        (F.linear, torch.randn(512, 256), torch.randn(1024, 256)),
        (F.gelu, torch.randn(512, 1024)),
    ]
    for enabled in (True, False):
        torch.backends.mkldnn.enabled = enabled
        seconds[enabled] = sum(sum(_both(clock, work, *inputs)) for work, *inputs in usual)
    torch.backends.mkldnn.enabled = before
    return seconds[False] > FASTER * seconds[True]


def _products(clock: Clock, sides: tuple[int, ...], dtype: torch.dtype) -> list[dict[str, float]]:
    """Linear layers of a batch of `4 side` rows: the shape that training mostly sees.

    Up to the first that takes long: a CPU without units for a dtype may need seconds.
    """
    found: list[dict[str, float]] = []
    for side in sides:
        if not found or found[-1]["seconds"] < LONG_S:
            x, w = (torch.randn(n, side, device=clock.device).to(dtype) for n in (4 * side, side))
            found.append({"flops": 8.0 * side**3, "seconds": _seconds(clock, partial(F.linear, x, w))})
    return found


def half_products(clock: Clock, sides: tuple[int, ...], dtype: torch.dtype) -> list[dict[str, float]]:
    """On a CPU without units for the dtype torch switches oneDNN off for good, and other ops run with other kernels."""
    enabled = torch.backends.mkldnn.enabled
    try:
        return _products(clock, sides, dtype)
    finally:
        torch.backends.mkldnn.enabled = enabled


def _copy(clock: Clock, elements: int) -> dict[str, float]:
    """On a GPU a plain one, which `Card.memory` is; a sum reads twice what it writes, and an H200 reads faster."""
    x = torch.randn(elements, device=clock.device)
    if clock.device == "cuda":
        return {"bytes": 8.0 * elements, "seconds": _seconds(clock, x.clone)}
    y = torch.randn(elements)
    return {"bytes": 12.0 * elements, "seconds": _seconds(clock, lambda: x + y)}


def _seconds(clock: Clock, work: Work) -> float:
    """Of one call, where the first may load libraries and a short one drowns in what it takes to time it."""
    work()
    once = slowest([clock.once(work)])[0]
    return clock.seconds(work, max(1, min(MOST_CALLS, int(ENOUGH_S / once))))


def _own_paces(clock: Clock) -> dict[str, dict[str, float]]:
    """Seconds for each element."""
    seconds = {name: _both(clock, function, torch.randn(ROWS, COLUMNS)) for name, function in OPS.items()}
    size = ROWS * COLUMNS
    return {name: {"forward": there / size, "backward": back / size} for name, (there, back) in seconds.items()}


def _both(clock: Clock, function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[float, float]:
    """Seconds forward and backward, with gradients of all inputs."""
    own = [x.requires_grad_() for x in inputs]
    found = function(*own)
    gradient = torch.ones_like(found) if isinstance(found, torch.Tensor) else tuple(map(torch.ones_like, found))
    del found
    forward = clock.seconds(lambda: function(*own))
    both = clock.seconds(lambda: torch.autograd.grad(function(*own), own, gradient))
    return forward, max(both - forward, 0.0)


def _own_flops(clock: Clock) -> dict[str, dict[str, float]]:
    """Seconds for each FLOP. What a mask hides counts as no FLOP, and takes a CPU as long."""
    images = [(torch.randn(b, c, p, p), torch.randn(c, c, 3, 3)) for b, c, p in CONVOLUTIONS]
    heads = [tuple(torch.randn(*shape) for _ in range(3)) for shape in ATTENTIONS]
    attention, causal = (partial(F.scaled_dot_product_attention, is_causal=causal) for causal in (False, True))
    # A function, its inputs, FLOPs for each element of the first and each size of one of its dims, how many backward.
    kinds: dict[str, tuple[Any, Any, float, int, float]] = {
        "aten.conv2d.default": (partial(F.conv2d, padding=1), images, 18.0, 1, 2),
        "aten.scaled_dot_product_attention.default": (attention, heads, 4.0, 2, 2.5),
        "aten.scaled_dot_product_attention.default, causal": (causal, heads, 2.0, 2, 2.5),
    }
    found = {}
    for name, (function, cases, each, dim, more) in kinds.items():
        forward, backward = map(sum, zip(*(_both(clock, function, *inputs) for inputs in cases), strict=True))
        flops = sum(each * first.shape[dim] * first.numel() for first, *_ in cases)
        found[name] = {"forward": forward / flops, "backward": backward / (more * flops)}
    return found


def _thin(clock: Clock) -> list[dict[str, float]]:
    """Linear layers of a few rows, where reading the weight takes longer than the arithmetic.

    Several in turn, as a step goes from layer to layer: a weight is in no cache when its turn comes again.
    """
    found = []
    for rows, before, after in THIN:
        weights = [torch.randn(after, before) for _ in range(_beyond_caches(4 * before * after))]
        seconds = _both(clock, lambda x, *own: tuple(F.linear(x, w) for w in own), torch.randn(rows, before), *weights)
        forward, backward = (one / len(weights) for one in seconds)
        moved = 4.0 * (rows * before + before * after + rows * after)
        found.append({"flops": 2.0 * rows * before * after, "bytes": moved, "forward": forward, "backward": backward})
    return found


def _beyond_caches(nbytes: int) -> int:
    """How many tensors of that many bytes fill the largest cache of a CPU."""
    told = (path.read_text().strip() for path in Path(CACHES).glob("index*/size"))
    sizes = [int(size[:-1]) << 10 for size in told if size.endswith("K")]
    return max(2, min(MOST_TENSORS, -(-max(sizes, default=CACHE) // nbytes)))


def _optimizer(clock: Clock, elements: int) -> dict[str, float]:
    """A step of AdamW on one parameter, which keeps two tensors of its size.

    On a CPU one of several, as a model has: what it reads is in no cache since the step before.
    """
    count = 1 if clock.device == "cuda" else _beyond_caches(16 * elements)
    parameters = [torch.nn.Parameter(torch.ones(elements, device=clock.device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    seconds = clock.seconds(optimizer.step, 5 if count == 1 else 1) / count
    return {"bytes": optimizer_bytes(4.0 * elements, 2), "seconds": seconds}


def _bodies(clock: Clock) -> dict[str, dict[str, float]]:
    """Seconds that local forms take longer than their ops, without what they send: many ops on few numbers."""
    set_meshes([{"alone": 1}] * dist.get_world_size())
    running = torch.zeros(16), torch.ones(16)

    def norm(axis: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return batch_norm(x, weight, bias, *running, True, 0.1, 1e-5, axis=axis)

    tensors = torch.randn(2, 16, 4), torch.ones(16), torch.zeros(16)
    own, usual = (_both(clock, partial(norm, axis), *tensors) for axis in ("alone", ""))
    return {"batch": {"forward": max(own[0] - usual[0], 0.0), "backward": max(own[1] - usual[1], 0.0)}}


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
