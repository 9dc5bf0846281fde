"""A training loop of one's own on several devices: `python train.py plan`, then `torchrun --nproc-per-node=2 train.py`.

`sw.plan` and `sw.parallelize` are all that makes it parallel (docs/python.md).
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw

VOCABULARY, CONTEXT, BATCH, STEPS = 64, 32, 8, 20
PLAN = "plan.json"


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Model(nn.Module):
    """Gives its loss: that is all that is asked of it."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch_of(step: int) -> dict[str, Tensor]:
    """Counting, from somewhere: every rank makes the whole batch, and takes its part of it."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    numbers = (start + torch.arange(CONTEXT + 1)) % VOCABULARY
    return {"tokens": numbers[:, :-1], "targets": numbers[:, 1:]}


def plan() -> None:
    with torch.device("meta"):
        model = Model()
    found = sw.plan(model, batch_of(0), cluster="preset_cpu", optimizer=torch.optim.AdamW)
    print(found)
    found.save(PLAN)


def train() -> list[float]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = sw.parallelize(model, optimizer, sw.load(PLAN))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        loss = model(**batch_of(step))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if torch.distributed.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    whole = model.state_dict(gathered=True)  # on rank 0: what the model without a plan loads
    if whole:
        torch.save(whole, "weights.pt")
    return losses


if __name__ == "__main__":
    plan() if sys.argv[1:] == ["plan"] else train()
