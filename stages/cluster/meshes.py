"""Candidate meshes and pipeline pieces of a topology, each axis priced by the slowest link it uses.

Devices are taken in the order of the tree (`device_order`), so neighbours are near: the inner axes of a row-major array
run over fast links and the outer ones over slow links. The devices along an axis are linked as their lowest common
group is, and where a member of that group has one uplink for all its devices, the rings that run beside each other
share it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from math import prod

from pipeline.ir.cluster import Axis, Group, LinkCost, Mesh, Split
from stages.cluster.formulas import NOTHING, ring_links

MOST_PIECES = 64
SAMPLES = 64  # rings of an axis that are looked at, evenly spread, where there are more

Link = tuple[float, float]  # latency, bytes/s


def axis_name(number: int) -> str:
    return f"d{number}"


def candidate_meshes(group: Group) -> tuple[Mesh, ...]:
    """Every shape of one to three axes; of as many axes, those that keep to the groups come first, then the fastest."""
    tree = _Tree(group)
    return _meshes(tree, 0, tree.count)


def candidate_splits(group: Group) -> tuple[Split, ...]:
    """The devices in 2, 3... equal pieces, and in the members of each level of groups where these differ."""
    tree = _Tree(group)
    found = []
    for sizes in dict.fromkeys([*_equal_pieces(tree.count), *_levels(group)]):
        if 1 < len(sizes) <= MOST_PIECES:
            found.append(_split(tree, sizes))
    return tuple(found)


def _equal_pieces(count: int) -> Iterator[tuple[int, ...]]:
    for pieces in range(2, min(count, MOST_PIECES) + 1):
        if count % pieces == 0:
            yield (count // pieces,) * pieces


def _levels(group: Group) -> Iterator[tuple[int, ...]]:
    """The sizes of the members at each depth of the tree."""
    level = [group]
    while any(item.members for item in level):
        level = [member for item in level for member in (item.members or (item,))]
        yield tuple(len(item.ranks) for item in level)


def _split(tree: _Tree, sizes: tuple[int, ...]) -> Split:
    edges = list(accumulate(sizes))[:-1]
    latency, bandwidth = _slowest([tree.link(edge - 1, edge) for edge in edges])
    meshes = {}
    for size in dict.fromkeys(sizes):
        places = [edge - own for edge, own in zip(accumulate(sizes), sizes, strict=True) if own == size]
        found = [_meshes(tree, place, size) for place in (places[:1] if tree.even else places)]
        meshes[str(size)] = _worst(found)
    return Split(sizes, LinkCost(latency, bandwidth), meshes)


def _worst(places: list[tuple[Mesh, ...]]) -> tuple[Mesh, ...]:
    """The meshes of pieces of one size, each axis as slow as it is in any of them."""
    others = [{mesh.sizes: mesh for mesh in meshes} for meshes in places]
    return tuple(
        Mesh(tuple(max(axes, key=_price) for axes in zip(*(found[mesh.sizes].axes for found in others), strict=True)))
        for mesh in places[0]
    )


class _Tree:
    """The groups of the tree by the places of their devices in its order."""

    def __init__(self, group: Group) -> None:
        self.count = len(group.ranks)
        self.root = group
        self.even = _is_even(group)
        self.spans: dict[int, tuple[int, int]] = {}  # id of a group -> first and last place
        self._place(group, 0)
        self.starts = {id(g): [self.spans[id(m)][0] for m in g.members] for g in _all(group)}
        self.largest = {id(g): max((len(m.ranks) for m in g.members), default=1) for g in _all(group)}

    def _place(self, group: Group, first: int) -> None:
        self.spans[id(group)] = first, first + len(group.ranks) - 1
        for member in group.members:
            self._place(member, first)
            first += len(member.ranks)

    def common(self, first: int, last: int) -> Group:
        """The smallest group that holds both places, and so all between them."""
        found = self.root
        while found.members:
            inner = found.members[bisect_right(self.starts[id(found)], first) - 1]
            if last > self.spans[id(inner)][1]:
                return found
            found = inner
        return found

    def link(self, first: int, last: int) -> Link:
        group = self.common(first, last)
        return group.latency, group.bandwidth

    def ring(self, first: int, stride: int, size: int) -> Link:
        """The link of a ring over every `stride`-th place, while the `stride - 1` rings beside it run."""
        group = self.common(first, first + stride * (size - 1))
        if group.uplink is None or not group.members:
            return group.latency, group.bandwidth
        crowd = min(stride, self.largest[id(group)])
        return group.latency, min(group.bandwidth, group.uplink / crowd)


def _all(group: Group) -> Iterator[Group]:
    yield group
    for member in group.members:
        yield from _all(member)


def _is_even(group: Group) -> bool:
    """Whether all members are alike, at every level."""
    shapes = {_shape(member) for member in group.members}
    return len(shapes) <= 1 and all(_is_even(member) for member in group.members)


def _shape(group: Group) -> tuple[object, ...]:
    members = tuple(_shape(member) for member in group.members)
    return len(group.ranks), group.bandwidth, group.latency, group.uplink, members


def _slowest(links: list[Link]) -> Link:
    return min(links, key=lambda link: (link[1], -link[0]))


def _meshes(tree: _Tree, start: int, count: int) -> tuple[Mesh, ...]:
    groups = {1, *(len(group.ranks) for group in _all(tree.root))}
    found = []
    for shape in _shapes(count):
        strides = [prod(shape[number + 1 :]) for number in range(len(shape))]
        astray = sum(stride not in groups for stride in strides)
        axes = tuple(
            Axis(axis_name(number), size, _axis_links(tree, start, count, stride, size))
            for number, (size, stride) in enumerate(zip(shape, strides, strict=True))
        )
        found.append((len(shape), astray, sum(_price(axis) for axis in axes), shape, Mesh(axes)))
    return tuple(item[-1] for item in sorted(found, key=lambda item: item[:-1]))


def _shapes(count: int) -> Iterator[tuple[int, ...]]:
    """Ways to write the count as a product of one to three numbers, order told apart, none of them 1."""
    yield (count,)
    for first in _divisors(count):
        yield first, count // first
        for second in _divisors(count // first):
            yield first, second, count // first // second


def _divisors(count: int) -> list[int]:
    return [d for d in range(2, count // 2 + 1) if count % d == 0]


def _axis_links(tree: _Tree, start: int, count: int, stride: int, size: int) -> dict[str, LinkCost]:
    rings = count // size
    chosen = range(rings) if rings <= SAMPLES else [number * (rings - 1) // (SAMPLES - 1) for number in range(SAMPLES)]
    firsts = [start + ring // stride * stride * size + ring % stride for ring in chosen]
    latency, bandwidth = _slowest([tree.ring(first, stride, size) for first in firsts])
    return ring_links(size, latency, bandwidth)


def _price(axis: Axis) -> float:
    """Seconds to sum a megabyte: what axes are compared by."""
    link = axis.links["all_reduce"]
    return 0.0 if link == NOTHING else link.seconds(1e6)
