"""Models that are something else when they evaluate: dropout of every kind, and batch norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

WORDS, LENGTH, WIDTH, BATCH, SIDE = 16, 8, 8, 4, 6


class DroppingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).view(BATCH, LENGTH, 2, WIDTH // 2).transpose(1, 2) for m in (self.query, self.key, self.value))
        dropped = 0.3 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)))
        return x + self.dropout(self.down(F.rrelu(self.up(self.norm(x)), training=self.training)))


class DroppingGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.3)
        self.layers = nn.ModuleList(DroppingLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.dropout(self.token(input_ids))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class NormedConvolutions(nn.Module):
    """The second batch norm keeps no statistics: it takes those of the batch in either mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.unkept = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, track_running_stats=False)
        self.dropout, self.alpha, self.out = nn.Dropout2d(0.3), nn.AlphaDropout(0.3), nn.Linear(8, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(images)))
        x = self.dropout(F.relu(self.unkept(self.second(x))))
        return F.cross_entropy(self.alpha(self.out(x.mean((2, 3)))), labels)


class DrawingModel(nn.Module):
    """Draws numbers by itself while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y + torch.rand_like(y)).square().mean() if self.training else y.square().mean()


class Images(Dataset[dict[str, Tensor]]):
    """Noise with a mean and a spread of its own, so that running statistics are not where they began.

    Also draws from torch's own generator when it is made, as it should not.
    """

    def __init__(self, samples: int, first: int = 0) -> None:
        torch.rand(1)
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        label = torch.randint(5, (), generator=generator)
        return {"images": torch.randn(3, SIDE, SIDE, generator=generator) * 2 + label, "labels": label}
