"""From the configuration to the graph, for a whole batch or a part of it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from math import gcd

from pipeline.config import Config, Precision, TensorSpec
from pipeline.ir.graph import OpGraph
from pipeline.ir.verify import verify_graph
from pipeline.tracing.build import build_model, fake_mode, sample_batch
from pipeline.tracing.chain import find_chain
from pipeline.tracing.export import export_loss
from pipeline.tracing.lower import lower
from pipeline.tracing.simplify import simplify


def trace(config: Config, samples: int | None = None, stay: Container[str] = ()) -> OpGraph:
    """For so many samples of the model's batch, or all; ops of the names in `stay` are kept, if they do nothing."""
    mode = fake_mode()
    model = build_model(config, mode)
    batch = sample_batch(_part(config.model.batch, samples), mode, config.model.precision)
    amp = config.model.precision is Precision.amp
    program = export_loss(model, batch, config.cluster.device.value, amp=amp)
    graph = find_chain(simplify(lower(program, model, tuple(batch), amp=amp, stay=stay)))
    verify_graph(graph)
    return graph


def _part(specs: Mapping[str, TensorSpec], samples: int | None) -> Mapping[str, TensorSpec]:
    """Of each input, whose first dim is the batch."""
    if samples is None:
        return specs
    batch = gcd(*(spec.shape[0] for spec in specs.values()))
    return {
        name: TensorSpec(shape=[spec.shape[0] // batch * samples, *spec.shape[1:]], dtype=spec.dtype)
        for name, spec in specs.items()
    }
