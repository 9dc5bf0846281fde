"""Bytes of one device: weights in half precision, AdamW in single, activations of the micro-batches in flight.

For each parameter      2 weight + 2 gradient + 12 optimizer (a copy, two moments); ZeRO divides by dp from the right
For each layer and token, h elements of a layer that keeps everything:
    outside tp's products   norms' inputs 4, products' inputs 4, dropouts' masks 2
    inside                  q, k, v and the context 8; feed-forward 2 f/h before and 2 f/h after its activation
    plain attention         5 a s / h: softmax, dropout and its mask
Full recompute keeps 2 for each layer, and all of one layer while it runs.
"""

from __future__ import annotations

from math import ceil

from pipeline.cluster_model.transformer import (
    AttentionKernel,
    ParallelLayout,
    PipelineSchedule,
    RecomputeMode,
    Transformer,
    stage_layers,
)

LOGIT_HELD = 10  # bytes for each logit: in half, in single, its gradient
OWN = 1.5e9  # of the driver, the libraries and their buffers
SLACK = 1.03  # what the allocator wastes


def device_bytes(model: Transformer, layout: ParallelLayout) -> float:
    """At the peak of the stage that needs most: one of the two ends, or the fullest."""
    layers = stage_layers(model, layout)
    fullest = max(range(layout.pp), key=lambda stage: layers[stage])
    return max(_stage_bytes(model, layout, stage, layers[stage]) for stage in {0, layout.pp - 1, fullest})


def stage_parameters(model: Transformer, layout: ParallelLayout, stage: int, layers: int) -> float:
    """On one device; a tied embedding lies at both ends."""
    ends = (stage == 0) + (stage == layout.pp - 1)
    if model.tied and layout.pp == 1:
        ends = 1
    return (layers * model.layer_parameters + ends * model.end_parameters) / layout.tp


def _stage_bytes(model: Transformer, layout: ParallelLayout, stage: int, layers: int) -> float:
    parameters = stage_parameters(model, layout, stage, layers)
    whole = _layer_bytes(model, layout, layout.recompute is not RecomputeMode.selective)
    kept, running = whole, 0.0  # between forward and backward, and of the layer that is computed again
    if layout.recompute is RecomputeMode.full:
        kept, running = 2 * layout.micro_batch * model.sequence * model.hidden / layout.sliced, whole
    activations = _in_flight(layout, stage) * layers * kept
    logits = 0.0
    if stage == layout.pp - 1:
        logits = LOGIT_HELD * layout.micro_batch * model.sequence * model.vocabulary / layout.tp
    gathered = 4 * model.layer_parameters / layout.tp if layout.zero == 3 and layout.dp > 1 else 0.0
    return OWN + SLACK * (state_bytes(parameters, layout) + activations + max(running, logits) + gathered)


def state_bytes(parameters: float, layout: ParallelLayout) -> float:
    over = [layout.dp if layout.zero >= level else 1 for level in (3, 2, 1)]
    return parameters * (2 / over[0] + 2 / over[1] + 12 / over[2])


def _in_flight(layout: ParallelLayout, stage: int) -> float:
    """Micro-batches whose activations a stage keeps."""
    if layout.schedule is PipelineSchedule.gpipe:
        return layout.micro_batches
    if layout.chunks > 1:
        return min(layout.micro_batches, layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.chunks)))
    return min(layout.micro_batches, layout.pp - stage)


def _layer_bytes(model: Transformer, layout: ParallelLayout, with_square: bool) -> float:
    """Of one layer that keeps everything, for one micro-batch."""
    tokens = layout.micro_batch * model.sequence
    outside = (10 if model.dropout else 8) * tokens * model.hidden / layout.sliced
    heads = 2 * tokens * (model.projected + model.hidden) / layout.tp
    feed = (6 if model.gated else 4) * tokens * model.feed / layout.tp
    square = 0.0
    if layout.attention is AttentionKernel.plain and with_square:
        square = (5 if model.dropout else 2) * tokens * model.sequence * ceil(model.heads / layout.tp)
    return outside + heads + feed + square
