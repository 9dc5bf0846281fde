"""What real ranks of a mesh run: conversion paths, groups of axes, and shards of parameters."""

from __future__ import annotations

import random
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.pipeline import runtime
from shardwright.pipeline.runtime.programs.mesh import axis_of, joined, set_mesh
from shardwright.pipeline.runtime.programs.parameters import shard_of
from shardwright.pipeline.sharding.paths import Paths
from tests.graphs import preset
from tests.meshes import At, check, convert, distribute, everywhere, mesh, own_shard, random_layout
from tests.shards import FORWARD, GRADIENT

SHAPE = (12, 24)


def gathered(tensor: Tensor, places: list[At]) -> dict[At, Tensor]:
    everyone = [torch.empty_like(tensor.contiguous()) for _ in places]
    dist.all_gather(everyone, tensor.contiguous())
    return dict(zip(places, everyone, strict=True))


def run_mesh(sizes: tuple[int, ...], paths: int) -> list[str]:
    """All cases on this rank; the paths that were taken."""
    axes = mesh(*sizes)
    set_mesh({axis.name: axis.size for axis in axes})
    places = everywhere(sizes)
    at = places[dist.get_rank()]
    check_groups(sizes, at)
    check_shards(sizes, at)
    return [check_path(sizes, seed) for seed in range(paths)]


def check_groups(sizes: tuple[int, ...], at: At) -> None:
    """Each axis, and the first two or all of them as one: the ranks that differ there alone, in the mesh's order."""
    for among in ([(n,) for n in range(len(sizes))], [tuple(range(min(2, len(sizes))))], [tuple(range(len(sizes)))]):
        for numbers in among:
            name = joined(tuple(f"d{n}" for n in numbers))
            axis = axis_of(name)
            assert axis.size == prod(sizes[n] for n in numbers)
            x = torch.tensor([float(dist.get_rank())])
            ranks = runtime.gather(x, axis=name, dim=0).tolist()
            others = [n for n in range(len(at)) if n not in numbers]
            alike = [r for r, place in enumerate(everywhere(sizes)) if all(place[n] == at[n] for n in others)]
            assert ranks == alike and alike[axis.rank] == dist.get_rank()


def check_shards(sizes: tuple[int, ...], at: At) -> None:
    draw = random.Random(0)
    whole = torch.arange(prod(SHAPE)).view(SHAPE)
    names = [f"d{n}" for n in range(len(sizes))]
    for _ in range(20):
        layout = random_layout(draw, SHAPE, sizes)
        found = shard_of(whole, layout, names)
        assert torch.equal(found, own_shard(whole, layout, sizes, at)), f"{layout}"
        assert found.is_contiguous() and found.data_ptr() != whole.data_ptr()


def check_path(sizes: tuple[int, ...], seed: int) -> str:
    torch.default_generator.manual_seed(seed)
    draw, places = random.Random(seed), everywhere(sizes)
    source, target = random_layout(draw, SHAPE, sizes), random_layout(draw, SHAPE, sizes)
    path = Paths(mesh(*sizes), preset().compute).cheapest(source, target, SHAPE, 8 * prod(SHAPE), True)
    whole, gradient = torch.randn(2, *SHAPE, dtype=torch.float64)
    at = places[dist.get_rank()]
    x = distribute(whole, source, sizes, FORWARD)[at].requires_grad_()
    y = convert(x, SHAPE, path.layouts, mesh(*sizes))
    y.backward(distribute(gradient, target, sizes, GRADIENT)[at])
    check(gathered(y.detach(), places), whole, target, sizes, FORWARD, "the value")
    check(gathered(x.grad, places), gradient, source, sizes, GRADIENT, "the gradient")
    return " -> ".join(map(str, path.layouts))
