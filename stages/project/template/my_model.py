"""A small language model and made-up data: plain PyTorch, nothing in it knows of sharding. Put your own here.

`forward` takes the tensors of one step by the names that conf/model/my_model.yaml gives them, and returns the loss. The
data set gives one sample at a time by the same names, without the batch dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = batch, length, self.heads, width // self.heads
        q, k, v = (each(x).view(shape).transpose(1, 2) for each in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before(x))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self, words: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.word(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count upwards in steps of their own: the next token can be learned."""

    def __init__(self, words: int, length: int, samples: int) -> None:
        self.words, self.length, self.samples = words, length, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        start, step = torch.randint(1, self.words, (2,), generator=draw).tolist()
        row = (start + step % 7 * torch.arange(self.length + 1)) % self.words
        return {"tokens": row[:-1], "targets": row[1:]}
