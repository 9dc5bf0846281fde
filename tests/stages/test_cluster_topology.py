"""Groups are found in noisy pairs whatever their sizes, and meshes put slow links on outer axes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.pipeline.ir.cluster import COLLECTIVES, SEND, Group
from shardwright.stages.cluster.meshes import candidate_meshes, candidate_splits
from shardwright.stages.cluster.topology import device_order, fill_gaps, find_groups, partition_of
from tests.topologies import as_sets, nested, normal, pairs

SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=60, deadline=None)


@FEW
@given(st.integers(1, 24), SEEDS)
def test_the_true_groups_are_found(count, seed):
    draw = random.Random(seed)
    groups = nested(draw, count)
    found = find_groups(pairs(draw, groups))
    assert partition_of(found) == as_sets(groups) - {frozenset([0])}
    assert sorted(found.ranks) == list(range(count))


@pytest.mark.parametrize("seed", range(5))
def test_of_64_ranks_with_normal_noise(seed):
    draw = random.Random(seed)
    groups = nested(draw, 64, least=2.5)
    assert partition_of(find_groups(pairs(draw, groups, normal))) == as_sets(groups)


def hosts_of(*sizes: int, inside: float = 10e9, between: float = 1e9) -> tuple[list[str], list[list[float | None]]]:
    names = [f"h{number}" for number, size in enumerate(sizes) for _ in range(size)]
    return names, [[inside if a == b else between for b in names] for a in names]


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (6,), (1, 1), (2, 1), (8, 4), (6, 6), (5, 3, 1), (8, 8, 8)])
def test_uneven_hosts_are_named(sizes):
    names, matrix = hosts_of(*sizes)
    found = find_groups(matrix, hosts=names)
    assert found.kind == ("host" if len(sizes) == 1 else "cluster")
    members = found.members or ((found,) if len(sizes) == 1 else ())
    if max(sizes) > 1:
        assert tuple(len(member.ranks) for member in members) == sizes
        assert [m.kind for m in members] == ["host" if size > 1 else "device" for size in sizes]


def test_islands_hosts_and_switches():
    hosts = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    islands = [0, 0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5]

    def speed(i: int, j: int) -> float:
        if islands[i] == islands[j]:
            return 100e9
        return 20e9 if hosts[i] == hosts[j] else 5e9 if {hosts[i], hosts[j]} == {"a", "b"} else 1e9

    found = find_groups([[speed(i, j) for j in range(12)] for i in range(12)], hosts=hosts)
    switch, host = found.members
    assert (found.kind, switch.kind, host.kind) == ("cluster", "switch", "host")
    assert [m.kind for m in switch.members] == ["host", "host"] and switch.bandwidth == pytest.approx(5e9)
    assert [m.ranks for m in switch.members[1].members] == [(4, 5, 6), (7,)]
    assert [m.kind for m in switch.members[1].members] == ["island", "device"]


@FEW
@given(SEEDS)
def test_outliers_do_not_move_groups_that_others_bear_out(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(5, 8) for _ in range(draw.randint(1, 4))]
    _, matrix = hosts_of(*sizes)
    count = len(matrix)
    matrix = [[value * draw.uniform(0.95, 1.05) for value in row] for row in matrix]
    a, b, c, d = draw.sample(range(count), 4)
    for rank, other in ((a, b), (c, d)):
        matrix[rank][other] = matrix[other][rank] = matrix[rank][other] / 20  # a moment of other traffic
    found = find_groups(matrix)
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    want = {frozenset(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)}
    assert partition_of(found) == want | {frozenset(range(count))}


@FEW
@given(st.integers(2, 20), SEEDS)
def test_gaps_are_filled_by_the_widest_path(count, seed):
    draw = random.Random(seed)
    exact = pairs(draw, nested(draw, count, shuffle=False), lambda _: 1.0)
    known = [[v if abs(i - j) in (1, 2, 4, 8) else None for j, v in enumerate(row)] for i, row in enumerate(exact)]
    filled = fill_gaps(known)
    assert all(filled[i][j] == exact[i][j] for i in range(count) for j in range(count) if i != j)


def test_a_rank_that_nobody_measured():
    with pytest.raises(ValueError, match="rank 2 was measured with none"):
        find_groups([[None, 1.0, None], [1.0, None, None], [None, None, None]])
    with pytest.raises(ValueError, match="as many columns"):
        find_groups([[None, 1.0]])


def test_latency_is_the_median_between_members():
    names, matrix = hosts_of(2, 2)
    delays = [[1e-6 if a == b else 5e-5 for b in names] for a in names]
    found = find_groups(matrix, delays, names)
    assert found.latency == 5e-5 and {m.latency for m in found.members} == {1e-6}


# ---- meshes


def tree(*sizes: int, inside: float = 200e9, between: float = 25e9, uplink: float | None = None) -> Group:
    ranks = iter(range(sum(sizes)))
    hosts = tuple(Group("host", tuple(next(ranks) for _ in range(size)), inside, 5e-6) for size in sizes)
    return Group("cluster", tuple(range(sum(sizes))), between, 1e-5, uplink, hosts) if len(hosts) > 1 else hosts[0]


@FEW
@given(st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_every_mesh_holds_all_devices_and_is_priced(sizes):
    group = tree(*sizes)
    meshes = candidate_meshes(group)
    count = sum(sizes)
    assert len({mesh.sizes for mesh in meshes}) == len(meshes)
    for mesh in meshes:
        assert math.prod(mesh.sizes) == count and 1 <= len(mesh.axes) <= 3
        for axis in mesh.axes:
            assert set(axis.links) == {*COLLECTIVES, SEND}
            assert axis.size == 1 or all(link.seconds(1e6) > 0 for link in axis.links.values())
    assert [mesh.sizes for mesh in meshes if len(mesh.axes) == 1] == [(count,)]
    for split in candidate_splits(group):
        assert sum(split.sizes) == count and {str(size) for size in split.sizes} == set(split.meshes)
        assert all(math.prod(mesh.sizes) == int(size) for size, own in split.meshes.items() for mesh in own)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 12])
def test_small_counts(count):
    shapes = [mesh.sizes for mesh in candidate_meshes(tree(count))]
    wanted = {1: 1, 2: 1, 3: 1, 6: 3, 12: 8}[count]
    assert shapes[0] == (count,) and len(shapes) == wanted
    assert len(candidate_splits(tree(count))) == {1: 0, 2: 1, 3: 1, 6: 3, 12: 5}[count]


def bandwidths(mesh) -> list[float]:
    return [axis.links[SEND].bandwidth for axis in mesh.axes]


def test_slow_links_are_on_the_outer_axis():
    two = [mesh for mesh in candidate_meshes(tree(8, 8, 8, 8)) if len(mesh.axes) == 2]
    assert two[0].sizes == (4, 8) and bandwidths(two[0]) == [25e9, 200e9]
    for mesh in candidate_meshes(tree(8, 8, 8, 8)):
        assert bandwidths(mesh) == sorted(bandwidths(mesh))
    misfit = next(mesh for mesh in two if mesh.sizes == (2, 16))
    assert bandwidths(misfit) == [25e9, 25e9]


def test_rings_share_the_uplink_of_a_host():
    own, shared = (candidate_meshes(tree(4, 4, uplink=uplink)) for uplink in (None, 25e9))
    alone = {mesh.sizes: mesh for mesh in own}
    crowded = {mesh.sizes: mesh for mesh in shared}
    assert bandwidths(alone[2, 4]) == [25e9, 200e9] and bandwidths(crowded[2, 4]) == [25e9 / 4, 200e9]
    assert bandwidths(alone[8,]) == bandwidths(crowded[8,]) == [25e9]


def test_uneven_hosts():
    group = tree(8, 4)
    by_shape = {mesh.sizes: mesh for mesh in candidate_meshes(group)}
    assert bandwidths(by_shape[3, 4]) == [25e9, 200e9] and bandwidths(by_shape[2, 6]) == [25e9, 25e9]
    splits = {split.sizes: split for split in candidate_splits(group)}
    assert set(splits) == {(6, 6), (4, 4, 4), (3,) * 4, (2,) * 6, (1,) * 12, (8, 4)}
    hosts = splits[8, 4]
    assert hosts.link.bandwidth == 25e9 and set(hosts.meshes) == {"8", "4"}
    assert all(min(bandwidths(mesh)) == 200e9 for own in hosts.meshes.values() for mesh in own)
    # one of the two submeshes of six crosses the hosts: both are priced so
    assert min(bandwidths(splits[6, 6].meshes["6"][0])) == 25e9


def test_the_order_of_devices_keeps_groups_together():
    matrix = [[10e9 if i % 2 == j % 2 else 1e9 for j in range(6)] for i in range(6)]
    assert device_order(find_groups(matrix)) == (0, 2, 4, 1, 3, 5)
    assert device_order(tree(2, 3)) == ()
