"""Products of odd sizes in compiled blocks, as on a GPU: a matrix and its transpose are padded once."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm

from shardwright.pipeline.runtime import compiled
from shardwright.pipeline.runtime.compiler import graph_passes as padding
from shardwright.pipeline.runtime.compiler import partitioner
from tests.compiling import without_kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
PAD, CLASSES = torch.ops.aten.constant_pad_nd.default, 51


def head(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), labels)


def wide(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """All three sizes of its products are odd: the same matrix needs other paddings beside another one."""
    return F.cross_entropy(F.linear(x[:61, :29], weight[:, :29]), labels[:61])


@pytest.mark.parametrize(
    ("function", "keeps", "kernels"),
    [
        (head, 1.0, without_kernels),
        (head, 0.0, without_kernels),
        (wide, 1.0, without_kernels),
        (wide, 0.0, without_kernels),
        pytest.param(wide, 0.0, nullcontext, marks=pytest.mark.long),
    ],
)
def test_what_two_products_read_is_padded_once(monkeypatch, function, keeps, kernels):
    graphs: list[fx.Graph] = []
    torch._dynamo.reset()
    monkeypatch.setattr(pad_mm, "check_device", lambda *_: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    monkeypatch.setattr(partitioner, "min_cut_rematerialization_partition", watched(graphs))
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 32, generator=draw).requires_grad_() for rows in (64, CLASSES))
    labels = torch.randint(CLASSES, (64,), generator=draw)
    with config.patch(fx_graph_cache=False), kernels():
        loss = compiled(function, keeps)(x, weight, labels)
        found = torch.autograd.grad(loss, [x, weight])
    wanted = function(x, weight, labels)
    torch.testing.assert_close([loss, *found], [wanted, *torch.autograd.grad(wanted, [x, weight])])
    (graph,) = graphs
    pads = graph.find_nodes(op="call_function", target=PAD)
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == 3
    assert all(not padding._is_transpose(pad.args[0]) for pad in pads)
    assert len({(pad.args[0], *pad.args[1]) for pad in pads}) == len(pads)
    of_gradient = [pad for pad in pads if pad.meta["val"].shape[0] == pad.args[0].meta["val"].shape[0] == 64]
    assert function is wide or (len(pads) == 2 and len(of_gradient) == 1)


def watched(graphs: list[fx.Graph]):
    inner = partitioner.min_cut_rematerialization_partition

    def partition(graph, inputs, **named):
        graph.graph.lint()
        graphs.append(graph.graph)
        return inner(graph, inputs, **named)

    return partition
