"""The model of benchmarks.attacks.planted_faults: something of everything that a program may get wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Planted(nn.Module):
    """Attention with rotary positions and a mask of its own, a gated layer, batch norm, and two losses."""

    def __init__(self, words: int = 32, width: int = 16, heads: int = 4, length: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.table, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.batch_norm, self.scale = nn.BatchNorm1d(width), nn.Parameter(torch.ones(width))
        self.up, self.gate, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.head = nn.Linear(width, words)
        angles = torch.outer(torch.arange(length).float(), torch.tensor([1.0, 0.1]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(input_ids)
        x = x + self.out(self._attention(self.norm(x)))
        x = x + self.batch_norm(x.transpose(1, 2)).transpose(1, 2) * self.scale
        y = F.rms_norm(x, (x.shape[-1],), eps=1e-5)
        x = x + F.dropout(self.down(F.silu(self.gate(y)) * self.up(y)), 0.1)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + 1e-2 * logits.logsumexp(-1).square().mean()

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = (self._turned(part).transpose(1, 2) for part in (q, k))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v.transpose(1, 2)
        return y.transpose(1, 2).flatten(2)

    def _turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[:, None]).flatten(3)
