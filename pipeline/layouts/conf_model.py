"""A model of conf/model of which no sizes are known: traced as it is, its equal blocks found in its graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count

from shardwright.pipeline.base.errors import TraceError
from shardwright.pipeline.config import Config, Precision
from shardwright.pipeline.ir.graph import OpGraph, Role, TensorType
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.layouts.measured import works_known
from shardwright.pipeline.layouts.planner_stages import PlannerStages
from shardwright.pipeline.layouts.sizes import (
    AttentionKernel,
    ParallelLayout,
    PartsOf,
    Transformer,
    parameters_in_words,
)
from shardwright.pipeline.layouts.traced import LEAST_SAMPLES, Works, on_gpu
from shardwright.pipeline.layouts.words import ConfModel
from shardwright.pipeline.layouts.work import Pass
from shardwright.pipeline.tracing.shortened import EqualBlocks, equal_blocks
from shardwright.pipeline.tracing.trace import trace

MOST_SLICES = 64  # that a search tries


@dataclass(frozen=True, eq=False)
class TracedModel:
    """Both what is divided among devices, and how it is traced."""

    name: str
    config: Config  # with the model, in half precision on a GPU
    batch: int
    _graphs: dict[int, OpGraph] = field(default_factory=dict)

    @classmethod
    def of(cls, named: ConfModel, config: Config) -> TracedModel:
        return cls(named.name, on_gpu(config, replace(named.settings, precision=Precision.bf16)), named.batch)

    def __str__(self) -> str:
        return f"{self.name}, {parameters_in_words(self.parameters)}"

    # ---- what is divided

    @property
    def layers(self) -> int:
        return self.repeated.count

    @cached_property
    def sequence(self) -> int:
        """The second dim of what is looked up in a table; 1 where nothing is."""
        specs = self.config.model.batch.values()
        return max((spec.shape[1] for spec in specs if spec.dtype.startswith("int") and len(spec.shape) > 1), default=1)

    @cached_property
    def tied(self) -> bool:
        first, end = self.repeated.first, self.repeated.first + self.repeated.length * self.repeated.count
        read = [self._parameters_of(links) for links in (range(first), range(end, len(self._least.chain)))]
        return bool(read[0] & read[1])

    @cached_property
    def parameters(self) -> int:
        return sum(value.type.numel for value in self._least.of_role(Role.PARAMETER))

    @cached_property
    def slices(self) -> list[int]:
        """Powers of two that divide a matrix."""
        return [tp for tp in (1 << n for n in range(MOST_SLICES.bit_length())) if self._divides_a_matrix(tp)]

    def misfit(self, layout: ParallelLayout) -> str | None:
        return None if self._divides_a_matrix(layout.tp) else f"tp={layout.tp} divides no matrix of {self.name}"

    def _divides_a_matrix(self, tp: int) -> bool:
        return tp == 1 or any(size % tp == 0 for size in self._sizes_of_matrices)

    @cached_property
    def _sizes_of_matrices(self) -> set[int]:
        return set(chain(*(v.type.shape for v in self._least.of_role(Role.PARAMETER) if len(v.type.shape) > 1)))

    # ---- how it is traced

    @cached_property
    def samples(self) -> int:
        """A prime that divides no size but those which the samples are in."""
        for number in _primes(LEAST_SAMPLES):
            sizes = self._sizes_without_samples(number)
            if all(size % number for size in sizes):
                return number
        raise AssertionError("there are more primes than sizes")

    def graph(self, attention: AttentionKernel, samples: int) -> OpGraph:
        if samples not in self._graphs:
            self._graphs[samples] = trace(self.config, samples)
        return self._graphs[samples]

    def holds_samples(self, size: int) -> bool:
        return size % self.samples == 0

    def layout_key(self, tp: int) -> Hashable:
        return tp

    def blocks(self, graph: OpGraph, profile: Profile) -> EqualBlocks:
        return self.repeated

    def flops(self, layout: ParallelLayout, parts_of: PartsOf) -> tuple[float, float]:
        parts = parts_of(layout.attention, 1, False, layout.micro_batch)
        ends = sum(_flops(part.forward, part.backward) for part in (parts.before, parts.after))
        once = ends + self.layers * _flops(parts.layer.forward, parts.layer.backward)
        again = self.layers * _flops(parts.layer.again[layout.recompute])
        return once / layout.micro_batch, (once + again) / layout.micro_batch

    @cached_property
    def repeated(self) -> EqualBlocks:
        """The equal blocks that most ops are in; a model without any is one block, but for its loss."""
        links = self._least.chain
        found = equal_blocks([link.block for link in links])
        ops = {own: sum(len(links[own.first + n].ops) for n in range(own.length * own.count)) for own in found}
        return max(ops, key=ops.__getitem__, default=EqualBlocks(0, max(1, len(links) - 1), 1))

    # ----

    @property
    def _least(self) -> OpGraph:
        return self.graph(AttentionKernel.flash, self.samples)

    def _parameters_of(self, links: range) -> set[str]:
        graph, values = self._least, self._least.values
        read = (name for n in links for op in graph.chain[n].ops for name in graph.op(op).inputs)
        return {name for name in read if values[name].role is Role.PARAMETER}

    def _sizes_without_samples(self, number: int) -> set[int]:
        both = [self.graph(AttentionKernel.flash, times * number) for times in (1, 2)]
        one, two = ([value.type for value in graph.values.values()] for graph in both)
        if [len(own.shape) for own in one] != [len(own.shape) for own in two]:
            what = f"its graph for {number} samples is another than for {2 * number}"
            raise TraceError(what, where=f"conf/model/{self.name}.yaml", remedy="price another model")
        return set(chain(*(_same(*pair) for pair in zip(one, two, strict=True))))


def with_works(
    model: Transformer | ConfModel, config: Config, stages: PlannerStages
) -> tuple[Transformer | TracedModel, Works]:
    if isinstance(model, Transformer):
        return model, works_known(config, stages)(model)
    own = TracedModel.of(model, config)
    return own, Works(own, stages)


def _same(one: TensorType, two: TensorType) -> list[int]:
    return [a for a, b in zip(one.shape, two.shape, strict=True) if a == b]


def _primes(least: int) -> Iterator[int]:
    return (n for n in count(least) if all(n % d for d in range(2, n)))


def _flops(*passes: Pass) -> float:
    return sum(kernel.flops for own in passes for kernel in own.kernels)
