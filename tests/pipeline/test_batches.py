"""One rank's part of a step's batch, on meshes of several axes."""

from __future__ import annotations

import random
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.runtime.programs.mesh import MeshAxis
from shardwright.pipeline.runtime.step.slices import Slices
from shardwright.pipeline.user import batches
from tests.mesh_plans import stored
from tests.meshes import everywhere, own_shard

SHAPES = {"inputs": (12, 6, 4), "labels": (12, 6)}


class Samples:
    """Counts what is read of it."""

    def __init__(self) -> None:
        self.tensors = {name: torch.arange(torch.Size(shape).numel()).view(shape) for name, shape in SHAPES.items()}
        self.read: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {name: tensor[index] for name, tensor in self.tensors.items()}


def batch_at(layouts: dict[str, Layout], sizes: tuple[int, ...], at: tuple[int, ...]) -> tuple[dict, list[int]]:
    """The rank's batch, and the samples that were read for it."""
    axes = {f"d{n}": MeshAxis(size, i, None) for n, (size, i) in enumerate(zip(sizes, at, strict=True))}
    specs = {name: {"shape": list(shape), "dtype": "int64"} for name, shape in SHAPES.items()}
    job = {"model": {"batch": specs}, "data": {"shuffle": False, "seed": 0}, "where": {"data": ""}}
    with mock.patch.object(batches, "axis_of", axes.__getitem__):
        samples = Samples()
        found = batches.Batches(samples, job, layouts, list(axes))
        samples.read.clear()
        return found[0], samples.read


@settings(deadline=None)
@given(st.sampled_from([(2,), (2, 2), (2, 3), (3, 1, 2)]), st.integers(0, 10**6))
def test_a_rank_reads_its_shard_of_every_input(sizes: tuple[int, ...], seed: int) -> None:
    draw = random.Random(seed)
    layouts = {name: stored(draw, shape, sizes) for name, shape in SHAPES.items()}
    for at in everywhere(sizes):
        batch, _ = batch_at(layouts, sizes, at)
        for name, tensor in Samples().tensors.items():
            assert torch.equal(batch[name], own_shard(tensor, layouts[name], sizes, at)), f"{name} in {layouts[name]}"
            assert batch[name].is_contiguous()


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 5), st.integers(7, 40), st.booleans())
def test_slices_of_a_batch_follow_one_another(count: int, step: int, length: int, shuffle: bool) -> None:
    """Also where the data begins anew in the middle of one."""
    samples = [{"x": torch.tensor(n)} for n in range(length)]
    job = {"model": {"batch": {"x": {"shape": [12], "dtype": "int64"}}, "precision": "fp32"}}
    job |= {"data": {"shuffle": shuffle, "seed": 3}, "where": {"data": ""}}
    whole = batches.Batches(samples, job, {"x": Layout(())}, [])[step]["x"]
    slices = Slices(tuple(map(len, torch.arange(12).tensor_split(count))))
    parts = batches.Batches(samples, job, {"x": Layout(())}, [], slices=slices)
    found = [parts[step * count + n]["x"] for n in range(count)]
    assert torch.equal(torch.cat(found), whole) and tuple(map(len, found)) == slices.samples


@settings(deadline=None)
@given(st.lists(st.floats(-9, 9), min_size=12, max_size=12), st.integers(1, 12), st.integers(1, 3))
def test_losses_count_by_their_samples(losses: list[float], count: int, passes: int) -> None:
    """The mean of the means of slices is that of all samples, and so is the sum of what the step's losses come to."""
    numbers = torch.tensor(losses * passes, dtype=torch.float64)
    slices = Slices(tuple(map(len, torch.arange(12).tensor_split(count))))
    means = [float(part.mean()) for part in numbers.split(slices.samples * passes)]
    assert slices.mean(means) == pytest.approx(float(numbers.mean()), abs=1e-9)
    shares = [mean / parts for mean, parts in zip(means, slices.parts(count * passes), strict=True)]
    assert sum(shares) == pytest.approx(slices.mean(means), abs=1e-9)
    assert slices.uneven == (12 % count > 0) == any(map(slices.is_smaller, range(count)))


def test_every_epoch_has_an_order_of_its_own() -> None:
    orders = [batches.sample_indices(40 * epoch, 40, 40, True, 7) for epoch in range(3)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len(set(map(tuple, orders))) == 3 and orders[0] != list(range(40))
    assert batches.sample_indices(39, 2, 40, False, 7) == [39, 0]


def test_only_the_rows_that_a_rank_needs_are_read() -> None:
    def read(inputs: str, labels: str) -> list[int]:
        return batch_at({"inputs": Layout.parse(inputs), "labels": Layout.parse(labels)}, (2, 2), (1, 0))[1]

    assert read("S(0),R", "S(0),R") == read("S(0),S(1)", "S(0),R") == [6, 7, 8, 9, 10, 11]
    assert read("S(0),S(0)", "S(0),S(0)") == [6, 7, 8]
    assert read("S(0)',S(0)", "S(0)',S(0)") == [3, 4, 5]
    assert read("S(0:3),R", "S(0:3),R") == [2, 3, 6, 7, 10, 11]
    assert read("S(0),R", "R,R") == list(range(12))


@pytest.mark.parametrize(
    ("length", "told"),
    [
        (lambda self: 0, "has no length or no items"),
        (None, "has no length or no items"),
        (lambda self: 1.5, "cannot be told: TypeError: 'float' object"),
        (lambda self: len(None), "cannot be told: TypeError: object of type 'NoneType'"),
        (lambda self: sys.exit(3), "cannot be told: SystemExit: 3"),
    ],
)
def test_a_data_set_without_a_length(length, told: str) -> None:
    made = type("Mine", (), {"__len__": length} if length else {})()
    with pytest.raises(TrainError, match=f"conf/data/x.yaml: .*Mine {told}"):
        batches.length_of(made, "conf/data/x.yaml")
