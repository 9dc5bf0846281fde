"""Tensors on meshes of several axes: layouts to draw, what each rank holds, and ranks simulated by threads.

The ranks of a simulated mesh are threads that run the real conversions; only the collectives themselves are replaced,
by ones that meet in memory. A place on the mesh is a tuple with a number for each axis.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from math import prod
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from shardwright.pipeline import runtime
from shardwright.pipeline.ir.cluster import Axis
from shardwright.pipeline.ir.layout import B, Layout, P, Place, R, S, State, at_places
from shardwright.pipeline.runtime.programs import collectives
from shardwright.pipeline.runtime.programs import mesh as runtime_mesh
from shardwright.pipeline.runtime.programs.mesh import MeshAxis
from shardwright.pipeline.sharding.conversions import conversion_of, step_arguments, step_axis
from shardwright.stages.cluster.meshes import LinkRates, group_links
from tests.shards import FORWARD, GRADIENT
from tests.simulated import Done

At = tuple[int, ...]
SIZES = [(2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (2, 1, 3)]
SHAPES = [(12,), (24, 12), (36, 8), (12, 5, 8), (8, 12, 36)]


def mesh(*sizes: int, latency: float = 5e-6, bandwidth: float = 10e9) -> tuple[Axis, ...]:
    return tuple(
        Axis(f"d{i}", size, group_links(size, LinkRates.alike(latency, bandwidth))) for i, size in enumerate(sizes)
    )


# ---- layouts


def spots(shape: tuple[int, ...], size: int) -> list[State | Place]:
    """Everything an axis of that size may do to the tensor on its own."""
    divisors = [(d, o) for d, n in enumerate(shape) for o in range(1, n + 1) if n % (o * size) == 0]
    return [R, B, P, *(Place(d, o) for d, o in divisors)]


def layout_of(chosen: tuple[State | Place, ...], sizes: tuple[int, ...]) -> Layout:
    states = tuple(S(spot.dim) if isinstance(spot, Place) else spot for spot in chosen)
    return at_places(states, {a: spot for a, spot in enumerate(chosen) if isinstance(spot, Place)}, sizes)


def clear(chosen: tuple[State | Place, ...], sizes: tuple[int, ...]) -> bool:
    pairs = itertools.combinations([(s, n) for s, n in zip(chosen, sizes, strict=True) if isinstance(s, Place)], 2)
    return all(a.clear_of(n, b, m) for (a, n), (b, m) in pairs)


def all_layouts(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[Layout]:
    choices = itertools.product(*(spots(shape, size) for size in sizes))
    return [layout_of(chosen, sizes) for chosen in choices if clear(chosen, sizes)]


def random_layout(draw: random.Random, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Layout:
    """Any layout that fits; splits are drawn more often than the other states together."""
    chosen: tuple[State | Place, ...] = ()
    for number, size in enumerate(sizes):
        free = [s for s in spots(shape, size) if clear((*chosen, s), sizes[: number + 1])]
        split = [s for s in free if isinstance(s, Place)]
        chosen = (*chosen, draw.choice(split if split and draw.random() < 0.5 else free))
    return layout_of(chosen, sizes)


@st.composite
def placed(draw, count: int = 1) -> tuple:
    """A shape, the sizes of a mesh, and layouts of that tensor there."""
    shape, sizes = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(SIZES))
    randoms = [draw(st.randoms(use_true_random=False)) for _ in range(count)]
    return shape, sizes, *(random_layout(own, shape, sizes) for own in randoms)


# ---- what the ranks hold


def everywhere(sizes: tuple[int, ...]) -> list[At]:
    return list(itertools.product(*(range(size) for size in sizes)))


def own_shard(whole: Tensor, layout: Layout, sizes: tuple[int, ...], at: At) -> Tensor:
    """By the layout's own runs of indices, with zeros behind them where the shards are not equal."""
    shard = torch.zeros(layout.local_shape(tuple(whole.shape), sizes), dtype=whole.dtype)
    for dim, runs in enumerate(layout.runs(tuple(whole.shape), sizes, at)):
        whole = whole[(slice(None),) * dim + (torch.cat([torch.arange(s, s + n) for s, n in runs]),)]
    shard[tuple(slice(n) for n in whole.shape)] = whole
    return shard


def distribute(whole: Tensor, layout: Layout, sizes: tuple[int, ...], forms: dict[str, str]) -> dict[At, Tensor]:
    """A value (or gradient) of that layout, by place: random summands on the axes where it is partial."""
    held: dict[At, Tensor] = {(): whole}
    for state, size in zip(layout.states, sizes, strict=True):
        spread: dict[At, Tensor] = {}
        for at, tensor in held.items():
            parts = [tensor] * size
            if forms[state.kind] == "summand":
                parts = [torch.randn_like(tensor) for _ in range(size - 1)]
                parts.append(tensor - sum(parts, torch.zeros_like(tensor)))
            spread |= {(*at, i): part for i, part in enumerate(parts)}
        held = spread
    return {at: own_shard(tensor, layout, sizes, at) for at, tensor in held.items()}


def check(
    found: dict[At, Tensor], whole: Tensor, layout: Layout, sizes: tuple[int, ...], forms: dict[str, str], what: str
) -> None:
    """What the ranks hold, summed where it is partial, is the whole's shard at every place."""
    partial = [axis for axis, state in enumerate(layout.states) if forms[state.kind] == "summand"]
    for at in everywhere(sizes):
        options = [range(n) if axis in partial else (at[axis],) for axis, n in enumerate(sizes)]
        total = sum(found[other] for other in itertools.product(*options))
        expected = own_shard(whole, layout, sizes, at)
        assert total.shape == expected.shape, f"{what} in {layout}: {tuple(total.shape)}, not {tuple(expected.shape)}"
        assert torch.allclose(total, expected, rtol=1e-9, atol=1e-9), f"{what} in {layout} is wrong at {at}"


# ---- conversions


def convert(x: Tensor, shape: tuple[int, ...], layouts: tuple[Layout, ...], axes: tuple[Axis, ...]) -> Tensor:
    """A tensor of that shape, through these layouts, step by step, as a generated program would."""
    sizes = tuple(axis.size for axis in axes)
    for source, target in itertools.pairwise(layouts):
        function = getattr(runtime, conversion_of(source, target, sizes).function)
        axis = axes[step_axis(source, target, sizes)].name
        x = function(x, axis=axis, **step_arguments(source, target, sizes, shape))
    return x


def check_path(shape: tuple[int, ...], layouts: tuple[Layout, ...], axes: tuple[Axis, ...]) -> None:
    """On simulated ranks: the value arrives in the last layout, its gradient in the first."""
    sizes = tuple(axis.size for axis in axes)
    whole, gradient = torch.randn(2, *shape, dtype=torch.float64)
    values = distribute(whole, layouts[0], sizes, FORWARD)
    gradients = distribute(gradient, layouts[-1], sizes, GRADIENT)

    def rank(at: At) -> tuple[Tensor, Tensor]:
        x = values[at].clone().requires_grad_()
        y = convert(x, shape, layouts, axes)
        y.backward(gradients[at])
        return y.detach(), x.grad

    found = run_threads(rank, axes)
    check({at: y for at, (y, _) in found.items()}, whole, layouts[-1], sizes, FORWARD, "the value")
    check({at: g for at, (_, g) in found.items()}, gradient, layouts[0], sizes, GRADIENT, "the gradient")


# ---- ranks as threads


class Meeting:
    """A group of simulated ranks: each brings a tensor and takes what all brought."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=600)
        self.brought: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.barrier.wait()
        self.brought[rank] = tensor.clone()
        self.barrier.wait()
        return list(self.brought)


class Own(threading.local):
    axes: dict[str, MeshAxis]


OWN = Own()


class Simulated:
    """torch.distributed's collectives among the threads; a group is a meeting and the rank's number in it."""

    ReduceOp = ReduceOp

    @staticmethod
    def get_backend(group) -> str:
        return "threads"

    @staticmethod
    def all_reduce(tensor: Tensor, group, op=ReduceOp.SUM, async_op=False) -> Done | None:
        everyone = torch.stack(group[0].exchange(group[1], tensor))
        tensor.copy_(everyone.amax(0) if op == ReduceOp.MAX else everyone.sum(0))
        return Done() if async_op else None

    @staticmethod
    def all_gather(output: Tensor, tensor: Tensor, group, async_op=False) -> Done | None:
        output.copy_(torch.cat(group[0].exchange(group[1], tensor)))
        return Done() if async_op else None

    @staticmethod
    def reduce_scatter(output: Tensor, tensor: Tensor, group) -> None:
        total = torch.stack(group[0].exchange(group[1], tensor)).sum(0)
        output.copy_(total.chunk(len(group[0].brought))[group[1]])

    @staticmethod
    def all_to_all_single(output: Tensor, tensor: Tensor, group) -> None:
        sent = group[0].exchange(group[1], tensor)
        output.copy_(torch.cat([other.chunk(len(sent))[group[1]] for other in sent]))


def run_threads(function: Callable[[At], object], axes: tuple[Axis, ...]) -> dict[At, object]:
    """Calls the function once at every place of the mesh, all at the same time."""
    sizes = tuple(axis.size for axis in axes)
    places = everywhere(sizes)
    joint = [c for count in range(1, len(axes) + 1) for c in itertools.combinations(range(len(axes)), count)]
    meetings: dict[tuple, Meeting] = {}
    own: dict[At, dict[str, MeshAxis]] = {at: {} for at in places}
    for among in joint:
        size = prod(sizes[n] for n in among)
        for at in places:
            others = tuple(i for n, i in enumerate(at) if n not in among)
            rank = 0
            for n in among:
                rank = rank * sizes[n] + at[n]
            group = meetings.setdefault((among, others), Meeting(size)), rank
            own[at]["+".join(axes[n].name for n in among)] = MeshAxis(size, rank, group)
    results: dict[At, object] = {}
    errors: list[BaseException] = []

    def run(at: At) -> None:
        OWN.axes = own[at]
        try:
            results[at] = function(at)
        except BaseException as error:  # raised by the thread that waits
            errors.append(error)
            for meeting in meetings.values():
                meeting.barrier.abort()

    def of_thread(name: str) -> MeshAxis:
        return OWN.axes[name]

    replaced = {"all_gather_into": Simulated.all_gather, "reduce_scatter_from": Simulated.reduce_scatter}
    with (
        mock.patch.multiple(collectives, dist=Simulated, axis_of=of_thread, **replaced),
        mock.patch.multiple(runtime_mesh, dist=Simulated, axis_of=of_thread),
        mock.patch("shardwright.pipeline.runtime.recompute.regather.axis_of", of_thread),
    ):
        threads = [threading.Thread(target=run, args=(at,)) for at in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    broken = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)] or errors
    if broken:
        raise broken[0]
    return results
