"""The scenarios of benchmarks.step_time: what is trained, with which batch, within which memory, over which links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.overhead_models import GPT


@dataclass(frozen=True)
class Scenario:
    model: str  # a key of MODELS
    sizes: dict[str, int]
    batch: int
    budget_mb: float | None = None  # memory of a rank; who needs more is out of the comparison
    megabits: int | None = None  # of the link between hosts of one rank each; None: both on this machine
    batch_norm: str = "per_rank"  # as the peers have it; `whole` is more than they do


RESNET = {"width": 32, "blocks": 2, "classes": 16, "pixels": 32}
SCENARIOS = {
    "gpt_large_batch": Scenario("gpt", {"vocab_size": 256, "context": 64, "width": 128, "layers": 4, "heads": 4}, 32),
    "wide_mlp_small_batch": Scenario("mlp", {"width": 1024, "layers": 4, "classes": 16}, 8),
    "large_vocabulary": Scenario("gpt", {"vocab_size": 32768, "context": 32, "width": 128, "layers": 2, "heads": 4}, 8),
    "resnet": Scenario("resnet", RESNET, 16),
    "memory_bound": Scenario(
        "gpt", {"vocab_size": 256, "context": 64, "width": 384, "layers": 4, "heads": 4}, 8, budget_mb=115
    ),
    "slow_links": Scenario(
        "gpt", {"vocab_size": 256, "context": 64, "width": 128, "layers": 4, "heads": 4}, 16, megabits=200
    ),
    "resnet_whole_norms": Scenario("resnet", RESNET, 16, batch_norm="whole"),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class MLP(nn.Module):
    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.out = nn.Linear(width, classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return F.cross_entropy(self.out(inputs), targets)


class Residual(nn.Module):
    """The basic block of ResNet; between sizes with a projection and a stride of two."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.skip = nn.Conv2d(before, width, 1, stride, bias=False) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, width: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        widths = [width * 2 ** (n // blocks) for n in range(3 * blocks)]
        self.layers = nn.ModuleList(Residual(a, b) for a, b in zip([width, *widths], widths, strict=False))
        self.out = nn.Linear(widths[-1], classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = F.relu(self.stem(inputs))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.out(x.mean((2, 3))), targets)


def _classes(scenario: Scenario, *shape: int) -> dict[str, Any]:
    sizes = [scenario.batch, *shape]
    return {
        "inputs": {"shape": sizes, "dtype": "float32"},
        "targets": {"shape": sizes[:1], "dtype": "int64", "high": scenario.sizes["classes"]},
    }


def _tokens(scenario: Scenario) -> dict[str, Any]:
    shape = [scenario.batch, scenario.sizes["context"]]
    spec = {"shape": shape, "dtype": "int64", "high": scenario.sizes["vocab_size"]}
    return {"input_ids": spec, "labels": spec}


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[Scenario], dict[str, Any]]]] = {
    "gpt": (GPT, _tokens),
    "mlp": (MLP, lambda scenario: _classes(scenario, scenario.sizes["width"])),
    "resnet": (ResNet, lambda scenario: _classes(scenario, 3, scenario.sizes["pixels"], scenario.sizes["pixels"])),
}


def build(name: str) -> nn.Module:
    """The model of a scenario, as conf/model names it."""
    scenario = SCENARIOS[name]
    torch.manual_seed(0)
    return MODELS[scenario.model][0](**{key: size for key, size in scenario.sizes.items() if key != "pixels"}).train()


def specs(scenario: Scenario) -> dict[str, Any]:
    return MODELS[scenario.model][1](scenario)


def batch(scenario: Scenario) -> dict[str, Tensor]:
    """Of both ranks together."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(spec["high"], spec["shape"], generator=draw)
        if "high" in spec
        else torch.randn(spec["shape"], generator=draw)
        for name, spec in specs(scenario).items()
    }
