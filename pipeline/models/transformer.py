"""The decoder-only transformers that people publish, by their sizes: GPT with its norms and dropouts, Llama, and either
with experts instead of one feed-forward (as Mixtral is a Llama).

For prices alone (docs/price.md), never trained: attention is one kernel (`flash`), or two products with a softmax
between them whose kernel scales and masks the scores on the way, so that neither is an op here.

Shape letters: b batch, s sequence, w width, h heads, d head dim, v words, e experts, f inside of one.
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
    experts: int = 0
    experts_per_token: int = 1

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


class FeedForward(nn.Module):
    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.width, sizes.inner, bias=not sizes.gated)
        self.gate = nn.Linear(sizes.width, sizes.inner, bias=False) if sizes.gated else None
        self.down = nn.Linear(sizes.inner, sizes.width, bias=not sizes.gated)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class ExpertMixture(nn.Module):
    """Each token goes through the experts that it is most like: rows sorted by expert, in one product for all."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.chosen = sizes.experts_per_token
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        there, back = (sizes.experts, sizes.width, sizes.inner), (sizes.experts, sizes.inner, sizes.width)
        self.up, self.down = nn.Parameter(torch.zeros(there)), nn.Parameter(torch.zeros(back))
        self.gate = nn.Parameter(torch.zeros(there)) if sizes.gated else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # t w
        shares, experts = self.router(tokens).softmax(-1).topk(self.chosen)
        order = experts.flatten().argsort()
        until = F.one_hot(experts.flatten(), self.up.shape[0]).sum(0).cumsum(0).to(torch.int32)
        of = order // self.chosen
        rows = tokens[of]
        inner = torch._grouped_mm(rows, self.up, until)
        inner = F.gelu(inner) if self.gate is None else F.silu(torch._grouped_mm(rows, self.gate, until)) * inner
        found = torch._grouped_mm(inner, self.down, until) * shares.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, of, found).view_as(x)


class Layer(nn.Module):
    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        norm = nn.RMSNorm if sizes.gated else nn.LayerNorm
        self.sizes = sizes
        self.norm_attention, self.norm_feed = norm(sizes.width), norm(sizes.width)
        self.attention = Attention(sizes)
        self.feed = ExpertMixture(sizes) if sizes.experts else FeedForward(sizes)

    def forward(self, x: Tensor, turns: Turns) -> Tensor:
        x = x + self._dropped(self.attention(self.norm_attention(x), turns))
        return x + self._dropped(self.feed(self.norm_feed(x)))

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
