"""Whether the solver weighs plans by what they are predicted to take: `python -m benchmarks.one_price`.

Ten models, as wide as people train them and two blocks deep, on four clusters: one GPU, the eight of a node, two such
nodes, and two processes of a CPU; under amp on GPUs. Plans are the fastest of all and the fastest of some kinds that
`only` asks for, each seen twice: what the solver's problem says that it costs and holds, and what the checkpoint stage
predicts for it where nothing is recomputed. What a card waits for its host is in no problem: it is added to the
solver's seconds by the function that predicts it, so of the waiting this proves nothing. Of the collectives that run
behind computation the problem has a share, which is that of the plan itself, as the search has it when it settles: of
them it is proven that problem and step have the same ones. The last line is one JSON object; the exit status says
whether the bars are met.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from benchmarks.gpu_path_models import MODELS
from benchmarks.measure_steps import locate, text
from benchmarks.same_plans import ROOT
from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.config import load_config
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.cost.traffic import lines_of
from shardwright.pipeline.cost.two_lines import unrecomputed_runs
from shardwright.pipeline.ir.plan import FrontierPoint
from shardwright.pipeline.ir.profile import as_run
from shardwright.stages.checkpoint.choose import evaluate
from shardwright.stages.solve.answer.saved import Saved, found_among
from shardwright.stages.solve.problem.build import build
from shardwright.stages.whatif.planner import Planner, planning

STEP_BAR, MEMORY_BAR = 0.01, 0.02
DEPTHS = ("n_layer", "num_hidden_layers", "num_layers")
NAMES = ("gpt2-medium", "llama-1b", "qwen3-0.6b", "bert-large", "vit-large", "t5-base", "mixtral-small", "resnet50")
OPT = {"hidden_size": 1024, "num_attention_heads": 16, "ffn_dim": 4096, "word_embed_proj_dim": 1024, "use_cache": False}
GEMMA = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 128, "vocab_size": 64000, "use_cache": False}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    **{name: MODELS[name] for name in NAMES},
    "opt": {"model_class": "transformers.OPTForCausalLM", "config_class": "transformers.OPTConfig",
            "config": {**OPT, "num_hidden_layers": 2}, "batch": text(16, 1024, 50272)},
    "gemma2": {"model_class": "transformers.Gemma2ForCausalLM", "config_class": "transformers.Gemma2Config",
               "config": {**GEMMA, "num_hidden_layers": 2}, "batch": text(16, 1024, 64000)},
}  # fmt: skip
CLUSTERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # what differs from the file, and kinds of plans
    "h200": ({}, ("any",)),
    "dgx_h100": ({}, ("any", "tensor")),
    "dgx_h100_infiniband": ({"nodes": 2}, ("any", "zero")),
    "preset_cpu": ({"memory_gb": 200}, ("any",)),
}


def build_model(name: str) -> nn.Module:
    """What conf/model names."""
    row = ROWS[name]
    config = {key: 2 if key in DEPTHS else value for key, value in row["config"].items()}
    if name == "resnet50":
        config["depths"] = [1, 1, 1, 1]
    found: nn.Module = locate(row["model_class"])(locate(row["config_class"])(**config))
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS), choices=list(CLUSTERS))
    asked = parser.parse_args(arguments)
    print(f"{'model':16}{'cluster':22}{'plan':10}{'solver':>10}{'price':>10}{'':>8}{'held':>10}{'peak':>10}")
    steps, memory = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, cluster, kind, own in plans(Path(folder), asked.models, asked.clusters):
            (cost, seconds), (held, peak) = own
            steps.append(abs(cost / seconds - 1))
            memory.append(abs(held / peak - 1))
            print(
                f"{name:16}{cluster:22}{kind:10}{cost * 1e3:8.3f}ms{seconds * 1e3:8.3f}ms"
                f"{cost / seconds - 1:+8.2%}{held / 1e9:8.2f}GB{peak / 1e9:8.2f}GB{held / peak - 1:+8.2%}",
                flush=True,
            )
    worst = {"worst_step_difference": round(max(steps), 4), "worst_memory_difference": round(max(memory), 4)}
    print(json.dumps({"plans": len(steps), **worst}))
    return 0 if max(steps) <= STEP_BAR and max(memory) <= MEMORY_BAR else 1


Pair = tuple[float, float]


def plans(root: Path, models: list[str], clusters: list[str]) -> Iterator[tuple[str, str, str, tuple[Pair, Pair]]]:
    """Model, cluster and kind of each plan, with its two costs and its two peaks."""
    shutil.copytree(ROOT / "conf", root / "conf")
    (root / "pipeline/models").mkdir(parents=True)
    run_of = lambda stage: import_module(f"shardwright.stages.{stage}.run").run  # noqa: E731
    for name in models:
        with planning(root, run_of, logging.getLogger("quiet")) as planner:
            for cluster in clusters:
                for kind in CLUSTERS[cluster][1]:
                    write_settings(root, name, cluster, kind)
                    try:
                        yield name, cluster, kind, both_prices(planner, root)
                    except SolveError as error:
                        print(f"{name:16}{cluster:22}{kind:10}{error.what}")


def write_settings(root: Path, name: str, cluster: str, kind: str) -> None:
    machine = yaml.safe_load((ROOT / f"conf/cluster/{cluster}.yaml").read_text()) | CLUSTERS[cluster][0]
    precision = "amp" if machine["device"] == "cuda" else "fp32"
    batch = {key: {"shape": own["shape"], "dtype": own["dtype"]} for key, own in ROWS[name]["batch"].items()}
    module = {"_target_": "benchmarks.one_price.build_model", "name": name}
    groups = {
        "model": {"module": module, "batch": batch, "precision": precision},
        "cluster": machine,
        "solve": {"backend": "highs", "only": kind, "frontier_points": 1, "frontier_meshes": 1},
        "checkpoint": {"recompute": "off", "pipeline": "off"},
    }
    for group, body in groups.items():
        (root / f"conf/{group}/own.yaml").write_text(yaml.safe_dump(body))
    choices = {**yaml.safe_load((ROOT / "conf/config.yaml").read_text()), **dict.fromkeys(groups, "own")}
    (root / "conf/config.yaml").write_text(yaml.safe_dump(choices))


def both_prices(planner: Planner, root: Path) -> tuple[Pair, Pair]:
    config = load_config(root)
    profile, cluster, frontier = (planner.made(kind, config).body for kind in ("profile", "cluster", "frontier"))
    graph = as_run(planner.made("graph", config).body, profile.types)
    point: FrontierPoint = frontier.points[0]
    mesh = frontier.meshes[point.mesh]
    workload = Workload(graph, profile, cluster.on(mesh), frontier.optimizer_copies)
    problem, choices = build(workload)
    picked = found_among(Saved("", mesh.sizes, point.sharding), graph, problem, choices)
    roomy = replace(frontier, budget_bytes=1 << 60)
    planned = evaluate(graph, profile, cluster, roomy, 0, config.checkpoint)
    priced = workload.priced(point.sharding)
    ran = unrecomputed_runs(priced)
    waiting = priced.step.seconds_with(sum(one.seconds for one in ran)) - priced.step.seconds
    lines = lines_of(priced, ran)
    share = 1 - lines.saved / lines.behind if lines.behind else 1.0
    cost = problem.exposing(share).cost(picked)
    return (cost + waiting, planned.step_seconds), (problem.peak(picked), planned.peak_bytes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
