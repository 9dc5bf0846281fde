"""A program for a model of 70 billion parameters, without memory for its weights: `python -m benchmarks.generate`.

Llama's largest shapes (80 layers of width 8192, 28672 inside, 64 heads with 8 for keys and values, 32000 words) under
bfloat16 autocast, planned for 8 boxes of 8 H100 that are described, not measured. The plan is the solver's for
`--solved-layers` layers; each further layer is stored and computed as the last of these, and every two links are
recomputed together. With as many as `--layers` the plan is all the stages' own.

Every stage runs as a user runs it, in a process of its own, with its wall seconds, its seconds on the processor and its
largest resident memory; so codegen's figures have in them the start of Python and the reading of graph and plan.

Then one rank's shards are made as train makes them, one tensor after another, for a model of the same widths and
`--drawn-layers` layers: numbers are drawn for all of it, and what is in memory beside the shards is told in sizes of
the largest tensor. The shards of the whole plan are counted.

Bars: codegen under 20 s and 4 GiB. `--layers` makes it smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent
STAGES = ("trace", "profile", "cluster", "solve", "checkpoint")
SECONDS, BYTES = 20.0, 4 * 2**30
WIDTH, INSIDE, HEADS, KEY_HEADS, WORDS = 8192, 28672, 64, 8, 32000
BATCH, LENGTH = 64, 2048
ROOM = 4.0  # sizes of the largest tensor beside a rank's shards: 2.5 are in use, and allocators give back late


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--solved-layers", type=int, default=2)
    parser.add_argument("--drawn-layers", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for conf/ and runs/, which then stay")
    parser.add_argument("--draw", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.draw:
        print(json.dumps(draw(arguments.draw, arguments.drawn_layers)))
        return 0
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        root = arguments.keep or Path(folder)
        used = plan(root, arguments.layers, arguments.solved_layers)
        used |= {"codegen": run_stage("codegen", root)}
        shards = in_process(["-m", "benchmarks.generate", "--draw", str(root)], arguments.drawn_layers)
        return report(root, used, shards)


def plan(root: Path, layers: int, solved: int) -> dict[str, dict[str, float]]:
    """What the stages took that led to plan.json, by name."""
    write_project(root, layers)
    if solved >= layers:
        return {stage: run_stage(stage, root) for stage in STAGES}
    from benchmarks.generate_plans import save_deep_plan

    shallow = root / "shallow"
    write_project(shallow, solved)
    print(f"{solved} layers")
    used = {f"{stage}_{solved}": run_stage(stage, shallow) for stage in STAGES}
    print(f"{layers} layers")
    used |= {"trace": run_stage("trace", root)}
    save_deep_plan(shallow, root, solved)
    return used


# -- the project


def settings(layers: int) -> dict[str, Any]:
    config = {
        "_target_": "transformers.LlamaConfig",
        "hidden_size": WIDTH,
        "intermediate_size": INSIDE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "vocab_size": WORDS,
        "max_position_embeddings": LENGTH,
        "use_cache": False,
    }
    return {"_target_": "transformers.LlamaForCausalLM", "config": config}


def write_project(root: Path, layers: int) -> None:
    import yaml

    shutil.copytree(SOURCE / "conf", root / "conf", dirs_exist_ok=True)
    tokens = {"shape": [BATCH, LENGTH], "dtype": "int64"}
    batch = {"input_ids": tokens, "labels": dict(tokens, shape=[BATCH, LENGTH])}  # YAML would refer to the same object
    model = {"module": settings(layers), "batch": batch, "precision": "amp"}
    cluster = yaml.safe_load((root / "conf/cluster/dgx_h100_infiniband.yaml").read_text()) | {"nodes": 8}
    solve = {"backend": "highs", "gap": 0.01, "mesh": {"dp": 8, "tp": 8}, "frontier_points": 2, "time_limit_s": 120}
    choices = {"data": "synthetic_tokens", "checkpoint": "rotor", "train": "adamw", "code": "conf"}
    choices |= dict.fromkeys(("model", "cluster", "solve"), "llama_70b")
    for group, content in {"model": model, "cluster": cluster, "solve": solve}.items():
        (root / "conf" / group / "llama_70b.yaml").write_text(yaml.safe_dump(content))
    (root / "conf/config.yaml").write_text(yaml.safe_dump(choices | {"tracking": {"enabled": False}}))


# -- stages as processes


def run_stage(stage: str, root: Path) -> dict[str, float]:
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "stages", stage], cwd=root, env=environment, stdout=said, stderr=said
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        if process.returncode:
            raise SystemExit(f"{stage}: {said.read().decode().strip()}")
    seconds, cpu = time.perf_counter() - start, usage.ru_utime + usage.ru_stime
    row = {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "gib": round(usage.ru_maxrss / 2**20, 2)}
    print(f"{stage:12}{row['seconds']:8.1f} s{row['cpu_seconds']:8.1f} s of CPU{row['gib']:8.2f} GiB", flush=True)
    return row


def in_process(command: list[str], layers: int) -> dict[str, Any]:
    """In a process that has not loaded the graph, so that its memory is its own."""
    done = subprocess.run(
        [sys.executable, *command, "--drawn-layers", str(layers)], cwd=SOURCE, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- one rank's shards


def draw(root: Path, layers: int) -> dict[str, Any]:
    """The shards of the first rank, of the model with this many layers; storage is that of the plan."""
    import resource

    import torch

    from shardwright.pipeline.base.artifacts import load
    from shardwright.pipeline.base.instantiate import instantiate
    from shardwright.pipeline.runtime.step.initial_values import Initial

    plan = load("plan", root).body
    torch.manual_seed(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    initial = Initial(lambda: instantiate(settings(layers), "benchmarks.generate"))
    assert not initial.whole, initial.whole
    named = dict(initial.module.named_parameters())
    built = time.perf_counter()
    shards = []
    for (name, parameter), value in zip(named.items(), initial.values(named.values()), strict=True):
        runs = plan.sharding.storage[name].runs(tuple(parameter.shape), plan.sizes, (0,) * len(plan.sizes))
        for dim, held in enumerate(runs):
            places = [value.narrow(dim, start_, count) for start_, count in held]
            value = places[0] if len(places) == 1 else torch.cat(places, dim)
        shards.append(value.clone())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    largest = max(p.numel() * p.element_size() for p in named.values())
    held = sum(shard.numel() * shard.element_size() for shard in shards)
    return {
        "layers": layers,
        "model_gib": round(sum(p.numel() * p.element_size() for p in named.values()) / 2**30, 2),
        "shards_gib": round(held / 2**30, 3),
        "peak_gib": round((peak - before) / 2**30, 2),
        "largest_gib": round(largest / 2**30, 3),
        "largest_tensors": round((peak - before - held) / largest, 2),
        "seconds": round(time.perf_counter() - start, 1),
        "construct_seconds": round(built - start, 1),
    }


def report(root: Path, used: dict[str, dict[str, float]], shards: dict[str, Any]) -> int:
    from shardwright.pipeline.base.artifacts import load
    from shardwright.pipeline.ir.graph import Role

    graph, plan = load("graph", root).body, load("plan", root).body
    parameters = {value.origin: value.type.numel for value in graph.of_role(Role.PARAMETER)}
    shards = {name: layout.shards(plan.sizes) for name, layout in plan.sharding.storage.items()}
    per_rank = sum(count * 4 / shards[name] for name, count in parameters.items()) / 2**30
    lines = len((root / "runs/codegen/module.py").read_text().splitlines())
    print(
        f"{sum(parameters.values()) / 1e9:.1f} billion parameters, {len(graph.ops)} ops, {lines} lines of module.py;"
        f" a rank stores {per_rank:.2f} GiB of the parameters"
    )
    print(
        f"shards of {shards['layers']} layers ({shards['model_gib']} GiB) in {shards['seconds']} s: at most"
        f" {shards['peak_gib']} GiB, {shards['largest_tensors']} times the largest tensor beside {shards['shards_gib']}"
    )
    codegen = used["codegen"]
    met = codegen["seconds"] < SECONDS and codegen["gib"] * 2**30 < BYTES and shards["largest_tensors"] <= ROOM
    found = {
        "parameters": sum(parameters.values()),
        "codegen_seconds": codegen["seconds"],
        "codegen_cpu_seconds": codegen["cpu_seconds"],
        "codegen_gib": codegen["gib"],
        "stages": used,
        "rank_gib": round(per_rank, 3),
        "shards": shards,
        "met": met,
    }
    print(json.dumps(found))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
