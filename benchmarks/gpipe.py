"""GPipe's law on two ranks: `python -m benchmarks.gpipe`.

K = 2 equal partitions with M micro-batches: at best a share M / (M + K - 1) of the step is work. Measured is the share
that is: the time in which both ranks run their partitions' forward and backward passes, each on its own and at once,
over the time of the pipeline's passes, both without the optimizer. The two are run in turn, so that what else the
machine does meets both alike; figures are medians of the pairs. The model is a stack of linear layers.

The last line is one JSON object; the bar is 0.9 of the ideal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from shardwright.pipeline.ir.plan import Partition, Plan, Prediction, Region
from shardwright.pipeline.models import mlp
from shardwright.pipeline.sharding.partitions import restricted
from shardwright.pipeline.tracing.chain import find_chain
from shardwright.pipeline.tracing.export import export_loss
from shardwright.pipeline.tracing.lower import lower as to_ops
from shardwright.pipeline.tracing.simplify import simplify
from shardwright.stages.codegen.partitions import write_partitions
from shardwright.stages.train.engines.pipelined import PipelinedEngine
from tests.unpipelined import replicated

BAR = 0.9
PARTITIONS = 2


def main() -> int:
    args = _arguments()
    pairs = measured(args.width, args.layers, args.batch, args.micro_batches, args.pairs)
    ideal = args.micro_batches / (args.micro_batches + PARTITIONS - 1)
    shares = [work / step for work, step in pairs]
    efficiency = statistics.median(shares)
    print(f"{args.micro_batches} micro-batches: a share of {efficiency:.3f} of the step is work, at best {ideal:.3f}")
    print(json.dumps({"efficiency": efficiency, "ideal": ideal, "ratio": efficiency / ideal, "bar": BAR}))
    return 0 if efficiency / ideal >= BAR else 1


def measured(width: int, layers: int, batch: int, micro_batches: int, pairs: int) -> list[tuple[float, float]]:
    """Seconds of the work alone, and of the pipeline's passes, means over the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "module.py"
        path.write_text(program(width, layers, batch, micro_batches))
        found = processes.get_context("spawn").SimpleQueue()
        processes.spawn(_rank, (folder, _job(path, width, layers, batch), pairs, found), PARTITIONS)
        times: list[tuple[float, float]] = found.get()
    return times


def program(width: int, layers: int, batch: int, micro_batches: int) -> str:
    """GPipe of the stack's two halves, each on one device."""
    model = mlp.build(**_sizes(width, layers))
    sample = {"inputs": torch.randn(batch, width), "targets": torch.zeros(batch, dtype=torch.int64)}
    graph = find_chain(simplify(to_ops(export_loss(model, sample), model, tuple(sample))))
    sharding = replicated(graph)
    ends = [0, _middle(graph, layers), len(graph.chain)]
    partitions = tuple(
        Partition(
            first,
            end - 1,
            (("d0", 1),),
            restricted(graph, sharding, first, end - 1),
            tuple(Region(link, link, False, ()) for link in range(first, end)),
            micro_batches,
            0,
            0.0,
        )
        for first, end in pairwise(ends)
    )
    plan = Plan("cpu", 0, partitions, Prediction(*[0.0] * 7), (), micro_batches, "gpipe")  # type: ignore[arg-type]
    return write_partitions(graph, plan)


def _sizes(width: int, layers: int) -> dict[str, int]:
    """With the one to the classes, so many layers, all of one size."""
    return {"features": width, "width": width, "classes": width, "depth": layers - 1}


def _middle(graph: Any, layers: int) -> int:
    """The first link of the second half."""
    own = f"hidden.{layers // 2}"
    return next(n for n, link in enumerate(graph.chain) if graph.op(link.ops[0]).module.endswith(own))


def _job(path: Path, width: int, layers: int, batch: int) -> dict[str, Any]:
    module = {"_target_": "shardwright.pipeline.models.mlp.build", **_sizes(width, layers)}
    inputs = {"shape": [batch, width], "dtype": "float32"}
    targets = {"shape": [batch], "dtype": "int64"}
    data = {
        "_target_": "shardwright.pipeline.models.data.ClassVectors",
        "features": width,
        "classes": width,
        "samples": batch,
    }
    optimizer = {"_target_": "torch.optim.SGD", "lr": 1e-3}
    return {
        "module_path": str(path),
        "model": {"precision": "fp32", "module": module, "batch": {"inputs": inputs, "targets": targets}},
        "data": {"dataset": data, "shuffle": False, "seed": 0},
        "train": {
            "seed": 0,
            "init_from": None,
            "clip_norm": None,
            "running_stats": "exact",
            "optimizer": optimizer,
            "evaluate": {"every": 0, "batches": 1},
        },
        "where": {"model": "model", "data": "data", "train": "train"},
    }


def _rank(rank: int, folder: str, job: dict[str, Any], pairs: int, found: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // PARTITIONS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PARTITIONS)
    engine = PipelinedEngine(job)
    batches = [engine.on_device(batch) for batch in engine.batches(0)]
    for _ in range(2):  # warm up
        _pipeline(engine, batches), _work(engine, batches)
    timed = [(_mean(_work(engine, batches)), _mean(_pipeline(engine, batches))) for _ in range(pairs)]
    if rank == 0:
        found.put(timed)
    dist.barrier()
    dist.destroy_process_group()


def _pipeline(engine: PipelinedEngine, batches: list[Any]) -> float:
    """Seconds of a step's passes."""
    dist.barrier()
    start = time.perf_counter()
    engine.pipeline.run_passes(_given(engine, batches))
    return time.perf_counter() - start


def _work(engine: PipelinedEngine, batches: list[Any]) -> float:
    """Seconds of this rank's part of them, with made-up values in place of what the other would send."""
    (partition,), (stage,) = engine.partitions, engine.pipeline.stages
    entering = {}
    if stage.before is not None:
        transfers = stage.before.transfers(0, 0).items()
        entering = {name: torch.randn(transfer.shape or (), requires_grad=True) for name, transfer in transfers}
    dist.barrier()
    start = time.perf_counter()
    engine.pipeline.start(_given(engine, batches))
    results = [partition.forward(number, entering) for number in range(engine.passes)]
    for found in results:
        last = stage.after is None
        partition.backward([found[0] / engine.passes] if last else found, [None if last else t.detach() for t in found])
    partition.gradients.wait()
    return time.perf_counter() - start


def _given(engine: PipelinedEngine, batches: list[Any]) -> dict[int, list[Any]]:
    return {n: [partial(engine.given, n, batch) for batch in batches] for n in engine.places.numbers}


def _mean(seconds: float) -> float:
    """Over the ranks."""
    total = torch.tensor(seconds)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8, help="an even number")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=128, help="samples of a micro-batch")
    parser.add_argument("--pairs", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
