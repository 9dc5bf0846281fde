"""Odd models, recompute schedules and plans, of which the tests of codegen write programs."""

from __future__ import annotations

import ast

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import Layout, R
from shardwright.pipeline.ir.plan import Plan, Prediction, Region, Sharding
from shardwright.pipeline.ops.dims import strategies
from shardwright.pipeline.ops.mesh import view_op
from shardwright.pipeline.ops.table import rule_of
from shardwright.stages.codegen.module import write_module
from tests.graphs import GRAPHS, gpt, gpt_batch, mlp, mlp_batch, trace
from tests.made import made_once
from tests.skips import Ladder, Shared, UNet, images, sequences
from tests.unpipelined import whole_plan


def kept(graph: OpGraph) -> tuple[Region, ...]:
    return tuple(Region(i, i, False, ()) for i in range(len(graph.chain)))


def nested(graph: OpGraph) -> tuple[Region, ...]:
    """All links but the loss in one region, those but the first in another inside it."""
    last = len(graph.chain) - 1
    if last < 2:
        return kept(graph)
    inner = (Region(0, 0, False, ()), Region(1, last - 1, True, tuple(Region(i, i, False, ()) for i in range(1, last))))
    return (Region(0, last - 1, True, inner), Region(last, last, False, ()))


def everything(graph: OpGraph) -> tuple[Region, ...]:
    """Every link but the loss in a region of its own."""
    last = len(graph.chain) - 1
    own = tuple(Region(i, i, True, (Region(i, i, False, ()),)) for i in range(last))
    return (*own, Region(last, last, False, ()))


def threes(graph: OpGraph) -> tuple[Region, ...]:
    """Three links in each region, the last two of them in one inside it."""
    last = len(graph.chain) - 1
    regions = []
    for first in range(0, last, 3):
        end = min(first + 2, last - 1)
        links = tuple(Region(i, i, False, ()) for i in range(first, end + 1))
        inner = (links[0], Region(first + 1, end, True, links[1:])) if end > first else links
        regions.append(Region(first, end, True, inner))
    return (*regions, Region(last, last, False, ()))


def deep(graph: OpGraph) -> tuple[Region, ...]:
    """A region for every link: it holds the region of the link before."""
    last = len(graph.chain) - 1
    inner: tuple[Region, ...] = ()
    for i in range(last):
        inner = (Region(0, i, True, (*inner, Region(i, i, False, ()))),)
    return (*inner, Region(last, last, False, ()))


SCHEDULES = {"kept": kept, "nested": nested, "everything": everything, "threes": threes, "deep": deep}


def plan_for(graph: OpGraph, sharding: Sharding, devices: int, regions=None) -> Plan:
    nothing = Prediction(0.0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    return whole_plan((("d0", devices),), "cpu", 0, sharding, regions or kept(graph), nothing)


def uniform(graph: OpGraph, devices: int, split: bool = True) -> Sharding:
    """Every op splits its first dim where it can, else it is replicated."""
    chosen = {}
    for op in graph.ops:
        options = strategies(rule_of(op), view_op(graph, op), devices)
        fitting = [s for s in options if split and op.inputs and str(s.inputs[0]) == "S(0)" and s.outputs[0] != R]
        chosen[op.name] = fitting[0] if fitting else options[0]
    return Sharding(
        chosen,
        {v.origin: Layout((R,)) for v in graph.of_role(Role.PARAMETER)},
        {v.name: Layout((R,)) for v in graph.of_role(Role.INPUT)},
    )


def write(graph: OpGraph, plan: Plan) -> str:
    return write_module(graph, plan)


def load(text: str) -> dict:
    namespace: dict = {}
    exec(compile(text, "module.py", "exec"), namespace)
    return namespace


def functions(text: str) -> list[str]:
    return [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]


# ------------------------------------------------------------------------------------------------- odd models


class Names(nn.Module):
    """Inputs and modules called like the names that generated code uses itself."""

    def __init__(self):
        super().__init__()
        self.x, self.p, self.F, self.torch = (nn.Linear(6, 6) for _ in range(4))
        self.recompute, self.Tensor, self.scope = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, p, F, torch):
        y = self.x(x) + p
        y = self.p(y) * F
        y = self.F(y) + self.torch(x)
        y = self.scope(self.Tensor(self.recompute(y))).relu()
        return (y - x).square().mean() + (y * torch).sum()


class AutoEncoder(nn.Module):
    """Reads its input again at the end, under the name that `forward` uses for the activation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x):
        return F.mse_loss(self.layers(x), x)


class Bare(nn.Module):
    """No function of F, no module, no buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))

    def forward(self, x):
        return torch.tanh(x @ self.weight).sum()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.base.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x):
        return (self.head(F.silu(self.base(x))) * self.scale).mean()


class Unknown(nn.Module):
    """Ops without a rule, with several results, with infinite and text arguments."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, mask):
        first, second, third = self.linear(x).split(2, dim=-1)
        best, _ = torch.max(first, dim=-1)
        hidden = second.masked_fill(mask[:, :2], float("-inf")).logsumexp(-1).clamp(min=-10.0)
        smooth = F.gelu(third, approximate="tanh")
        return torch.cumsum(best, 0).mean() + hidden.mean() + smooth.to(torch.float64).mean().float()


class Stateful(nn.Module):
    """Statistics that change as it runs, changes in place, and a tensor made of numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x):
        y = self.norm(self.first(x))
        y += 1
        y[:, 0] = 0.5
        return self.last(y * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])).square().mean()


class ALongNameOfAModelThatSomebodyLikes(nn.Module):
    """Lines that would be longer than 120 columns."""

    def __init__(self):
        super().__init__()
        self.a_module_with_a_rather_long_and_descriptive_name = nn.ModuleDict(
            {f"another_part_of_the_model_number_{n}": nn.Linear(6, 6) for n in "abc"}
        )

    def forward(self, **inputs):
        total = sum(inputs.values())
        for layer in self.a_module_with_a_rather_long_and_descriptive_name.values():
            total = F.layer_norm(layer(total), (6,)) + sum(inputs.values())
        return total.square().mean()


def x(**more):
    generator = torch.Generator().manual_seed(5)
    return {"x": torch.randn(4, 6, generator=generator), **more}


def odd(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(2)
    other = {
        n: torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(["p", "F", "torch"])
    }
    long = {f"a_long_name_of_an_input_of_the_step_{i}": torch.randn(4, 6) for i in range(6)}
    return {
        "names": lambda: (Names(), x(**other)),
        "autoencoder": lambda: (AutoEncoder(), x()),
        "bare": lambda: (Bare(), x()),
        "frozen": lambda: (Frozen(), x()),
        "unknown": lambda: (Unknown(), x(mask=torch.tensor([[True, False] * 3] * 4))),
        "stateful": lambda: (Stateful(), x()),
        "long": lambda: (ALongNameOfAModelThatSomebodyLikes(), long),
        "gpt": lambda: (gpt(), gpt_batch()),
        "gpt_tied": lambda: (gpt(tie=True), gpt_batch()),
        "mlp": lambda: (mlp(), mlp_batch()),
        "ladder": lambda: (Ladder(), sequences()),
        "shared": lambda: (Shared(), sequences()),
        "ladder_dropout": lambda: (Ladder(dropout=0.3), sequences()),
        "shared_dropout": lambda: (Shared(dropout=0.3), sequences()),
        "unet": lambda: (UNet(), images()),
    }[name]()


ODD = ("names", "autoencoder", "bare", "frozen", "unknown", "stateful", "long", "unet")


@made_once
def odd_graph(name: str) -> OpGraph:
    return GRAPHS[name]() if name in GRAPHS else trace(*odd(name))
