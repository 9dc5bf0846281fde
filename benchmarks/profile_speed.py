"""Seconds and memory to trace and profile deep models: `python -m benchmarks.profile_speed`.

Each model has a process of its own on one core: GPT-2 XL (48 layers, 1.56B parameters), traced and profiled as for a
GPU under autocast, and GPT-2 of 12 and of 96 layers, of which the profile alone is compared: its cost must follow the
distinct blocks, not the depth (the core's own seconds, the fastest of nine: the two are not run at the same time, and
others may use the machine). Bars: XL under 20 s and 2 GiB; 96 layers at most 1.5 times 12. Measured memory is the
process's largest resident set, libraries included; the imports' seconds are shown apart, a user pays them once.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

MODELS = {
    "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
    "12 layers": {"n_layer": 12},
    "96 layers": {"n_layer": 96},
}
LONGEST, LARGEST, DEEPEST = 20.0, 2 * 2**30, 1.5
REPEATS = 9


def main() -> int:
    found = {name: _in_process(name) for name in MODELS}
    print(f"{'model':12}{'import':>9}{'trace':>9}{'profile':>9}{'together':>10}{'memory':>11}")
    for name, row in found.items():
        together = row["trace"] + row["profile"]
        print(
            f"{name:12}{row['import']:8.1f}s{row['trace']:8.1f}s{row['profile']:8.2f}s{together:9.1f}s"
            f"{row['memory'] / 2**30:7.2f} GiB"
        )
    xl = found["gpt2-xl"]
    ratio = found["96 layers"]["profile"] / found["12 layers"]["profile"]
    seconds = xl["trace"] + xl["profile"]
    met = seconds < LONGEST and xl["memory"] < LARGEST and ratio <= DEEPEST
    result = {
        "xl_seconds": round(seconds, 2),
        "xl_gib": round(xl["memory"] / 2**30, 3),
        "depth_ratio": round(ratio, 3),
        "met": met,
    }
    print(json.dumps(result))
    return 0 if met else 1


def _in_process(name: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.profile_speed", "--one", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip()}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def one(name: str) -> dict[str, float]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    start = time.perf_counter()
    from benchmarks.measure_steps import locate, text
    from benchmarks.profile_accuracy import trace_row
    from shardwright.stages.profile.step import profile_step

    row = {
        "name": name, "mode": "amp", "config": {**MODELS[name], "use_cache": False}, "batch": text(8, 1024, 50257),
        "model_class": "transformers.GPT2LMHeadModel", "config_class": "transformers.GPT2Config",
    }  # fmt: skip
    locate(row["model_class"])
    imported = time.perf_counter()
    graph = trace_row(row)
    traced = time.perf_counter()
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        profile_step(graph, "cuda", "amp")
        times.append(time.process_time() - begin)
    return {
        "import": imported - start,
        "trace": traced - imported,
        "profile": min(times),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        import logging
        import warnings

        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        print(json.dumps(one(sys.argv[2])))
    else:
        sys.exit(main())
