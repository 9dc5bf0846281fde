"""How much of real models the op table covers: `python -m benchmarks.op_rules`.

Traces ten model families in their usual sizes, without memory for their weights, and lists for each: its distinct ops,
how many of them have a rule in the table, a discovered one or none (they run replicated), and the strategies of all its
ops on one axis; then the strategies of GPT-2 XL on a mesh of two axes; last a line of JSON, with the number of `rules`
in the table. Bars: every op has a rule, none of the products,
attentions, norms, losses and embeddings runs only replicated, and the mesh takes less than 5 s. Another model:
`--model-class transformers.LlamaForCausalLM --config '{"num_hidden_layers": 2}' --batch '{"input_ids": {"shape":
[8, 128], "dtype": "int64"}, ...}'`; a class without a config takes it as arguments.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measure_steps import image, locate, text
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Strategy
from shardwright.pipeline.ops.dims import strategies
from shardwright.pipeline.ops.mesh import followers, op_strategies, view_op
from shardwright.pipeline.ops.table import rule_of, table
from shardwright.pipeline.tracing.build import fake_mode, to_fake
from shardwright.pipeline.tracing.chain import find_chain
from shardwright.pipeline.tracing.export import export_loss
from shardwright.pipeline.tracing.lower import lower
from shardwright.pipeline.tracing.simplify import simplify

DECODER = {"num_hidden_layers": 4, "vocab_size": 32000, "use_cache": False}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"use_cache": False}, text(8, 1024, 50257)),
    "bert": ("BertForMaskedLM", {}, text(8, 512, 30522)),
    "llama": ("LlamaForCausalLM", {**DECODER, "num_key_value_heads": 8}, text(8, 1024, 32000)),
    "qwen2": ("Qwen2ForCausalLM", {**DECODER, "num_key_value_heads": 8}, text(8, 1024, 32000)),
    "t5": ("T5ForConditionalGeneration", {"decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False},
           text(8, 512, 32128)),
    "vit": ("ViTForImageClassification", {"num_labels": 1000}, image(8, 224)),
    "swin": ("SwinForImageClassification", {"num_labels": 1000}, image(8, 224)),
    "resnet": ("ResNetForImageClassification", {"num_labels": 1000}, image(8, 224)),
    "mixtral": ("MixtralForCausalLM", DECODER, text(8, 512, 32000)),
    "opt": ("OPTForCausalLM", {"use_cache": False}, text(8, 1024, 50272)),
}  # fmt: skip
XL = {"n_layer": 48, "n_embd": 1600, "n_head": 25, "use_cache": False}
MESH, SLOWEST_MESH = (2, 4), 5.0
HEAVY = ("linear", "mm", "bmm", "baddbmm", "matmul", "einsum", "conv", "attention", "norm", "loss", "embedding")


@dataclass(frozen=True)
class Coverage:
    """Distinct ops of a model by where their strategies come from, and how many strategies all its ops have."""

    table: frozenset[str]
    discovered: frozenset[str]
    replicated: frozenset[str]
    strategies: int
    heavy_replicated: frozenset[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-class", help="dotted name of a model that is not in the list")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON: arguments of its config")
    parser.add_argument("--batch", type=json.loads, help="JSON: name -> shape and dtype; default: 8 x 128 tokens")
    parser.add_argument("--ranks", type=int, default=2, help="size of the mesh axis")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    chosen = FAMILIES
    if arguments.model_class:
        batch = arguments.batch or text(8, 128, 100)
        chosen = {arguments.model_class.rpartition(".")[2]: (arguments.model_class, arguments.config, batch)}
    start = time.perf_counter()
    print(f"{'model':32}{'ops':>5}{'table':>7}{'discovered':>12}{'replicated':>12}{'strategies':>12}{'seconds':>9}")
    found = {name: measure(name, *row, arguments.ranks) for name, row in chosen.items()}
    seconds = time.perf_counter() - start
    return report(list(found.values()), seconds, {} if arguments.model_class else on_a_mesh())


def on_a_mesh() -> dict[str, float]:
    """All strategies of all ops of GPT-2 XL on a mesh of two axes, and which ops follow another. Bar: 5 s."""
    graph = trace("transformers.GPT2LMHeadModel", XL, text(8, 1024, 50257))
    start = time.perf_counter()
    options = {op.name: op_strategies(view_op(graph, op), MESH) for op in graph.ops}
    following = followers(graph, options)
    seconds = time.perf_counter() - start
    count = sum(map(len, options.values()))
    name = f"gpt2-xl on {'x'.join(map(str, MESH))}"
    print(f"{name:32}{len(graph.ops):5} ops, {count} strategies, {len(following)} followers in {seconds:.2f} s")
    return {"mesh_strategies": count, "mesh_seconds": round(seconds, 2)}


def measure(name: str, model_class: str, config: dict[str, Any], batch: dict[str, Any], ranks: int) -> Coverage:
    start = time.perf_counter()
    graph = trace(model_class if "." in model_class else f"transformers.{model_class}", config, batch)
    traced = time.perf_counter()
    covered = coverage(graph, ranks)
    seconds = time.perf_counter() - traced
    counts = (len(covered.table), len(covered.discovered), len(covered.replicated))
    print(f"{name:32}{sum(counts):5}{counts[0]:7}{counts[1]:12}{counts[2]:12}{covered.strategies:12}{seconds:9.1f}"
          f"   ({len(graph.ops)} ops traced in {traced - start:.1f} s)")  # fmt: skip
    for target in sorted(covered.discovered | covered.replicated):
        print(f"    {'discovered' if target in covered.discovered else 'replicated'}: {target}")
    for target in sorted(covered.heavy_replicated):
        print(f"    runs only replicated: {target}")
    return covered


def coverage(graph: OpGraph, ranks: int) -> Coverage:
    options = {op.name: strategies(rule_of(op), view_op(graph, op), ranks) for op in graph.ops}
    unknown = {op.target for op in graph.ops if op.target not in table()}
    split = {op.target for op in graph.ops if _is_split(options[op.name])}
    heavy = {op.target for op in graph.ops if any(word in op.target.split(".")[1] for word in HEAVY)}
    known = {op.target for op in graph.ops} - unknown
    return Coverage(
        frozenset(known),
        frozenset(unknown & split),
        frozenset(unknown - split),
        sum(map(len, options.values())),
        frozenset(heavy - split),
    )


def _is_split(options: tuple[Strategy, ...]) -> bool:
    return any(layout.states[0].kind in "SP" for s in options for layout in (*s.inputs, *s.outputs))


def trace(model_class: str, config: dict[str, Any], batch: dict[str, Any]) -> OpGraph:
    """The training graph; no memory is taken for weights or batch."""
    build = locate(model_class)
    with torch.device("meta"):
        model = build(build.config_class(**config)) if hasattr(build, "config_class") else build(**config)
    mode = fake_mode()
    to_fake(model, mode).train()
    with mode:
        tensors = {n: torch.empty(s["shape"], dtype=getattr(torch, s["dtype"])) for n, s in batch.items()}
    return find_chain(simplify(lower(export_loss(model, tensors), model, tuple(tensors))))


def report(found: list[Coverage], seconds: float, mesh: dict[str, float]) -> int:
    sets = [frozenset().union(*(getattr(c, name) for c in found)) for name in ("table", "discovered", "replicated")]
    heavy = frozenset().union(*(c.heavy_replicated for c in found))
    print(
        json.dumps(
            {
                "rules": len(table()),
                "ops": sum(map(len, sets)),
                "table": len(sets[0]),
                "discovered": len(sets[1]),
                "replicated": len(sets[2]),
                "seconds": round(seconds, 1),
                **mesh,
            }
        )
    )
    return 1 if heavy or sets[2] or mesh.get("mesh_seconds", 0.0) > SLOWEST_MESH else 0


if __name__ == "__main__":
    sys.exit(main())
