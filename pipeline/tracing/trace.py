"""From the configuration to the graph, for a whole batch or a part of it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from math import gcd

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.pipeline.config import Config, NormStatistics, Precision, TensorSpec
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.verify import verify_graph
from shardwright.pipeline.ops.families.norm import is_batch_norm_in_training
from shardwright.pipeline.tracing.build import build_model, fake_mode, sample_batch
from shardwright.pipeline.tracing.chain import find_chain
from shardwright.pipeline.tracing.export import export_loss
from shardwright.pipeline.tracing.lower import lower
from shardwright.pipeline.tracing.simplify import simplify


def trace(config: Config, samples: int | None = None, stay: Container[str] = ()) -> OpGraph:
    """For so many samples of the model's batch, or all; ops of the names in `stay` are kept, if they do nothing."""
    mode = fake_mode()
    return trace_module(config, build_model(config, mode), mode, samples, stay)


def trace_module(
    config: Config, model: nn.Module, mode: FakeTensorMode, samples: int | None = None, stay: Container[str] = ()
) -> OpGraph:
    """The same of a module that is built."""
    specs = config.model.batch
    if samples is not None:  # a part of each input, whose first dim is the batch
        whole = gcd(*(spec.shape[0] for spec in specs.values()))
        parts = {name: [spec.shape[0] // whole * samples, *spec.shape[1:]] for name, spec in specs.items()}
        specs = {name: TensorSpec(shape=parts[name], dtype=spec.dtype) for name, spec in specs.items()}
    batch = sample_batch(specs, mode, config.model.precision)
    amp = config.model.precision is Precision.amp
    program = export_loss(model, batch, config.cluster.device.value, amp=amp)
    graph = find_chain(simplify(lower(program, model, tuple(batch), amp=amp, stay=stay)))
    if config.model.batch_norm is NormStatistics.per_rank:
        graph = with_norms_per_rank(graph)
    verify_graph(graph)
    return graph


def with_norms_per_rank(graph: OpGraph) -> OpGraph:
    """Batch norms that take the statistics of each rank's own part of the batch."""
    return replace(graph, ops=tuple(replace(op, per_rank=is_batch_norm_in_training(op)) for op in graph.ops))
