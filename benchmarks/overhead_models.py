"""What benchmarks.overhead runs: models as their users write them, and how torch's own tools split them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure_steps import image, locate, text
from shardwright.pipeline.models import gpt

# One rank: models of transformers with batches short enough for a CPU.
ONE_RANK: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_class": "transformers.GPT2LMHeadModel",
        "config_class": "transformers.GPT2Config",
        "config": {"use_cache": False},
        "batch": text(1, 64, 50257),
    },
    "resnet": {
        "model_class": "transformers.ResNetForImageClassification",
        "config_class": "transformers.ResNetConfig",
        "config": {"num_labels": 1000},
        "batch": image(2, 64),
    },
}

# Two ranks: a GPT whose steps are short, where every call counts, and one whose products weigh more.
TWO_RANKS: dict[str, dict[str, int]] = {
    "small": {"vocab_size": 256, "context": 32, "width": 64, "layers": 4, "heads": 4, "batch": 4},
    "wide": {"vocab_size": 1024, "context": 64, "width": 256, "layers": 4, "heads": 4, "batch": 4},
}


def build_one(model: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    built: nn.Module = locate(model["model_class"])(locate(model["config_class"])(**model["config"]))
    return built.train()


def batch_one(model: dict[str, Any]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    batch = {}
    for name, spec in model["batch"].items():
        if "float" in spec["dtype"]:
            batch[name] = torch.randn(spec["shape"], generator=draw)
        else:
            batch[name] = torch.randint(spec["high"], spec["shape"], generator=draw)
    return batch


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(2, (-1, self.head_width)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(gpt.TransformerLayer):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.attention = Attention(width, heads)


class GPT(nn.Module):
    """The number of heads is nowhere a constant, so `parallelize_module` can split them."""

    def __init__(self, vocab_size: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build_two(sizes: dict[str, int]) -> GPT:
    torch.manual_seed(0)
    return GPT(**{name: size for name, size in sizes.items() if name != "batch"}).train()


def batch_two(sizes: dict[str, int]) -> dict[str, Tensor]:
    """Of both ranks together."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(sizes["vocab_size"], (sizes["batch"], sizes["context"] + 1), generator=draw)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
