"""What one rank measures, with all ranks at work at once: `python -m stages.cluster.probe WORK` under torchrun."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pipeline.cost.compute import optimizer_bytes
from pipeline.launch import follow_parent, report_error
from pipeline.runtime.collectives import all_gather_into, reduce_scatter_from

MATMUL_SIDES = (32, 64, 128, 256, 384)
COPY_ELEMENTS = (1 << 14, 1 << 17, 1 << 20, 1 << 22)
SMALLEST_MESSAGE = 1024
OPTIMIZER_ELEMENTS = (1 << 8, 1 << 14, 1 << 17)
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
    "aten.cross_entropy_loss.default": lambda x: F.cross_entropy(x, torch.arange(ROWS)),
}


def main(work: Path) -> None:
    follow_parent()
    dist.init_process_group("gloo")
    try:
        job = json.loads((work / "job.json").read_text())
        result = measure(job)
        if dist.get_rank() == 0:
            (work / "result.json").write_text(json.dumps(result))
        dist.barrier()
    except Exception as error:  # one line for the user instead of a rank's traceback
        report_error(work, dist.get_rank(), f"{type(error).__name__}: {error}")
        raise
    finally:
        dist.destroy_process_group()


def measure(job: dict) -> dict:
    repeats = job["repeats"]
    return {
        "memory_bytes": psutil.virtual_memory().available // dist.get_world_size(),
        "matmul": [_matmul(side, repeats) for side in MATMUL_SIDES],
        "copy": [_copy(n, repeats) for n in COPY_ELEMENTS],
        "launch": _launch(repeats),
        "launch_backward": _launch_backward(repeats),
        "ops": {name: _op(function, repeats) for name, function in OPS.items()},
        "optimizer": [_optimizer(n, repeats) for n in OPTIMIZER_ELEMENTS],
        "collectives": _collectives(job["max_message_bytes"], repeats) if dist.get_world_size() > 1 else {},
    }


def timed(work: Callable[[], object], repeats: int, inner: int = 1) -> float:
    """Median seconds of one call, on the slowest rank; a first call is not counted."""
    work()
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(inner):
            work()
        times.append((time.perf_counter() - start) / inner)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _matmul(side: int, repeats: int) -> dict[str, float]:
    """A linear layer of a batch of `4 side` rows: the shape that training mostly sees."""
    x, w = torch.randn(4 * side, side), torch.randn(side, side)
    inner = max(1, int(2e7 / (8 * side**3)))
    return {"flops": 8.0 * side**3, "seconds": timed(lambda: F.linear(x, w), repeats, inner)}


def _copy(elements: int, repeats: int) -> dict[str, float]:
    a, b = torch.randn(elements), torch.randn(elements)
    return {"bytes": 12.0 * elements, "seconds": timed(lambda: a + b, repeats, max(1, (1 << 18) // elements))}


def _op(function: Callable[[torch.Tensor], torch.Tensor], repeats: int) -> dict[str, float]:
    """Seconds for each element, forward and backward."""
    x = torch.randn(ROWS, COLUMNS, requires_grad=True)
    gradient = torch.ones_like(function(x))
    forward = timed(lambda: function(x), repeats)
    both = timed(lambda: torch.autograd.grad(function(x), x, gradient), repeats)
    return {"forward": forward / x.numel(), "backward": max(both - forward, 0.0) / x.numel()}


def _optimizer(elements: int, repeats: int) -> dict[str, float]:
    """A step of AdamW on one parameter, which keeps two tensors of its size."""
    parameter = torch.nn.Parameter(torch.ones(elements))
    parameter.grad = torch.ones(elements)
    optimizer = torch.optim.AdamW([parameter])
    return {"bytes": optimizer_bytes(4.0 * elements, 2), "seconds": timed(optimizer.step, repeats, 5)}


def _launch(repeats: int) -> float:
    x = torch.ones(1)
    return timed(lambda: x + x, repeats, 200)


def _launch_backward(repeats: int) -> float:
    """What a step of the backward pass costs beyond its kernel: a chain of 64 tiny ops, forward seconds taken off."""
    x = torch.ones(1, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(64):
            y = y + y
        y.backward()

    def forward() -> None:
        y = x
        for _ in range(64):
            y = y + y

    whole, part = timed(chain, repeats), timed(forward, repeats)
    return max(whole - part, part) / 64


def _collectives(largest: float, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Each collective on messages from 1 KiB upwards; bytes are those of the unsplit tensor."""
    world = dist.get_world_size()
    sizes = [SMALLEST_MESSAGE]
    while sizes[-1] * 8 <= largest:
        sizes.append(sizes[-1] * 8)
    found: dict[str, list[dict[str, float]]] = {}
    for nbytes in sizes:
        piece = max(1, nbytes // 4 // world)
        whole, part, other = torch.ones(piece * world), torch.ones(piece), torch.ones(piece * world)
        moves: dict[str, Callable[[], object]] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "all_gather": lambda whole=whole, part=part: all_gather_into(whole, part),
            "reduce_scatter": lambda whole=whole, part=part: reduce_scatter_from(part, whole),
            "all_to_all": lambda whole=whole, other=other: dist.all_to_all_single(other, whole),
        }
        for name, move in moves.items():
            found.setdefault(name, []).append({"bytes": 4.0 * piece * world, "seconds": timed(move, repeats)})
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
