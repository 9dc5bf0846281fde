"""The symbolic step against measured ones: `python -m benchmarks.profile_accuracy --truth FILE`.

FILE has the form that `benchmarks.measure_steps` writes. Every row is traced and profiled here, without its GPU, and
compared with what was measured: memory resident, after forward and at the step's peak; seconds of forward, backward,
optimizer and step. Nothing is fitted per model: the card is described by the file's calibration block, and
`--workspace` is what its libraries hold (on an H200 72 MB). Beside it stands torch's own MemTracker, for the rows that
it can do (`--no-peer` leaves it out: it takes longer than we do).
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure_steps import locate
from shardwright.pipeline.cost.unsplit import StepSeconds, step_seconds
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.rates.kernels import Card
from shardwright.pipeline.tracing.build import fake_mode, to_fake
from shardwright.pipeline.tracing.chain import find_chain
from shardwright.pipeline.tracing.export import export_loss
from shardwright.pipeline.tracing.lower import lower
from shardwright.pipeline.tracing.simplify import simplify
from shardwright.stages.profile.costs import all_kernels
from shardwright.stages.profile.step import profile_step
from shardwright.stages.profile.timeline import StepMemory

MEMORY = {"resident": "resident_bytes", "after_forward": "after_fwd_bytes", "peak": "step_peak_bytes"}
SECONDS = {"forward": "fwd_ms", "backward": "bwd_ms", "optimizer": "opt_ms", "step": "step_ms"}


@dataclass(frozen=True)
class Found:
    memory: StepMemory
    seconds: StepSeconds
    took: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--workspace", type=float, default=72e6, help="bytes that the card's libraries hold")
    parser.add_argument("--no-peer", action="store_true", help="leave out torch's MemTracker")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    truth = json.loads(arguments.truth.read_text())
    _warn_of_versions(truth)
    card = card_of(truth["calibration"])
    rows = [row for row in truth["rows"] if "measured" in row]
    found: list[tuple[dict[str, Any], Found]] = []
    print("predicted / measured: memory in MB, time in ms")
    print(
        f"{'model':15}{'mode':6}" + "".join(f"{name:>22}" for name in (*MEMORY, *SECONDS)) + f"{'took':>7}  MemTracker"
    )
    for row in rows:
        try:
            one = profile_row(row, card, int(arguments.workspace))
        except (NotImplementedError, RuntimeError) as error:
            print(f"{row['name']:15}{row['mode']:6}  not simulated: {str(error).splitlines()[0]}")
            continue
        found.append((row, one))
        print(f"{row['name']:15}{row['mode']:6}{_cells(one, row)}{one.took:6.1f}s", end="", flush=True)
        print("" if arguments.no_peer else f"  {_peer(row)}", flush=True)
    peaks = [abs(one.memory.peak / row["measured"]["step_peak_bytes"] - 1) for row, one in found]
    steps = [abs(1e3 * one.seconds.step / row["measured"]["step_ms"] - 1) for row, one in found]
    result = {
        "rows": len(rows),
        "simulated": len(found),
        "peak_error_median": round(statistics.median(peaks), 5),
        "peak_error_worst": round(max(peaks), 5),
        "step_error_median": round(statistics.median(steps), 5),
        "step_error_worst": round(max(steps), 5),
        "seconds": round(sum(one.took for _, one in found), 1),
    }
    print(json.dumps(result))
    return 0


def card_of(calibration: dict[str, Any]) -> Card:
    """The best rate of a product in each precision: small ones are bound by their launch, which is priced apart."""
    products: dict[str, float] = {}
    for name, rate in calibration["matmul_tflops"].items():
        dtype = name.partition("_")[2]
        products[dtype] = max(products.get(dtype, 0.0), 1e12 * rate)
    return Card(products, 1e12 * calibration["copy_tb_per_s"])


def _warn_of_versions(truth: dict[str, Any]) -> None:
    """Other versions of transformers run other ops (attention above all)."""
    import transformers

    measured = truth.get("transformers")
    if measured and measured != transformers.__version__:
        print(f"note: measured with transformers {measured}, here is {transformers.__version__}: rows may differ")


def _cells(one: Found, row: dict[str, Any]) -> str:
    measured = row["measured"]
    memory = [(getattr(one.memory, name) / 1e6, measured[key] / 1e6, 0) for name, key in MEMORY.items()]
    seconds = [(1e3 * getattr(one.seconds, name), measured[key], 1) for name, key in SECONDS.items()]
    return "".join(
        f"{f'{ours:.{digits}f}/{theirs:.{digits}f} {100 * (ours / theirs - 1):+.1f}%':>22}"
        for ours, theirs, digits in (*memory, *seconds)
    )


def profile_row(row: dict[str, Any], card: Card, workspace: int) -> Found:
    start = time.perf_counter()
    graph = trace_row(row)
    step = profile_step(graph, "cuda", "amp" if row["mode"] == "amp" else "native", workspace=workspace)
    seconds = step_seconds(graph, all_kernels(graph, step), card)
    return Found(step.memory, seconds, time.perf_counter() - start)


def trace_row(row: dict[str, Any]) -> OpGraph:
    mode = fake_mode()
    model, batch = _build(row, mode)
    amp = row["mode"] == "amp"
    program = export_loss(model, batch, "cuda", amp=amp)
    return find_chain(simplify(lower(program, model, tuple(batch), amp=amp)))


def _build(row: dict[str, Any], mode: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    half = row["mode"] == "bf16"
    with torch.device("meta"):
        model = locate(row["model_class"])(locate(row["config_class"])(**row["config"]))
    to_fake(model.bfloat16() if half else model, mode).train()
    with mode:
        batch = {
            name: torch.empty(spec["shape"], dtype=torch.bfloat16 if half and "float" in spec["dtype"] else
                              getattr(torch, spec["dtype"]))
            for name, spec in row["batch"].items()
        }  # fmt: skip
    return model, batch


def _peer(row: dict[str, Any]) -> str:
    """The same step under torch's MemTracker on fake tensors."""
    start = time.perf_counter()
    try:
        peak = _tracked_peak(row)
    except Exception as error:  # a peer that cannot do a row says so in its column
        return f"cannot: {type(error).__name__}: {str(error).splitlines()[0][:60] if str(error) else ''}"
    took = time.perf_counter() - start
    theirs = row["measured"]["step_peak_bytes"]
    return f"peak {peak / 1e6:.0f} {100 * (peak / theirs - 1):+.1f}% {took:.1f}s"


def _tracked_peak(row: dict[str, Any]) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker

    mode = fake_mode()
    model, batch = _build(row, mode)
    with mode:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batch.values())
        with tracker:
            for number in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=row["mode"] == "amp"):
                    loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if number == 0:
                    tracker.reset_mod_stats()
        snapshot = tracker.get_tracker_snapshot("peak")
    return int(max(figures["Total"] for figures in snapshot.values()))


if __name__ == "__main__":
    sys.exit(main())
