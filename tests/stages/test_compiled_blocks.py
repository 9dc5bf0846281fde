"""Blocks as they are compiled and measured; here without a GPU, by what autograd keeps of them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.profile import CompiledWay
from shardwright.pipeline.ops.blocks import MOST_OPS, blocks_of, relus_between
from shardwright.pipeline.runtime.compiler.compiled import compiled
from shardwright.stages.profile import compiled as profiling
from shardwright.stages.profile.compiled import BlockRun, as_function, measure_blocks, no_garbage, worth_choosing
from tests.compiling import without_kernels
from tests.graphs import gpt, gpt_batch, gpt_graph, mlp_graph, trace

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class Stage(nn.Sequential):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__(*(Layer(width, width) for _ in range(layers)))


class Staged(nn.Module):
    """Lists in a list: the second is too long for one block."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.stages = nn.ModuleList([Stage(4, 3), Stage(4, MOST_OPS // 2), Stage(4, 2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for stage in self.stages:
            x = stage(x)
        return x.square().mean()


def test_modules_of_an_inner_list_are_one_block_while_they_stay_small():
    graph = trace(Staged(), {"x": torch.randn(2, 4)})
    spans = blocks_of(graph)
    assert [first for first, _ in spans[1:]] == [last + 1 for _, last in spans[:-1]]
    assert spans[0][0] == 0 and spans[-1][1] == len(graph.chain) - 1
    ops = [sum(len(graph.chain[n].ops) for n in range(first, last + 1)) for first, last in spans]
    assert max(ops) <= MOST_OPS and len(spans) == 6  # start, 3 layers, two parts of the long list, 2 layers, the end


class Skips(nn.Module):
    """Relus that the next layer reads; the second one is read by a later layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(11))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.layers[0](x))
        skips = last = torch.relu(self.layers[1](first))
        for layer in self.layers[2:]:
            last = torch.tanh(layer(last))
        return torch.relu(last + skips).square().mean()


def test_relus_between_blocks_are_those_that_the_next_one_alone_reads():
    graph = trace(Skips(), {"x": torch.randn(2, 4)})
    spans = [(number, number) for number in range(len(graph.chain))]
    first, skips, last = (op.name for op in graph.ops if op.target == "aten.relu.default")
    assert skips in graph.common and relus_between(graph, spans) == {first, last}
    assert not relus_between(graph, spans[::2])  # those between are not compiled


def test_a_model_without_lists_is_cut_as_its_chain_is():
    graph = mlp_graph()
    assert all(first == last for first, last in blocks_of(graph)) or len(blocks_of(graph)) >= 4


def test_ops_as_a_function_compute_what_the_module_does():
    module, batch, graph = gpt(), gpt_batch(), gpt_graph()
    inputs = [value for value in graph.values.values() if value.role is not Role.RESULT]
    names = [value.name for value in inputs]
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), **batch}
    given = [tensors[value.origin or value.name] for value in inputs]
    function = as_function(graph, [op.name for op in graph.ops], names, [graph.output], torch.device("cpu"))
    (loss,) = function(*given)
    torch.testing.assert_close(loss, module(**batch))


def kept(block: BlockRun, keeps: float) -> tuple[CompiledWay, tuple[Tensor, ...]]:
    """Bytes that autograd keeps of a block beside what it was given."""
    given = {t.untyped_storage().data_ptr() for t in block.arguments}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found.update({storage.data_ptr(): storage.nbytes()} if storage.data_ptr() not in given else {})
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = block.forward()
    left = tuple(result.detach().clone() for result in results)
    block.both()
    alone = sum(found.values())
    return CompiledWay(keeps, 1.0, 1e9 / (1 + alone), alone + 1, alone, 0, 0), left  # what keeps more takes less time


def test_equal_blocks_are_measured_once_and_ways_keep_less_and_less():
    graph = gpt_graph()
    ways = {"keeps": (1.0, 0.5, 0.0), "cheapest": (0.6,)}
    with without_kernels():
        found = measure_blocks(graph, torch.device("cpu"), amp=False, **ways, measure=kept)
    assert [(block.first, block.last) for block in found.blocks] == list(blocks_of(graph))
    tables, one, two, end = (block.run for block in found.blocks)
    assert len(found.runs[tables]) == 1  # nothing of it is kept, however it is compiled
    assert one == two and len({tables, one, end}) == len(found.runs) == 3
    for ways in found.runs:
        assert ways[0].keeps == 1.0
        sizes = [way.saved_alone for way in ways]
        assert sizes == sorted(set(sizes), reverse=True)
    assert [(way.keeps, way.cheapest) for way in found.runs[one]] == [
        (1.0, False),
        (0.6, True),
        (0.5, False),
        (0.0, False),
    ]
    assert found.runs[one][-1].saved_alone == 0


class Convolved(nn.Sequential):
    def __init__(self, entering: int = 4) -> None:
        super().__init__(nn.Conv2d(entering, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Convolved(3), Convolved(), Convolved()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_blocks_of_images_are_measured_as_the_relus_around_them_have_them_compiled(monkeypatch):
    """Their norm is an op of torch here, not the runtime's function of that name."""
    graph, ways = trace(Images(), {"x": torch.randn(2, 3, 4, 4)}), []

    def told(*given, cheapest, after_relu, before_relu):
        ways.append((bool(after_relu), before_relu, cheapest))
        return compiled(*given, cheapest=cheapest, after_relu=after_relu, before_relu=before_relu)

    monkeypatch.setattr("shardwright.stages.profile.compiled.compiled", told)
    with without_kernels():
        found = measure_blocks(graph, torch.device("cpu"), amp=False, keeps=(1.0,), cheapest=(0.5,), measure=kept)
    assert [block.run for block in found.blocks] == [0, 1, 1, 2]  # of the layers, and the loss
    layers = [(first_relu, True, cheapest) for first_relu in (False, True) for cheapest in (False, True)]
    assert ways == [*layers, (True, False, False)]  # the loss keeps nothing: one way is all


def test_ways_that_another_surpasses_are_not_offered():
    def way(keeps: float, backward: float, alone: int, peak: int = 0, cheapest: bool = False) -> CompiledWay:
        return CompiledWay(keeps, 1.0, backward, alone + 5, alone, 0, peak, cheapest)

    whole, slower, good = way(1.0, 2.0, 100), way(0.9, 3.0, 60), way(0.5, 2.5, 60, cheapest=True)
    as_whole, least, less_at_peak = way(0.8, 2.005, 100), way(0.0, 4.0, 0, peak=50), way(0.3, 4.5, 20, peak=10)
    found = worth_choosing([whole, slower, as_whole, least, less_at_peak, good])
    assert found == (whole, good, less_at_peak, least)


def test_what_earlier_blocks_left_is_freed_before_a_block_is_weighed_and_nothing_meanwhile():
    freed = []

    class Left:
        def __init__(self, name: str) -> None:
            self.name, self.cycle = name, self

        def __del__(self) -> None:
            freed.append(self.name)

    Left("before")
    with no_garbage():
        assert freed == ["before"]
        Left("meanwhile")
        [[] for _ in range(100_000)]  # so many new lists would have it looked for
        assert freed == ["before"] and not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("rounds", "wanted"),
    [
        ([(1.0, 2.0), (1.0, 2.01)], 1),  # settled at once
        ([(1.4, 2.5), (1.1, 2.1), (1.0, 2.0), (1.0, 2.0)], 3),  # clocks rise
        ([(1.0, 2.0), (1.1, 2.0), (1.2, 2.0), (1.3, 2.0), (1.4, 2.0)], 3),  # and do not settle: no more than that
    ],
)
def test_a_block_is_timed_until_two_rounds_agree(monkeypatch, rounds, wanted):
    left = iter(rounds)
    monkeypatch.setattr(profiling, "_medians", lambda block: next(left))
    assert profiling._seconds(None) == rounds[wanted]
    assert len(list(left)) == len(rounds) - wanted - 1
