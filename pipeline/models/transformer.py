"""The decoder-only transformers that people publish, by their sizes: GPT with its norms and dropouts, and Llama.

For prices alone (docs/price.md), never trained: attention is one kernel (`flash`), or two products with a softmax
between them whose kernel scales and masks the scores on the way, so that neither is an op here.

Shape letters: b batch, s sequence, w width, h heads, d head dim, v words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DROPPED = 0.1  # of activations, where there is dropout


@dataclass(frozen=True)
class LayerSizes:
    width: int
    heads: int
    kv_heads: int
    inner: int
    gated: bool
    dropout: bool
    flash: bool

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def dropped(self) -> float:
        return DROPPED if self.dropout else 0.0


Turns = tuple[Tensor, Tensor]  # cosines and sines of Llama's rotary positions, each s 1 d


def turned(x: Tensor, turns: Turns) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * turns[0] + torch.cat((-second, first), -1) * turns[1]


class Attention(nn.Module):
    """GPT makes queries, keys and values by one product, those of a head side by side; Llama by three."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        keys, width = sizes.kv_heads * sizes.head, sizes.width
        self.sizes = sizes
        columns = (width, keys, keys) if sizes.gated else (width + 2 * keys,)
        self.project = nn.ModuleList(nn.Linear(width, each, bias=not sizes.gated) for each in columns)
        self.out = nn.Linear(width, width, bias=not sizes.gated)

    def forward(self, x: Tensor, turns: Turns) -> Tensor:
        b, s, w = x.shape
        y = self._attend(*(part.transpose(1, 2) for part in self._heads(x, turns)))  # b h s d
        return self.out(y.transpose(1, 2).reshape(b, s, w))

    def _heads(self, x: Tensor, turns: Turns) -> Sequence[Tensor]:
        """Each b s h d."""
        b, s, _ = x.shape
        sizes = self.sizes
        if sizes.gated:
            q, k, v = (own(x).view(b, s, -1, sizes.head) for own in self.project)
            return turned(q, turns), turned(k, turns), v
        each = sizes.heads // sizes.kv_heads  # queries for a key
        groups = self.project[0](x).view(b, s, sizes.kv_heads, each + 2, sizes.head)
        return [part.reshape(b, s, -1, sizes.head) for part in groups.split([each, 1, 1], 3)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeated = self.sizes.heads // self.sizes.kv_heads
        if repeated > 1:
            k, v = k.repeat_interleave(repeated, 1), v.repeat_interleave(repeated, 1)
        if self.sizes.flash:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.sizes.dropped, is_causal=True)
        spread = (q @ k.transpose(2, 3)).softmax(-1)
        return (F.dropout(spread, self.sizes.dropped) if self.sizes.dropout else spread) @ v


class Layer(nn.Module):
    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        norm = nn.RMSNorm if sizes.gated else nn.LayerNorm
        self.sizes = sizes
        self.norm_attention, self.norm_feed = norm(sizes.width), norm(sizes.width)
        self.attention = Attention(sizes)
        self.up = nn.Linear(sizes.width, sizes.inner, bias=not sizes.gated)
        self.gate = nn.Linear(sizes.width, sizes.inner, bias=False) if sizes.gated else None
        self.down = nn.Linear(sizes.inner, sizes.width, bias=not sizes.gated)

    def forward(self, x: Tensor, turns: Turns) -> Tensor:
        x = x + self._dropped(self.attention(self.norm_attention(x), turns))
        y = self.norm_feed(x)
        inner = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self._dropped(self.down(inner))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.sizes.dropped) if self.sizes.dropout else x


class Decoder(nn.Module):
    """Returns the mean cross entropy of `labels`."""

    def __init__(self, layer: LayerSizes, layers: int, vocabulary: int, sequence: int, tied: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, layer.width)
        self.position = None if layer.gated else nn.Embedding(sequence, layer.width)
        turns = torch.zeros(sequence, 1, layer.head)  # what stands in it is no matter of a price
        self.register_buffer("cosines", turns, persistent=False)
        self.register_buffer("sines", turns.clone(), persistent=False)
        self.layers = nn.ModuleList(Layer(layer) for _ in range(layers))
        self.norm = (nn.RMSNorm if layer.gated else nn.LayerNorm)(layer.width)
        self.head = nn.Linear(layer.width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token(input_ids)
        if self.position is not None:
            x = x + self.position(places)
        for layer in self.layers:
            x = layer(x, (self.cosines, self.sines))
        logits = self.head(self.norm(x))  # b s v
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(layers: int, vocabulary: int, sequence: int, tied: bool, **layer: Any) -> Decoder:
    return Decoder(LayerSizes(**layer), layers, vocabulary, sequence, tied)
