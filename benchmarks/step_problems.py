"""Whole training steps as problems of the solve stage: a GPT or a Llama of any depth on a mesh of 2 x 4 devices.

Width 2048, sequence 1024, batch 8, float32; the Llama has 16 heads on 4 of keys and values. Two boxes of four devices,
25 GB/s between them and 200 GB/s inside: figures that are written here and nowhere measured. Traced on meta tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwright.pipeline.ir.cluster import COLLECTIVES, Axis, Cluster, Compute, Curve, LinkCost
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.models.gpt import GPT
from shardwright.pipeline.tracing.chain import find_chain
from shardwright.pipeline.tracing.export import export_loss
from shardwright.pipeline.tracing.lower import lower
from shardwright.pipeline.tracing.simplify import simplify
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.solve.answer.frontier import FrontierSearch

FAMILIES = ("gpt", "llama")
WIDTH, HEADS, CONTEXT, BATCH, VOCABULARY = 2048, 16, 1024, 8, 50304
KV_HEADS, INNER = 4, 5632  # of the Llama
COPIES = 2.0  # tensors of a parameter's size that Adam keeps
MEMORY = 80 * 10**9  # bytes of a device
SHARE = 0.5  # of the way from the smallest plan's memory to the fastest's


@dataclass(frozen=True)
class Sizes:
    width: int = WIDTH
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    inner: int = INNER
    context: int = CONTEXT
    batch: int = BATCH
    vocabulary: int = VOCABULARY


FULL = Sizes()


def traced(family: str, depth: int, sizes: Sizes = FULL) -> tuple[OpGraph, Profile]:
    with torch.device("meta"):
        model = _model(family, depth, sizes).train()
        tokens = torch.zeros(sizes.batch, sizes.context, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    graph = find_chain(simplify(lower(export_loss(model, batch), model, tuple(batch))))
    return graph, profile_graph(graph)


def _model(family: str, depth: int, sizes: Sizes) -> nn.Module:
    if family == "gpt":
        return GPT(
            vocab_size=sizes.vocabulary, context=sizes.context, width=sizes.width, layers=depth, heads=sizes.heads
        )
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.width,
            intermediate_size=sizes.inner,
            num_hidden_layers=depth,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            max_position_embeddings=sizes.context,
            use_cache=False,
        )
    )


def two_boxes() -> Cluster:
    axes = tuple(
        Axis(
            name, size, {kind: LinkCost(latency, rate * (0.5 if kind == "all_reduce" else 1.0)) for kind in COLLECTIVES}
        )
        for name, size, latency, rate in (("boxes", 2, 20e-6, 25e9), ("inside", 4, 8e-6, 200e9))
    )
    return Cluster("preset", "cuda", 8, MEMORY, Compute(Curve((1e9,), (60e12,)), 2e12, 5e-6, 5e-6), axes)


def binding_budget(sweep: FrontierSearch, deadline: float) -> float:
    """Bytes half way between the memory of the smallest plan and that of the fastest."""
    smallest, fastest = sweep.bounder.smallest(deadline).peak, sweep.bounder.fastest.peak
    return smallest + SHARE * (fastest - smallest)
