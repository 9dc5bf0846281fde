"""A transformer by its sizes: s tokens in a sequence, h wide, a heads of d, g heads of keys, f wide inside.

parameters of a layer    q, k, v, out: h (2 a d + 2 g d);   feed-forward: 2 h f, or 3 h f where it is gated
FLOPs of a token         6 for each parameter of a product, 12 s a d for attention (all pairs counted)
"""

from __future__ import annotations

from dataclasses import dataclass


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
        attention = self.hidden * (self.projected + self.heads * self.head)
        return attention + (3 if self.gated else 2) * self.hidden * self.feed

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
        products = self.layers * self.layer_parameters + self.end_parameters
        return self.sequence * (6.0 * products + 12.0 * self.layers * self.sequence * self.heads * self.head)


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
