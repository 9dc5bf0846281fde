"""A model traced on tensors without memory, a transformer two layers deep, and what a rank does for each part of it.

Layers are equal: the second of them stands for all. The model is traced with two numbers of samples, laid out on one
axis of `tp` ranks as the planner would with `only: tensor` (or `sequence`), and read off (pipeline.layouts.work).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from shardwright.pipeline.config import Config, Device, DType, ModelSettings, Precision, TensorSpec
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import COLLECTIVES, Axis, Cluster, Compute, Curve, LinkCost
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.layout import Layout, State
from shardwright.pipeline.ir.plan import Sharding
from shardwright.pipeline.ir.profile import Profile, as_run
from shardwright.pipeline.layouts.planner_stages import PlannerStages
from shardwright.pipeline.layouts.sizes import AttentionKernel, LayoutError, Transformer
from shardwright.pipeline.layouts.work import Grown, Parts, PartWork, part_work
from shardwright.pipeline.tracing.shortened import EqualBlocks
from shardwright.pipeline.tracing.trace import trace

LEAST_SAMPLES = 3  # one sample alone has dims of 1, in which tensors lie otherwise
DEPTH = 2  # the first layer may read what none after it does
MODULE = "shardwright.pipeline.models.transformer.build"
COPIES = 6.0  # tensors of a parameter's size in half precision: a copy in single, two moments
# What layouts are chosen by; prices are another machine's.
SOME_LINK = LinkCost(1e-5, 1e11)
SOME_CARD = Compute(Curve((1.0,), (1e14,)), 1e12, 1e-5, 1e-5)


class TraceSource(Protocol):
    """A model as it is traced: with few samples, and with twice as many."""

    @property
    def samples(self) -> int:
        """So few."""

    def graph(self, attention: AttentionKernel, samples: int) -> OpGraph: ...

    def holds_samples(self, size: int) -> bool:
        """Whether a dim of this size is of samples, where there are as few as that."""

    def layout_key(self, tp: int) -> Hashable:
        """Of tp that are alike in this the layouts are the same."""

    def blocks(self, graph: OpGraph, profile: Profile) -> EqualBlocks:
        """The layers."""


@dataclass(frozen=True)
class _Slice:
    """What kernels and layouts of a rank depend on, beside the samples."""

    attention: AttentionKernel
    tp: int
    split_sequence: bool


@dataclass(frozen=True, eq=False)
class Works:
    """Of one model, however many layers it has; everything is made once."""

    source: TraceSource
    stages: PlannerStages
    _traced: dict[tuple[AttentionKernel, int], tuple[OpGraph, Profile]] = field(default_factory=dict)
    _layouts: dict[tuple[Any, ...], Sharding] = field(default_factory=dict)
    _grown: dict[_Slice, tuple[Grown, ...]] = field(default_factory=dict)
    _parts: dict[tuple[_Slice, int], Parts] = field(default_factory=dict)

    def parts(self, attention: AttentionKernel, tp: int, split_sequence: bool, samples: int) -> Parts:
        own = _Slice(attention, tp, split_sequence and tp > 1)
        if (own, samples) not in self._parts:
            if own not in self._grown:
                least = self.source.samples
                both = [self._of(own, times) for times in (1, 2)]
                if len({tuple(part.ran for part in parts) for parts in both}) > 1:
                    what = f"what it runs for {least} samples is another than for {2 * least}"
                    raise LayoutError(what, remedy="price another model")
                self._grown[own] = tuple(Grown(least, one, two) for one, two in zip(*both, strict=True))
            self._parts[own, samples] = Parts(*(grown.of(samples) for grown in self._grown[own]))
        return self._parts[own, samples]

    def _of(self, own: _Slice, times: int) -> tuple[PartWork, PartWork, PartWork]:
        graph, profile = self._trace(own.attention, times * self.source.samples)
        workload = Workload(graph, profile, _on_axis(own.tp), COPIES)
        sharding = self._layout(own, workload)
        priced = workload.priced(sharding if times == 1 else with_samples(sharding, self.source, times))
        run = self.source.blocks(graph, profile)
        start, end = run.first, run.first + run.length * run.count
        second = start + run.length if run.count > 1 else start
        return (
            part_work(priced, 0, start - 1),
            part_work(priced, second, second + run.length - 1),
            part_work(priced, end, len(graph.chain) - 1),
        )

    def _layout(self, own: _Slice, workload: Workload) -> Sharding:
        """Of the fewer samples."""
        key = own.attention, own.split_sequence, self.source.layout_key(own.tp)
        if key not in self._layouts:
            self._layouts[key] = self.stages.tensor_parallel(workload, own.split_sequence)
        return self._layouts[key]

    def _trace(self, attention: AttentionKernel, samples: int) -> tuple[OpGraph, Profile]:
        key = attention, samples
        if key not in self._traced:
            graph = self.source.graph(attention, samples)
            profile = self.stages.profile(graph)
            self._traced[key] = as_run(graph, profile.types), profile
        return self._traced[key]


@dataclass(frozen=True)
class TransformerTrace:
    """Two layers of it."""

    model: Transformer
    config: Config

    @cached_property
    def samples(self) -> int:
        return samples_of(self.model)

    def graph(self, attention: AttentionKernel, samples: int) -> OpGraph:
        return trace(on_gpu(self.config, module_settings(self.model, attention)), samples)

    def holds_samples(self, size: int) -> bool:
        return size in counted(self.model, self.samples)

    def layout_key(self, tp: int) -> Hashable:
        model = self.model
        sizes = (model.heads, model.keys, model.feed, model.vocabulary, model.sequence, model.hidden, model.experts)
        return tuple(size % tp == 0 for size in sizes) if tp > 1 else ()

    def blocks(self, graph: OpGraph, profile: Profile) -> EqualBlocks:
        first, last = repeated(profile)
        return EqualBlocks(first, (last + 1 - first) // DEPTH, DEPTH)


def on_gpu(config: Config, model: ModelSettings) -> Config:
    return replace(config, model=model, cluster=replace(config.cluster, device=Device.cuda))


def samples_of(model: Transformer) -> int:
    """So few, and twice as many, that no dim of theirs is as long as another: a kernel's shapes say what it reads."""
    sizes = {model.hidden, model.feed, model.projected, model.heads * model.head, model.keys * model.head}
    sizes |= {model.heads, model.keys, model.head, model.vocabulary, model.sequence, model.experts}
    for count in range(LEAST_SAMPLES, max(sizes) + LEAST_SAMPLES):
        if not (counted(model, count) | counted(model, 2 * count)) & sizes:
            return count
    raise AssertionError("a number that is larger than every size is as none of them")


def counted(model: Transformer, samples: int) -> set[int]:
    """Dims that the samples are in."""
    rows = model.sequence * (model.experts_per_token if model.experts else 1)  # tokens, once for each of their experts
    return {samples * size for size in (1, model.sequence, model.heads, model.keys, rows)}


def with_samples(sharding: Sharding, source: TraceSource, times: int) -> Sharding:
    """The layouts for so many times the samples: a dim that is split inside its samples has more of them outside."""

    def state(own: State) -> State:
        return replace(own, outer=times * own.outer) if source.holds_samples(own.outer) else own

    def layouts(every: Iterable[Layout]) -> tuple[Layout, ...]:
        return tuple(Layout(tuple(map(state, own.states))) for own in every)

    strategies = {
        op: replace(own, inputs=layouts(own.inputs), outputs=layouts(own.outputs))
        for op, own in sharding.strategies.items()
    }
    inputs = dict(zip(sharding.inputs, layouts(sharding.inputs.values()), strict=True))
    return replace(sharding, strategies=strategies, inputs=inputs)


def module_settings(model: Transformer, attention: AttentionKernel) -> ModelSettings:
    module = {
        "_target_": MODULE, "layers": DEPTH, "vocabulary": model.vocabulary, "sequence": model.sequence,
        "tied": model.tied, "width": model.hidden, "heads": model.heads, "kv_heads": model.keys, "inner": model.feed,
        "gated": model.gated, "dropout": model.dropout, "flash": attention is AttentionKernel.flash,
        "experts": model.experts, "experts_per_token": model.experts_per_token,
    }  # fmt: skip
    tokens = TensorSpec(shape=[1, model.sequence], dtype=DType.int64)
    return ModelSettings(module, {"input_ids": tokens, "labels": tokens}, Precision.bf16)


def repeated(profile: Profile) -> tuple[int, int]:
    """The links of the layers: from the first one that is as another to the last."""
    assert profile.kernels is not None
    places = profile.kernels.chain
    often = [number for number, place in enumerate(places) if places.count(place) > 1]
    return often[0], often[-1]


def _on_axis(tp: int) -> Cluster:
    axis = Axis("tp", tp, dict.fromkeys(COLLECTIVES, SOME_LINK))
    return Cluster("preset", "cuda", tp, 1 << 50, SOME_CARD, (axis,))
