"""What snapshots in the background cost: `python -m benchmarks.snapshots [--pairs 12]`.

A GPT on two CPU ranks (ZeRO, AdamW). Stretches of 20 steps are run in turn, with a snapshot at the beginning and
without; a stretch ends when its last step is done and its snapshot is on the disk. The ratio is that of their times,
the geometric mean over pairs; each pair has its own order. Bar: 1.03. Beside it stands the ratio of the processor time
of rank 0 with all its threads, which other work on the machine hardly touches, and how long a copy to the host holds
training up. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks import small_project
from shardwright.pipeline.config import load_config
from shardwright.pipeline.launch.launch import run_ranks
from shardwright.pipeline.launch.rank import follow_parent
from shardwright.pipeline.launch.rendezvous import init_process_group

EVERY, BAR = 20, 1.03
SIZES = {"width": 256, "batch": 16, "context": 128, "layers": 4}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "project"
        small_project.make(root, {"steps": 1}, **SIZES)
        found = run_ranks("benchmarks.snapshots", job(root, given.pairs), 2, 3600)
    ratios = [with_one / without for with_one, without in found["seconds"]]
    mean = statistics.fmean(map(math.log, ratios))
    processor = statistics.fmean(math.log(with_one / without) for with_one, without in found["processor"])
    error = statistics.stdev(map(math.log, ratios)) / math.sqrt(len(ratios)) if len(ratios) > 1 else float("nan")
    print(f"{'with':>9}{'without':>9}{'ratio':>8}   seconds of {EVERY} steps")
    for (with_one, without), ratio in zip(found["seconds"], ratios, strict=True):
        print(f"{with_one:9.2f}{without:9.2f}{ratio:8.3f}")
    ratio = math.exp(mean)
    figures = {"ratio": ratio, "standard_error": error, "processor_ratio": math.exp(processor), "bar": BAR}
    figures |= {"held_up_s": statistics.median(found["held_up"]), "snapshot_mb": found["bytes"] / 1e6}
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
    return 0 if ratio <= BAR or mean - 2 * error <= math.log(BAR) else 1


def job(root: Path, pairs: int) -> dict[str, Any]:
    config = load_config(root)
    return {
        "module_path": str(root / "runs/codegen/module.py"),
        **{group: config.plain(group) for group in ("model", "data", "train")},
        "where": dict.fromkeys(("model", "data", "train"), "benchmark"),
        "folder": str(root / "snapshots"),
        "pairs": pairs,
    }


def rank(work: Path) -> None:
    """One of the two processes."""
    import torch.distributed as dist

    from shardwright.stages.train.engines.planned import PlannedEngine
    from shardwright.stages.train.snapshots.writer import SnapshotWriter

    follow_parent()
    given = json.loads((work / "job.json").read_text())
    init_process_group("gloo", timedelta(seconds=600))
    engine = PlannedEngine(given)
    snapshots = SnapshotWriter(Path(given["folder"]), 2, True, 600)
    done, held_up = 0, []

    def stretch(saves: bool, steps: int = EVERY) -> tuple[float, float]:
        """Seconds, and seconds of a processor."""
        nonlocal done
        dist.barrier()
        start, processor = time.perf_counter(), time.process_time()
        if saves:
            snapshots.take(engine, done, {})
            held_up.append(time.perf_counter() - start)
        for _ in range(steps):
            first, *later = engine.batches(done)
            engine.step(engine.on_device(first), later)
            done += 1
        outcome = snapshots.done(wait=True)
        assert (outcome is not None) == saves and (outcome is None or not outcome[1]), outcome
        return time.perf_counter() - start, time.process_time() - processor

    stretch(False, 3)
    stretch(True, 3)  # who writes which replica is settled, buffers are there
    pairs, draw = [], random.Random(0)
    for _ in range(given["pairs"]):
        order = draw.sample([True, False], 2)
        took = {saves: stretch(saves) for saves in order}
        pairs.append(list(zip(took[True], took[False], strict=True)))
    if dist.get_rank() == 0:
        size = sum(path.stat().st_size for path in max(Path(given["folder"]).iterdir()).iterdir())
        seconds, processor = zip(*pairs, strict=True)
        result = {"seconds": seconds, "processor": processor, "held_up": held_up[1:], "bytes": size}
        (work / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2 and (Path(sys.argv[1]) / "job.json").exists():
        rank(Path(sys.argv[1]))
    else:
        sys.exit(main(sys.argv[1:]))
