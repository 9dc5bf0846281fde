"""A transformer by its sizes, and how it is laid out on devices.

s tokens in a sequence, h wide, a heads of d, g heads of keys, f wide inside:

parameters of a layer    q, k, v, out: h (2 a d + 2 g d);   feed-forward: 2 h f, or 3 h f where it is gated
                         of e experts each has a feed-forward, and h e choose among them
FLOPs of a token         6 for each parameter of a product that it passes, 12 s a d for attention (all pairs counted)

rank = ((stage * dp) + replica) * tp + slice: the slices of a product lie nearest each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.config.schema import OverlapMode
from shardwright.pipeline.cost.pipelines.schedules import Pipeline
from shardwright.pipeline.layouts.work import Parts, RecomputeMode


class LayoutModel(Protocol):
    """What is to be known of a model to divide it among devices."""

    @property
    def batch(self) -> int:
        """Samples of a step; 0: not known."""

    @property
    def layers(self) -> int:
        """Equal ones, which stages of a pipeline share."""

    @property
    def sequence(self) -> int:
        """Tokens of a sample."""

    @property
    def tied(self) -> bool:
        """Whether its last layer reads a parameter that its first one reads."""

    @property
    def parameters(self) -> int: ...

    @property
    def slices(self) -> list[int]: ...

    def misfit(self, layout: ParallelLayout) -> str | None:
        """Which of its sizes a layout does not divide."""

    def flops(self, layout: ParallelLayout, parts_of: PartsOf) -> tuple[float, float]:
        """Of a sample, nothing computed twice; and with what is computed again."""


@dataclass(frozen=True)
class Transformer:
    hidden: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int = 0  # 0: as many as heads
    inner: int = 0  # width inside the feed-forward; 0: 4 times hidden
    gated: bool = False  # feed-forward of three products (Llama), not two
    dropout: bool = True
    tied: bool = True  # the embedding is also the last product
    batch: int = 0  # sequences of a step with which it was trained; 0: not known
    experts: int = 0  # feed-forwards of a layer; 0: one, through which all tokens go
    experts_per_token: int = 2

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @property
    def keys(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def feed(self) -> int:
        return self.inner or 4 * self.hidden

    @property
    def projected(self) -> int:
        """Columns of the product that makes queries, keys and values."""
        return (self.heads + 2 * self.keys) * self.head

    @property
    def layer_parameters(self) -> int:
        return self._layer_parameters(self.experts)

    @property
    def passed_parameters(self) -> int:
        """Of a layer, those that a token is multiplied with."""
        return self._layer_parameters(self.experts_per_token)

    def _layer_parameters(self, experts: int) -> int:
        attention = self.hidden * (self.projected + self.heads * self.head)
        feed = (3 if self.gated else 2) * self.hidden * self.feed
        return attention + (experts * feed + self.hidden * self.experts if self.experts else feed)

    @property
    def end_parameters(self) -> int:
        """Of the embedding, and as many of the last product where it has its own."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.end_parameters * (1 if self.tied else 2)

    @property
    def sample_flops(self) -> float:
        """Of a sequence, forward and backward, nothing computed twice."""
        products = self.layers * self.passed_parameters + self.end_parameters
        return self.sequence * (6.0 * products + 12.0 * self.layers * self.sequence * self.heads * self.head)

    @property
    def slices(self) -> list[int]:
        """Into how many parts its layers may be cut."""
        return divisors(self.heads)

    def misfit(self, layout: ParallelLayout) -> str | None:
        tp = layout.tp
        rules = (
            (
                self.experts and not self.experts_per_token <= self.experts,
                f"experts_per_token={self.experts_per_token} is more than experts={self.experts}",
            ),
            (self.hidden % self.heads, f"hidden={self.hidden} is not a multiple of heads={self.heads}"),
            (self.heads % tp, f"tp={tp} does not divide heads={self.heads}"),
            (self.keys % tp, f"tp={tp} does not divide kv_heads={self.keys}"),
            (self.feed % tp, f"tp={tp} does not divide the {self.feed} columns of the feed-forward"),
        )
        return next((what for wrong, what in rules if wrong), None)

    def flops(self, layout: ParallelLayout, parts_of: PartsOf) -> tuple[float, float]:
        """As it is published: with full recompute the forward pass of all layers a second time."""
        layers = self.sequence * self.layers * 2.0 * (self.passed_parameters + 2 * self.sequence * self.hidden)
        return self.sample_flops, self.sample_flops + layers * (layout.recompute is RecomputeMode.full)

    def __str__(self) -> str:
        return parameters_in_words(self.parameters)


def parameters_in_words(count: int) -> str:
    for size, name in ((1e8, "billion"), (1e5, "million")):
        if count >= size:
            return f"{count / (10 * size):.1f} {name} parameters"
    return f"{count:,} parameters"


def gpt(hidden: int, layers: int, heads: int, batch: int) -> Transformer:
    return Transformer(hidden, layers, heads, 2048, 51200, batch=batch)


def llama(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, sequence: int, batch: int) -> Transformer:
    words = 32000 if sequence == 4096 else 128256  # of Llama 2 and Llama 3
    return Transformer(hidden, layers, heads, sequence, words, kv_heads, inner, True, False, False, batch)


# GPT: Narayanan et al., SC21, table 1. Llama: the papers of Llama 2 (4 M tokens a step) and Llama 3 (up to 16 M).
KNOWN = {
    "gpt_1.7b": gpt(2304, 24, 24, 512),
    "gpt_3.6b": gpt(3072, 30, 32, 512),
    "gpt_7.5b": gpt(4096, 36, 32, 512),
    "gpt_18b": gpt(6144, 40, 48, 1024),
    "gpt_39b": gpt(8192, 48, 64, 1536),
    "gpt_76b": gpt(10240, 60, 80, 1792),
    "gpt_145b": gpt(12288, 80, 96, 2304),
    "gpt3_175b": gpt(12288, 96, 96, 1536),
    "gpt_310b": gpt(16384, 96, 128, 2160),
    "gpt_530b": gpt(20480, 105, 128, 2520),
    "gpt_1t": gpt(25600, 128, 160, 3072),
    "llama2_7b": llama(4096, 32, 32, 32, 11008, 4096, 1024),
    "llama2_13b": llama(5120, 40, 40, 40, 13824, 4096, 1024),
    "llama2_70b": llama(8192, 80, 64, 8, 28672, 4096, 1024),
    "llama3_8b": llama(4096, 32, 32, 8, 14336, 8192, 1024),
    "llama3_70b": llama(8192, 80, 64, 8, 28672, 8192, 2048),
    "llama3_405b": llama(16384, 126, 128, 8, 53248, 8192, 2048),
}


class LayoutError(ShardwrightError):
    """Sizes that do not divide."""


class AttentionKernel(StrEnum):
    flash = "flash"  # one kernel that keeps no square tensor
    plain = "plain"  # products and softmax one after another


PartsOf = Callable[[AttentionKernel, int, bool, int], Parts]  # tp, whether the sequence is split, samples


@dataclass(frozen=True)
class ParallelLayout:
    dp: int
    tp: int
    pp: int
    micro_batch: int
    batch: int  # sequences of a step, all devices together
    schedule: Pipeline = Pipeline.ONE_F_ONE_B
    chunks: int = 1  # parts of the model on each stage, interleaved
    recompute: RecomputeMode = RecomputeMode.none
    zero: int = 0  # 1: optimizer state split over dp, 2: gradients too, 3: parameters too
    sequence_parallel: bool = False
    attention: AttentionKernel = AttentionKernel.flash
    overlap: OverlapMode = OverlapMode.runtime

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.dp * self.micro_batch)

    @property
    def sliced(self) -> int:
        """Into how many parts tp cuts what it does not multiply: with sequence parallelism as many as the rest."""
        return self.tp if self.sequence_parallel else 1


def why_not(model: LayoutModel, layout: ParallelLayout) -> str | None:
    """What does not divide; None where all does."""
    dp, tp, pp, chunks, micro, batch = (
        layout.dp, layout.tp, layout.pp, layout.chunks, layout.micro_batch, layout.batch,
    )  # fmt: skip
    misfit, interleaved = model.misfit(layout), layout.schedule is Pipeline.INTERLEAVED
    several = f"schedule={layout.schedule.value} with chunks={chunks}: interleaved has 2 or more, others 1"
    multiple = f"interleaved needs micro-batches ({layout.micro_batches}) that are a multiple of pp={pp}"
    rules = (
        ((chunks > 1) != interleaved, several),
        (misfit, misfit),
        (model.layers < pp, f"pp={pp} is more than layers={model.layers}"),
        (batch % (dp * micro), f"dp={dp} times micro_batch={micro} does not divide batch={batch}"),
        (layout.sequence_parallel and model.sequence % tp, f"tp={tp} does not divide the sequence"),
        (
            interleaved and model.layers % (pp * chunks),
            f"pp={pp} times chunks={chunks} does not divide layers={model.layers}",
        ),
        (interleaved and layout.micro_batches % pp, multiple),
        (interleaved and pp == 1, "interleaved needs pp of at least 2"),
    )
    return next((what for wrong, what in rules if wrong), None)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def stage_layers(model: LayoutModel, layout: ParallelLayout) -> tuple[int, ...]:
    """Layers of each stage; where they do not divide, the stages in the middle have one more."""
    least, more = divmod(model.layers, layout.pp)
    first = (layout.pp - more + 1) // 2
    return tuple(least + (first <= stage < first + more) for stage in range(layout.pp))
