"""Models with complex numbers inside: rotary positions, Fourier layers, complex parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Rotary(nn.Module):
    """Attention as Llama's own code has it: positions turn pairs of numbers, which are seen as complex ones."""

    def __init__(self, words: int = 12, width: int = 24, heads: int = 6, length: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.table, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, words)
        speeds = 10.0 ** -torch.arange(0, width // heads // 2, dtype=torch.float32)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), speeds)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(input_ids)
        y = self.norm(x)
        q, k, v = (linear(y).unflatten(-1, (self.heads, -1)) for linear in (self.query, self.key, self.value))
        q, k = self._turned(q), self._turned(k)
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def _turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[:, None]).flatten(3)


class Fourier(nn.Module):
    """FNet: a transform along words and features mixes; one along words alone filters, in complex numbers."""

    def __init__(self, words: int = 12, width: int = 24, length: int = 12) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.filter = nn.Parameter(torch.randn(length // 2 + 1, width, 2) * 0.3)
        self.up, self.down, self.head = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.Linear(width, words),
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(input_ids)
        x = self.norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        spectrum = torch.fft.rfft(x, dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        x = x + torch.fft.irfft(spectrum, n=x.shape[1], dim=1, norm="ortho")
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class ComplexLayers(nn.Module):
    """Complex parameters; conjugates, lengths and angles; what is real of them, and what is not."""

    def __init__(self, words: int = 12, width: int = 24) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.weight, self.other = (nn.Parameter(torch.randn(width, width, dtype=torch.complex64) * 0.2) for _ in "ab")
        self.bias = nn.Parameter(torch.randn(width, dtype=torch.complex64) * 0.2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(input_ids)
        z = F.linear(torch.complex(x, x.sin()), self.weight, self.bias)
        z = torch.polar(z.abs() + 1.0, z.imag) + z.conj() @ self.other.mH - 0.5j * z
        x = x + z.real * torch.tanh(z.imag) + z.conj().imag.cumsum(-1) * 0.1 + 0.1 * z.angle()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
