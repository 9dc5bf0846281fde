"""A small decoder-only transformer, written the way a user would write one: nothing in it knows of sharding.

Shape letters: b batch, s sequence, w width, h heads, d head dim, v vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (self._split_heads(proj(x)) for proj in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # b h s d
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def _split_heads(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)


class TransformerLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """Returns the mean cross entropy of `labels`, which the data set has already shifted by one token."""

    def __init__(self, vocab_size: int, context: int, width: int, layers: int, heads: int, tie: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} must be a multiple of heads {heads}")
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width)
        self.layers = nn.ModuleList(TransformerLayer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tie:
            self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token(input_ids) + self.position(positions)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))  # b s v
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(**sizes: Any) -> GPT:
    return GPT(**sizes)
