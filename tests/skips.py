"""Modules whose activations are read far from where they are written; sizes divide by 2 and by 3."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwright.pipeline.ir.graph import Args, Op, Ref, Role, TensorType, Value
from shardwright.pipeline.tracing.lower import Ops, without_dead_ops

WIDTH, LENGTH, SAMPLES = 12, 6, 6


class Ladder(nn.Module):
    """Rungs from each layer of the way down to its counterpart on the way up; all layers are of one size."""

    def __init__(self, rungs: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(rungs))
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(rungs))
        self.dropout = dropout

    def forward(self, inputs: Tensor) -> Tensor:
        y, skips = inputs, []
        for layer in self.down:
            y = torch.tanh(layer(y))
            skips.append(y)
            y = F.dropout(y, self.dropout)
        for layer in self.up:
            y = F.dropout(torch.tanh(layer(y)), self.dropout) + skips.pop()
        return F.mse_loss(y, inputs)


class Layer(nn.Module):
    """Attention to a memory, with a bias; where the gate is closed the layer's input passes instead."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = dropout

    def forward(self, y: Tensor, memory: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
        scores = self.query(y) @ memory.transpose(1, 2) + bias
        found = torch.softmax(scores, 2) @ self.value(memory)
        return y + F.dropout(self.out(torch.where(gate, found, y)), self.dropout)


class Shared(nn.Module):
    """Every layer reads the memory, a bias made of a parameter, and a gate, through which no gradient flows."""

    def __init__(self, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder, self.start = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.rand(LENGTH, LENGTH))
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))

    def forward(self, inputs: Tensor) -> Tensor:
        memory = torch.tanh(self.encoder(inputs))
        bias, gate = self.table.exp(), memory > 0
        y = self.start(inputs)
        for layer in self.layers:
            y = layer(y, memory, bias, gate)
        return F.mse_loss(y, inputs)


class UNet(nn.Module):
    """Two convolutions per level, halved and doubled between them, the level's skip put beside what comes up."""

    def __init__(self, levels: int = 3, channels: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 1)
        self.down = nn.ModuleList(self._level(channels, channels) for _ in range(levels))
        self.bottom = self._level(channels, channels)
        self.widen = nn.ModuleList(nn.ConvTranspose2d(channels, channels, 2, 2) for _ in range(levels))
        self.up = nn.ModuleList(self._level(2 * channels, channels) for _ in range(levels))
        self.last = nn.Conv2d(channels, 1, 1)

    @staticmethod
    def _level(inside: int, outside: int) -> nn.Module:
        first, second = nn.Conv2d(inside, outside, 3, padding=1), nn.Conv2d(outside, outside, 3, padding=1)
        return nn.Sequential(first, nn.BatchNorm2d(outside), nn.ReLU(), second, nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        y, skips = self.first(images), []
        for level in self.down:
            y = level(y)
            skips.append(y)
            y = F.max_pool2d(y, 2)
        y = self.bottom(y)
        for widen, level in zip(self.widen, self.up, strict=True):
            y = level(torch.cat((skips.pop(), widen(y)), 1))
        return F.mse_loss(self.last(y), images)


def sequences() -> dict[str, Tensor]:
    return {"inputs": torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))}


def images(side: int = 24) -> dict[str, Tensor]:
    return {"images": torch.randn(SAMPLES, 1, side, side, generator=torch.Generator().manual_seed(1))}


# ---- graphs drawn at random


Step = tuple[str, int, int]  # an op, and how far back the values lie that it reads
KINDS = ["linear", "linear", "linear", "tanh", "add", "gt", "where"]
NEAR = [0, 0, 0, 0, 0, 1, 2]  # mostly what was written last, so that long paths occur
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(NEAR), st.integers(0, 30)), max_size=40)
SIZE = 4


def random_ops(steps: list[Step]) -> Ops:
    """Each step reads any of the values before it, the input among them; what nobody reads is added up to the loss."""
    return _Drawing().run(steps)


class _Drawing:
    def __init__(self) -> None:
        square = TensorType((SIZE, SIZE), "float64")
        self.values = {"inputs": Value("inputs", square, Role.INPUT, "inputs", False)}
        self.ops: list[Op] = []
        self.known, self.masks, self.unread = ["inputs"], [], dict.fromkeys(["inputs"])

    def run(self, steps: list[Step]) -> Ops:
        first = self._linear("inputs")
        for kind, near, far in steps:
            a, b = (self.known[-1 - back % len(self.known)] for back in (near, far))
            if kind == "linear":
                self._linear(a)
            elif kind == "gt":
                self.masks.append(self._add("aten.gt.Scalar", (Ref(a), 0.0), "bool"))
            elif kind == "where" and self.masks:
                self._add("aten.where.self", (Ref(self.masks[-1 - near % len(self.masks)]), Ref(a), Ref(b)))
            elif kind == "tanh":
                self._add("aten.tanh.default", (Ref(a),))
            else:
                self._add("aten.add.Tensor", (Ref(a), Ref(b)))
        total = first
        for name in [name for name in self.unread if name != first]:
            total = self._add("aten.add.Tensor", (Ref(total), Ref(name)))
        loss = self._add("aten.mean.default", (Ref(total),), shape=())
        return without_dead_ops(Ops(self.values, tuple(self.ops), loss))

    def _linear(self, name: str) -> str:
        weight = f"w{len(self.values)}"
        self.values[weight] = Value(weight, self.values["inputs"].type, Role.PARAMETER, weight, True)
        return self._add("aten.linear.default", (Ref(name), Ref(weight)))

    def _add(self, target: str, args: tuple, dtype: str = "float64", shape: tuple[int, ...] = (SIZE, SIZE)) -> str:
        op = Op(f"{target.split('.')[1]}_{len(self.ops)}", target, Args(args), (), "", "")
        grad = dtype != "bool" and any(self.values[name].grad for name in op.inputs)
        self.values[op.name] = Value(op.name, TensorType(shape, dtype), Role.RESULT, op.name, grad)
        self.ops.append(replace(op, outputs=(op.name,)))
        for name in op.inputs:
            self.unread.pop(name, None)
        if dtype != "bool":
            self.known.append(op.name)
            self.unread[op.name] = None
        return op.name


class Weights(nn.Module):
    """The parameters of a graph that was drawn, by their names there."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        for value in ops.values.values():
            if value.role is Role.PARAMETER:
                numbers = torch.randn(value.type.shape, generator=generator, dtype=torch.float64)
                self.register_parameter(value.name, nn.Parameter(numbers))
