"""Conversion paths: proved by running them, priced by hand, and compared with every path there is."""

from __future__ import annotations

import itertools
from collections import defaultdict
from math import inf, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.pipeline.ir.cluster import COLLECTIVES, Axis, LinkCost
from shardwright.pipeline.ir.layout import B, Layout, P, Place, R, S
from shardwright.pipeline.rates.compute import Seconds
from shardwright.pipeline.sharding.conversions import conversion, entry_seconds, step_arguments, step_axis
from shardwright.pipeline.sharding.paths import Path, Paths
from tests import mesh_cases
from tests.graphs import preset
from tests.meshes import all_layouts, check_path, mesh, placed
from tests.ranks import run_ranks

COMPUTE = preset().compute


def path(source: str, target: str, shape: tuple[int, ...], *sizes: int, grad: bool = True) -> Path:
    nbytes = 4 * prod(shape)
    return Paths(mesh(*sizes), COMPUTE).cheapest(Layout.parse(source), Layout.parse(target), shape, nbytes, grad)


def texts(found: Path) -> list[str]:
    return [str(layout) for layout in found.layouts]


@settings(max_examples=120, deadline=None)
@given(placed(2), st.sampled_from([1e-9, 1e-3]))
def test_a_path_brings_every_shard_and_every_gradient_to_its_place(case, latency: float) -> None:
    shape, sizes, source, target = case
    torch.default_generator.manual_seed(0)
    axes = mesh(*sizes, latency=latency)
    found = Paths(axes, COMPUTE).cheapest(source, target, shape, 8 * prod(shape), True)
    assert (found.layouts[0], found.layouts[-1]) == (source, target)
    check_path(shape, found.layouts, axes)


# ---- against every path of up to four steps


def local_bytes(layout: Layout, axis: int, sizes: tuple[int, ...], nbytes: int) -> int:
    others = (size for i, size in enumerate(sizes) if i != axis and layout.states[i].kind == "S")
    return nbytes // prod(others)


def all_steps(known: list[Layout], nbytes: int, grad: bool, axes: tuple[Axis, ...]) -> dict:
    """Every layout -> those that one step leads to, with its seconds: layouts that agree on all axes but one."""
    sizes = tuple(axis.size for axis in axes)
    spots = {x: [x.places(sizes).get(i, s) for i, s in enumerate(x.states)] for x in known}
    found: dict[Layout, list[tuple[Layout, float]]] = {layout: [] for layout in known}
    for number, axis in enumerate(axes):
        alike = defaultdict(list)
        for layout in known:
            alike[*spots[layout][:number], None, *spots[layout][number + 1 :]].append(layout)
        for group in alike.values():
            for before, after in itertools.permutations(group, 2):
                here, there = spots[before][number], spots[after][number]
                states = before.states[number], after.states[number]
                if isinstance(here, Place) and isinstance(there, Place):
                    if not here.clear_of(axis.size, there, axis.size):
                        continue
                    states = S(0), S(1)
                local = local_bytes(before, number, sizes, nbytes)
                found[before].append((after, entry_seconds(conversion(*states), local, grad, axis, COMPUTE).total))
    return found


def partial_axes(layout: Layout) -> frozenset[int]:
    return frozenset(axis for axis, state in enumerate(layout.states) if state == P)


def shortest(
    start: Layout, edges: dict[Layout, list[tuple[Layout, float]]], partial: frozenset[int]
) -> dict[Layout, float]:
    """Every layout -> the cheapest of all paths of up to four steps, with `P` on these axes alone."""
    best = {start: 0.0}
    for _ in range(4):
        reached = dict(best)
        for before, seconds in best.items():
            for after, cost in edges[before]:
                if partial_axes(after) - partial:
                    continue
                reached[after] = min(reached.get(after, inf), seconds + cost)
        best = reached
    return best


@st.composite
def any_mesh(draw, sizes: tuple[int, ...]) -> tuple[Axis, ...]:
    """Rings, or links of any price: an all-reduce may be cheaper than a gather."""
    if draw(st.booleans()):
        return mesh(*sizes, latency=draw(st.sampled_from([1e-9, 1e-6, 1e-3])), bandwidth=1e8)
    links = st.builds(LinkCost, st.floats(1e-7, 1e-4), st.floats(1e6, 1e9))
    return tuple(Axis(f"d{i}", n, {name: draw(links) for name in COLLECTIVES}) for i, n in enumerate(sizes))


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((12,), (2,)), ((8, 4), (2, 2)), ((6, 12), (2, 3)), ((4, 4, 4), (2, 2)), ((24,), (2, 2)), ((8,), (2, 2, 2)),
     pytest.param((4, 4), (2, 2, 2), marks=pytest.mark.long)],
)  # fmt: skip
@settings(max_examples=6, deadline=None)
@given(st.data(), st.booleans())
def test_no_path_is_cheaper(shape: tuple[int, ...], sizes: tuple[int, ...], data, grad: bool) -> None:
    axes = data.draw(any_mesh(sizes))
    nbytes = 1000 * prod(shape)
    known = all_layouts(shape, sizes)
    edges = all_steps(known, nbytes, grad, axes)
    paths = Paths(axes, COMPUTE)
    for start in data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=2)):
        bests: dict[frozenset[int], dict[Layout, float]] = {}
        for target in known:
            ends = partial_axes(start) | partial_axes(target)
            partial = frozenset(range(len(sizes))) if grad else ends
            if partial not in bests:
                bests[partial] = shortest(start, edges, partial)
            best = bests[partial]
            found = paths.cheapest(start, target, shape, nbytes, grad)
            assert found.seconds.total <= best[target] * (1 + 1e-9), f"{start} -> {target}"
            if len(found.layouts) <= 5:
                assert found.seconds.total == pytest.approx(best[target], rel=1e-9), f"{start} -> {target}"


# ---- by hand


@settings(max_examples=60, deadline=None)
@given(placed(3), st.booleans())
def test_paths_keep_the_triangle_inequality(case, grad: bool) -> None:
    shape, sizes, first, second, third = case
    paths = Paths(mesh(*sizes), COMPUTE)

    def seconds(source: Layout, target: Layout) -> float:
        return paths.cheapest(source, target, shape, 4 * prod(shape), grad).seconds.total

    assert seconds(first, third) <= (seconds(first, second) + seconds(second, third)) * (1 + 1e-9)
    assert seconds(first, first) == 0.0


def test_a_layout_is_where_it_is() -> None:
    found = path("S(0),P", "S(0),P", (4, 4), 2, 2)
    assert found == Path((Layout.parse("S(0),P"),), Seconds(0.0, 0.0))


def test_two_axes_move_from_one_dim_to_another() -> None:
    """`[R,S01,R] -> [S01,R,R]` costs the sum of its steps, of which there are at most three."""
    found = path("S(1),S(1)", "S(0),S(0)", (4, 4, 4), 2, 2)
    assert 2 < len(found.layouts) <= 4
    steps = [path(str(a), str(b), (4, 4, 4), 2, 2) for a, b in itertools.pairwise(found.layouts)]
    assert all(len(step.layouts) == 2 for step in steps)
    assert found.seconds.forward == pytest.approx(sum(step.seconds.forward for step in steps))
    assert found.seconds.backward == pytest.approx(sum(step.seconds.backward for step in steps))


def test_two_axes_on_one_dim_change_places() -> None:
    found = path("S(0),S(0)", "S(0)',S(0)", (16, 16), 2, 2)
    assert len(found.layouts) == 4
    assert len(path("S(0),S(0)", "S(0),S(0)'", (16, 16), 2, 2).layouts) == 1  # the prime says nothing new


def test_a_step_is_priced_for_what_a_rank_holds() -> None:
    """Gathered on axis 1 while axis 0 holds a half each: half the bytes of the tensor."""
    axes = mesh(2, 4)
    found = path("S(0),S(1)", "S(0),R", (64, 64), 2, 4)
    nbytes = 4 * 64 * 64 // 2
    assert found.seconds == entry_seconds(conversion(S(1), R), nbytes, True, axes[1], COMPUTE)
    assert path("R,R", "R,B", (64, 64), 2, 4).seconds.forward == 0.0


def test_the_cheaper_order_is_taken() -> None:
    """Reduced before gathered: the sum is of a half. Split before it is summed: the same."""
    assert texts(path("P,S(0)", "R,R", (64, 64), 2, 2)) == ["P,S(0)", "R,S(0)", "R,R"]
    assert texts(path("P,R", "R,S(0)", (64, 64), 2, 2)) == ["P,R", "P,S(0)", "R,S(0)"]


@pytest.mark.parametrize(
    ("source", "target"), [(a, b) for a in (R, B, P, S(0), S(1)) for b in (R, B, P, S(0), S(1)) if a != b]
)
@pytest.mark.parametrize("grad", [True, False])
def test_one_axis_takes_the_table_s_entry(source, target, grad: bool) -> None:
    found = path(str(source), str(target), (12, 12), 3, grad=grad)
    assert found.layouts == (Layout((source,)), Layout((target,)))
    assert found.seconds == entry_seconds(conversion(source, target), 4 * 144, grad, mesh(3)[0], COMPUTE)


def test_a_fused_weight_is_put_in_the_order_of_its_rows() -> None:
    assert texts(path("S(0:3)", "S(0)", (1200, 1600), 2)) == ["S(0:3)", "S(0:6)", "S(0)"]
    assert texts(path("S(0:3)", "R", (12, 4), 2)) == ["S(0:3)", "R"]


def test_a_layout_that_does_not_fit_has_no_path() -> None:
    with pytest.raises(ValueError, match=r"no path S\(0:2\) -> R: S\(0:2\) does not fit \(5,\) on \(2,\)"):
        path("S(0:2)", "R", (5,), 2)
    with pytest.raises(ValueError, match="does not fit"):
        path("R", "S(1)", (4,), 2)


def test_a_path_is_searched_once() -> None:
    paths = Paths(mesh(2, 2), COMPUTE)
    ask = Layout.parse("S(1),S(1)"), Layout.parse("S(0),S(0)"), (4, 4), 64, True
    assert paths.cheapest(*ask) is paths.cheapest(*ask)
    assert paths.cheapest(*ask) == Paths(mesh(2, 2), COMPUTE).cheapest(*ask)


def test_what_a_step_s_function_is_told() -> None:
    def told(source: str, target: str, *sizes: int) -> dict[str, int]:
        return step_arguments(Layout.parse(source), Layout.parse(target), sizes)

    assert told("P", "R", 2) == told("R,P", "R,B", 2, 2) == {}
    assert told("S(1)", "B", 2) == told("P", "S(1)", 2) == {"dim": 1}
    assert told("S(1)", "S(0)", 2) == {"dim": 1, "to": 0}
    assert told("S(0:3)", "S(1:5)", 2) == {"dim": 0, "parts": 3, "to": 1, "to_parts": 5}
    assert told("S(0),S(0)", "S(0),R", 2, 2) == {"dim": 0}
    assert told("S(0),S(0)", "R,S(0:2)", 2, 2) == {"dim": 0}
    assert told("S(0),S(0:8)", "S(0),R", 2, 4) == {"dim": 0, "parts": 4}
    assert step_axis(Layout.parse("S(0),S(0)"), Layout.parse("R,S(0:2)"), (2, 2)) == 0
    with pytest.raises(ValueError, match="not one step: it changes 2 axes"):
        told("S(0),S(0)", "R,S(0)", 2, 2)
    with pytest.raises(ValueError, match="changes 0 axes"):
        told("R", "R", 2)


# ---- on real ranks


@pytest.mark.parametrize(("sizes", "paths"), [((2, 2), 30), ((2, 3), 20), ((2, 2, 2), 10)], ids=str)
def test_paths_on_real_ranks(sizes: tuple[int, ...], paths: int) -> None:
    taken = run_ranks(prod(sizes), mesh_cases.run_mesh, sizes, paths)
    assert all(found == taken[0] for found in taken), "ranks found different paths"
    assert max(found.count("->") for found in taken[0]) >= 3


def test_a_mask_is_never_summed() -> None:
    """Where an all-reduce is cheaper than a gather, a float tensor is padded and summed; a mask or index is not."""
    (ring,) = mesh(2)
    links = {**ring.links, "all_reduce": LinkCost(1e-9, 1e12)}
    ask = Layout.parse("S(0)"), Layout.parse("R"), (4,), 16
    paths = Paths((Axis("d0", 2, links),), COMPUTE)
    assert texts(paths.cheapest(*ask, True)) == ["S(0)", "P", "R"]
    assert texts(paths.cheapest(*ask, False)) == ["S(0)", "R"]
