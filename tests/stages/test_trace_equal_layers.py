"""Equal layers are exported once: the graph is that of the whole trace, whatever layers have to do with."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.pipeline.ir.verify import verify_graph
from shardwright.pipeline.tracing import equal_layers, equal_modules
from tests.graphs import trace

WIDTH, COUNT = 6, 6
X = {"x": torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(0))}
TAKEN: list[torch.Tensor] = []  # by layers, outside of all modules


class Layer(nn.Module):
    def __init__(self, number=0):
        super().__init__()
        self.number, self.inner, self.outer = number, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(x)))


class Model(nn.Module):
    """`kind` is of layers; the rest is how they are called."""

    def __init__(self, kind=Layer, count=COUNT):
        super().__init__()
        self.layers = nn.ModuleList(kind(number) for number in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        TAKEN.clear()
        return self.head(self.layered(x)).square().mean() + sum(taken.mean() for taken in TAKEN)

    def layered(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Reads(Layer):
    def forward(self, x):
        return super().forward(x) * (1 + self.number)


class Mentions(Layer):
    """Passes its number on, to where nothing is done with it."""

    def forward(self, x, cache=None):
        return super().forward(x if cache is None else cache[self.number])


class Takes(Layer):
    def forward(self, x):
        hidden = F.gelu(self.inner(x))
        TAKEN.append(hidden)
        return x + self.outer(hidden)


class Notes(Layer):
    """Keeps a tensor in itself, which another may read."""

    def forward(self, x):
        self.kept = self.inner(x)
        return x + self.outer(F.gelu(self.kept))


class Writes(Layer):
    def forward(self, x):
        x.mul_(2.0)
        return super().forward(x)


class WritesView(Layer):
    def forward(self, x):
        x.view(-1)[0:2].add_(1.0)
        return super().forward(x)


class InPlace(Layer):
    def forward(self, x):
        hidden = self.inner(x)
        hidden.view(-1).mul_(0.5)
        return x + self.outer(hidden.relu_())


class Normed(Layer):
    def __init__(self, number=0):
        super().__init__(number)
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.1)

    def forward(self, x):
        return super().forward(self.drop(self.norm(x)))


class Constant(Layer):
    def forward(self, x):
        with torch.no_grad():
            scale = torch.tensor([0.5, 2.0]).sum() + self.inner.bias.abs().max()
        return super().forward(x) * scale


class Dict(Layer):
    def forward(self, x):
        return {"x": super().forward(x), "all": None}


class Uneven(Layer):
    """Every other layer has another kind of part."""

    def __init__(self, number=0):
        super().__init__(number)
        self.act = nn.GELU() if number % 2 else nn.SiLU()

    def forward(self, x):
        return x + self.outer(self.act(self.inner(x)))


class Odd(Layer):
    def __init__(self, number=0):
        super().__init__(number)
        self.scale = 0.5 if number == 4 else 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


class Later(Model):
    def layered(self, x):
        return super().layered(x * 1.0)


class Skipped(Model):
    """By the place in the loop, which no layer knows."""

    def layered(self, x):
        early = x
        for number, layer in enumerate(self.layers):
            x = layer(x + early if number == 4 else x)
            early = x if number == 1 else early
        return x


class Experts(Model):
    def layered(self, x):
        return sum(layer(x) for layer in self.layers)


class Twice(Model):
    def layered(self, x):
        return super().layered(super().layered(x))


class Backwards(Model):
    def layered(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.layers[3].outer.bias = self.head.bias


class Shared(Model):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.inner = self.layers[0].inner


class Hooked(Model):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.inner.register_forward_hook(lambda module, given, made: TAKEN.append(made))


class HookedLayers(Model):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(lambda module, given, made: TAKEN.append(made))


class Dicts(Model):
    def __init__(self):
        super().__init__(Dict)

    def layered(self, x):
        for layer in self.layers:
            x = layer(x)["x"]
        return x


class Kept(Model):
    def __init__(self):
        super().__init__(Notes)

    def layered(self, x):
        for layer, before in zip(self.layers, [None, *self.layers], strict=False):
            x = layer(x) if before is None else layer(x) + before.kept.mean()
        return x


class Frozen(Model):
    def layered(self, x):
        with torch.no_grad():
            return super().layered(x)


class Attends(Layer):
    def forward(self, x, mask=None, *, scale=1.0, bias=None):
        bias = self.inner(x).mean((0, 2)) if bias is None else bias
        return super().forward(x.masked_fill(mask, 0.0) * scale + bias[:, None]), bias


class Masked(Model):
    """All are given a mask, all but the first a bias that it has made; one has a number of its own."""

    def __init__(self):
        super().__init__(Attends)

    def layered(self, x):
        mask, bias = x[..., :1] > 0, None
        for number, layer in enumerate(self.layers):
            x, bias = layer(x, mask, scale=0.5 if number == 5 else 1.0, bias=bias)
        return x


class WritesMask(Masked):
    def layered(self, x):
        mask = x[..., :1].detach().clone()
        for layer in self.layers:
            x, _ = layer(x, mask.mul_(0.5) > 0)
        return x


CASES = {  # how many layers are not exported
    "plain": (Model, 4),
    "reads its number": (lambda: Model(Reads), 0),
    "mentions its number": (lambda: Model(Mentions), 4),
    "takes": (lambda: Model(Takes), 0),
    "writes": (lambda: Later(Writes), 0),
    "writes view": (lambda: Later(WritesView), 0),
    "in place": (lambda: Model(InPlace), 4),
    "normed": (lambda: Model(Normed), 4),
    "constant": (lambda: Model(Constant), 0),
    "uneven": (lambda: Model(Uneven, 9), 5),
    "odd": (lambda: Model(Odd), 3),
    "skipped": (Skipped, 4),
    "experts": (Experts, 0),
    "twice": (Twice, 0),
    "backwards": (Backwards, 0),
    "tied": (Tied, 3),
    "shared": (Shared, 0),
    "hooked": (Hooked, 0),
    "hooked layers": (HookedLayers, 0),
    "dicts": (Dicts, 4),
    "kept": (Kept, 0),
    "frozen": (Frozen, 0),
    "masked": (Masked, 3),
    "writes mask": (WritesMask, 0),
}


@pytest.mark.parametrize(("name", "amp"), [*((name, False) for name in CASES), ("plain", True), ("masked", True)])
def test_the_graph_is_that_of_the_whole(name, amp, monkeypatch):
    build, count = CASES[name]
    left_out = []
    plain = equal_layers.write_out

    def noted(program, found):
        plain(program, found)
        left_out.extend(number for layers in found for number in layers.left_out)

    monkeypatch.setattr("shardwright.pipeline.tracing.export.write_out", noted)
    once = trace(build(), X, amp=amp)
    with patch.object(equal_modules, "LEAST", 99):
        whole = trace(build(), X, amp=amp)
    verify_graph(once)
    assert once == whole
    assert len(left_out) == count


def test_an_input_with_the_name_of_an_op():
    class Named(Model):
        def forward(self, add, gelu):
            return super().forward(add + gelu)

    graph = trace(Named(), {"add": X["x"], "gelu": X["x"].clone()})
    assert len({value.name for value in graph.values.values()}) == len(graph.values)
    assert [op.name for op in graph.ops if "gelu" in op.target] == [f"gelu_{n}" for n in range(1, COUNT + 1)]


@torch.library.custom_op("tests::write_into", mutates_args=("target",))
def write_into(amount: float, target: torch.Tensor) -> None:
    target.add_(amount)


def test_what_an_op_writes_into_is_known_by_its_schema():
    graph = torch.fx.Graph()
    target = graph.placeholder("target")
    node = graph.call_function(torch.ops.tests.write_into.default, (1.0, target))
    assert equal_layers._written(node) == [target]
    assert equal_layers._written(graph.call_function(torch.ops.aten.add_.Tensor, (target, target))) == [target]
    assert equal_layers._written(graph.call_function(torch.ops.aten.add.Tensor, (target, target))) == []
