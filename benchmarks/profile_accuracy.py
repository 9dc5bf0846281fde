"""The symbolic step against measured ones: `python -m benchmarks.profile_accuracy --truth FILE`.

FILE has the form that `benchmarks.measure_steps` writes. Every row is traced and profiled here, without its GPU, and
its memory is compared with the measured one: resident, after forward, peak of the forward and of the backward pass,
and of the step. Nothing is fitted per model; `--workspace` is what the libraries of the card hold (on an H200 72 MB).
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure_steps import locate
from pipeline.ir.graph import OpGraph
from stages.profile.step import StepMemory, profile_step
from stages.trace.build import fake_mode, to_fake
from stages.trace.chain import find_chain
from stages.trace.export import export_loss
from stages.trace.lower import lower
from stages.trace.simplify import simplify

COLUMNS = {
    "resident": "resident_bytes",
    "after_forward": "after_fwd_bytes",
    "forward_peak": "fwd_peak_bytes",
    "backward_peak": "bwd_peak_bytes",
    "peak": "step_peak_bytes",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--workspace", type=float, default=72e6, help="bytes that the card's libraries hold")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = [row for row in json.loads(arguments.truth.read_text())["rows"] if "measured" in row]
    errors: list[float] = []
    seconds: list[float] = []
    print(f"{'model':15}{'mode':6}" + "".join(f"{name:>24}" for name in COLUMNS) + f"{'seconds':>9}")
    for row in rows:
        start = time.perf_counter()
        try:
            found = profile_row(row, int(arguments.workspace))
        except (NotImplementedError, RuntimeError) as error:
            print(f"{row['name']:15}{row['mode']:6}  not simulated: {str(error).splitlines()[0]}")
            continue
        seconds.append(time.perf_counter() - start)
        print(f"{row['name']:15}{row['mode']:6}" + "".join(_cell(found, row, name) for name in COLUMNS), end="")
        print(f"{seconds[-1]:9.1f}")
        errors.append(abs(found.peak / row["measured"]["step_peak_bytes"] - 1))
    result = {
        "rows": len(rows),
        "simulated": len(errors),
        "peak_error_median": round(statistics.median(errors), 5),
        "peak_error_worst": round(max(errors), 5),
        "seconds": round(sum(seconds), 1),
    }
    print(json.dumps(result))
    return 0


def _cell(found: StepMemory, row: dict[str, Any], name: str) -> str:
    ours, theirs = getattr(found, name), row["measured"][COLUMNS[name]]
    return f"{ours / 1e6:8.0f}/{theirs / 1e6:6.0f}{100 * (ours / theirs - 1):+7.1f}%"


def profile_row(row: dict[str, Any], workspace: int) -> StepMemory:
    precision = "amp" if row["mode"] == "amp" else "native"
    return profile_step(trace_row(row), "cuda", precision, optimizer_copies=2.0, workspace=workspace).memory


def trace_row(row: dict[str, Any]) -> OpGraph:
    half = row["mode"] == "bf16"
    with torch.device("meta"):
        model = locate(row["model_class"])(locate(row["config_class"])(**row["config"]))
    mode = fake_mode()
    to_fake(model.bfloat16() if half else model, mode).train()
    with mode:
        batch = {
            name: torch.empty(spec["shape"], dtype=torch.bfloat16 if half and "float" in spec["dtype"] else
                              getattr(torch, spec["dtype"]))
            for name, spec in row["batch"].items()
        }  # fmt: skip
    program = export_loss(model, batch)
    return find_chain(simplify(lower(program, model, tuple(batch), keep_casts=row["mode"] == "amp")))


if __name__ == "__main__":
    sys.exit(main())
