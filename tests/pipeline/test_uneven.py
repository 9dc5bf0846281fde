"""Dims that do not divide: their shards and conversions, which of a graph may be so, and how programs tell of them."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwright.pipeline.ir.cluster import Compute, Curve
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ops.mesh import op_strategies, view_op
from shardwright.pipeline.ops.uneven import uneven_in
from shardwright.pipeline.sharding import slices
from shardwright.pipeline.sharding.conversions import step_arguments
from shardwright.pipeline.sharding.path_tables import conversion_table
from shardwright.pipeline.sharding.paths import Paths
from shardwright.stages.solve.problem.storage import Way, storage_choices
from tests import plans
from tests.graphs import gpt, gpt_batch, trace
from tests.meshes import check_path, everywhere, mesh
from tests.storage_plans import plan_named
from tests.vocabulary import vocabulary_plan

COMPUTE = Compute(Curve((1.0,), (1e12,)), 1e11, 1e-6, 1e-6)
SHAPES, SIZES = ((5,), (7, 6), (1, 5), (9, 10, 3)), ((2,), (3,), (4,), (2, 2), (2, 3))


@st.composite
def layouts(draw, shape: tuple[int, ...], sizes: tuple[int, ...], kinds: str = "RBPS") -> Layout:
    """Any that a tensor of the shape can lie in."""
    states = [*(k for k in kinds if k != "S"), *(f"S({dim})" for dim in range(len(shape)))]
    made = st.tuples(*[st.sampled_from(states)] * len(sizes)).map(lambda own: Layout.parse(",".join(own)))
    return draw(made.filter(lambda layout: layout.holds(shape, sizes)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_shards_have_one_room_and_make_up_the_whole(data) -> None:
    shape, sizes = data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from(SIZES))
    layout = data.draw(layouts(shape, sizes, "RS"))
    seen = torch.zeros(shape, dtype=torch.int64)
    for at in everywhere(sizes):
        runs = layout.runs(shape, sizes, at)
        indices = [torch.tensor([i for start, n in dim for i in range(start, start + n)]) for dim in runs]
        assert all(len(i) <= room for i, room in zip(indices, layout.local_shape(shape, sizes), strict=True))
        if all(len(i) for i in indices):
            seen[torch.meshgrid(*indices, indexing="ij")] += 1
    assert (seen == prod(sizes) // layout.shards(sizes)).all()
    padded = prod(layout.local_shape(shape, sizes)) * layout.shards(sizes)
    assert layout.fits(shape, sizes) == (padded == prod(shape)) == (not layout.uneven(shape, sizes))


@pytest.mark.parametrize(
    ("text", "shape", "sizes", "local"),
    [("S(0)", (7,), (2,), (4,)), ("S(0)", (1,), (3,), (1,)), ("S(0),S(1)", (7, 4), (2, 2), (4, 2)),
     ("S(1),S(0)", (7, 5), (2, 3), (3, 3)), ("S(0),R", (50257, 8), (8, 2), (6283, 8))],
)  # fmt: skip
def test_the_room_of_a_rank(text: str, shape: tuple[int, ...], sizes: tuple[int, ...], local: tuple[int, ...]) -> None:
    layout = Layout.parse(text)
    assert layout.local_shape(shape, sizes) == local
    assert layout.holds(shape, sizes) and not layout.fits(shape, sizes)


@pytest.mark.parametrize(("text", "shape"), [("S(0),S(0)", (7,)), ("S(0),S(0)", (6,)), ("R,S(0:2)", (7,))])
def test_one_axis_alone_splits_a_dim_that_does_not_divide(text: str, shape: tuple[int, ...]) -> None:
    assert not Layout.parse(text).holds(shape, (2, 2))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_conversions_of_uneven_shards(data) -> None:
    """Value and gradient arrive, in room of the right size, with zeros behind them."""
    shape, sizes = data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from(SIZES))
    ends = [data.draw(layouts(shape, sizes)) for _ in range(2)]
    found = Paths(mesh(*sizes), COMPUTE).cheapest(*ends, shape, 8 * prod(shape), True)
    assert all(layout.holds(shape, sizes) for layout in found.layouts)
    check_path(shape, found.layouts, mesh(*sizes))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_table_of_prices_is_that_of_the_paths(data) -> None:
    shape, sizes = (7, 6), data.draw(st.sampled_from(SIZES))
    ends = [data.draw(layouts(shape, sizes)) for _ in range(2)]
    paths = Paths(mesh(*sizes), COMPUTE)
    (priced,) = conversion_table(paths, ends[:1], ends[1:], shape, 8 * prod(shape), True)
    assert priced == pytest.approx([paths.cheapest(*ends, shape, 8 * prod(shape), True).seconds.total])


def test_what_comes_together_is_told_its_size() -> None:
    split, whole, other = (Layout.parse(text) for text in ("S(0)", "R", "S(1)"))
    assert step_arguments(split, whole, (2,), (7, 4)) == {"dim": 0, "size": 7}
    assert step_arguments(split, whole, (2,), (8, 4)) == {"dim": 0}
    assert step_arguments(split, other, (2,), (7, 5)) == {"dim": 0, "to": 1, "size": 7}
    assert step_arguments(whole, split, (2,), (7, 4)) == {"dim": 0}


# ---- which dims


class Head(nn.Module):
    """A table and a head of 11 words, with what a model does to the logits."""

    def __init__(self, tail) -> None:
        super().__init__()
        self.words, self.head, self.tail = nn.Embedding(11, 4), nn.Linear(4, 11), tail

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.tail(self.head(self.words(ids)).flatten(0, 1), labels.flatten())


def strategies_of(tail, sizes: tuple[int, ...] = (2,)) -> dict[str, set[str]]:
    """Of the ops of each kind, the names of their strategies."""
    batch = {"ids": torch.zeros(4, 4, dtype=torch.int64), "labels": torch.zeros(4, 4, dtype=torch.int64)}
    graph = trace(Head(tail), batch)
    found: dict[str, set[str]] = {}
    for op in graph.ops:
        names = {strategy.name for strategy in op_strategies(view_op(graph, op), sizes)}
        found.setdefault(op.target.split(".")[1], set()).update(names)
    return found


@pytest.mark.parametrize(
    "tail",
    [F.cross_entropy,
     lambda x, y: F.cross_entropy(x.float() * 2, y, ignore_index=3, label_smoothing=0.1),
     lambda x, y: F.cross_entropy(30 * torch.tanh(x / 30), y)],
)  # fmt: skip
def test_a_vocabulary_may_be_uneven(tail) -> None:
    found = strategies_of(tail)
    assert "v" in found["embedding"] and "n" in found["linear"] and "c" in found["cross_entropy_loss"]


@pytest.mark.parametrize(
    "tail",
    [lambda x, y: x.softmax(1).gather(1, y[:, None]).mean(),  # mixes what is split
     lambda x, y: F.cross_entropy(x.exp(), y),  # not known to do no harm
     lambda x, y: F.cross_entropy(x, y) + x.sum(),  # reads the padding
     lambda x, y: F.cross_entropy(1 / x, y),
     lambda x, y: F.cross_entropy(x / (2 * x), y),  # zeros divided by zeros
     lambda x, y: F.cross_entropy(x, x.detach().softmax(1))],
)  # fmt: skip
def test_what_would_read_the_padding_is_not(tail) -> None:
    found = strategies_of(tail)
    assert "n" not in found["linear"] and "c" not in found.get("cross_entropy_loss", ())
    assert "v" in found["embedding"], "another table, which nothing else reads"


def test_one_axis_of_a_mesh_takes_a_vocabulary() -> None:
    found = strategies_of(F.cross_entropy, (2, 2))["linear"]
    assert "n,R" in found and "R,n" in found and "n,n" not in found


def test_nothing_is_left_for_the_last_rank() -> None:
    """11 over 5 ranks are 3, 3, 3 and 2."""
    assert "c" in strategies_of(F.cross_entropy, (4,))["cross_entropy_loss"]
    assert "c" not in strategies_of(F.cross_entropy, (5,))["cross_entropy_loss"]


def test_no_other_dim_of_a_model_may_be_uneven() -> None:
    graph = trace(gpt(tie=True), gpt_batch())
    spots = uneven_in(graph).spots
    assert {graph.values[name].origin for name, _ in spots if graph.values[name].origin.endswith("weight")} == {
        "token.weight",
        "position.weight",
    }
    words = graph.values["input_ids"].type.shape, max(graph.values[n].type.shape[d] for n, d in spots)
    assert all(graph.values[name].type.shape[dim] in (words[0][1], words[1]) for name, dim in spots)


# ---- shards


@pytest.mark.parametrize(
    ("shape", "size", "shard"),
    [((35,), 2, "S(0)"), ((35, 8), 2, "S(1)"), ((15, 31), 2, "S(1)"), ((31, 15), 2, "S(0)"), ((3,), 2, None),
     ((), 2, None), ((50257,), 8, "S(0)"), ((4096, 4096), 3, "S(0)")],
)  # fmt: skip
def test_shards_on_the_dim_that_needs_least_padding(shape: tuple[int, ...], size: int, shard: str | None) -> None:
    choices = storage_choices(shape, [], (size,), shards=True)
    found = {way.way: str(way.state) for way in choices if way.way is not Way.as_it_lies}
    assert found == ({} if shard is None else dict.fromkeys((Way.zero1, Way.gathered, Way.regathered), shard))


def test_a_batch_is_cut_into_slices_beside_an_uneven_vocabulary() -> None:
    graph, plan = plans.graph_of("uneven"), vocabulary_plan()
    assert slices.fits(graph, plan.sharding, (2,), (6, 6)) and slices.fits(graph, plan.sharding, (2,), (4, 4, 4))
    by_sample = plan_named("uneven", "zero3").sharding
    assert slices.fits(graph, by_sample, (2,), (6, 6)) and not slices.fits(graph, by_sample, (2,), (9, 3))
