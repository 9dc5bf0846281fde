"""Candidate meshes and splits into pipeline stages of a topology, each axis priced by the slowest link it uses.

Devices are taken in the order of the tree (`device_order`), so neighbours are near: the inner axes of a row-major array
run over fast links and the outer ones over slow links. The devices along an axis are linked as their lowest common
group is. Where a member of that group (a host) has one uplink for all its devices, the k groups of the axis that cross
it at once get 1/k of it each: with 8 tensor-parallel ranks on a host, each of their 8 data-parallel groups gets an
eighth. A group with m devices in the host can send through each of them, so it gets at most m times what one has.

Seconds of collectives from what the links of an axis carry, n devices, a tensor of N bytes:

ring    all-reduce       2 (n-1) (latency + N / n / around)
        gather, scatter    (n-1) (latency + N / n / around)
        all-to-all         (n-1) (latency + N / n^2 / each)
tree    all-reduce       2 log2(n) latency + 2 N / around, which is faster for small tensors
next    send                     latency + N / one
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil, log2, prod

from shardwright.pipeline.ir.cluster import COLLECTIVES, SEND, Axis, Group, LinkCost, Mesh, Split

FASTEST = 1e15  # bytes/s that stand for "costs nothing": a device to itself
NOTHING = LinkCost(0.0, FASTEST)
MOST_SUBMESHES = 64
SAMPLES = 64  # groups of an axis that are looked at, evenly spread, where there are more


def candidate_meshes(group: Group) -> tuple[Mesh, ...]:
    """Every shape of one to three axes; of as many axes, those that keep to the groups come first, then the fastest."""
    tree = _Tree(group)
    return _meshes(tree, 0, tree.count)


def candidate_splits(group: Group) -> tuple[Split, ...]:
    """The devices in 2, 3... equal submeshes, and in the members of each level of groups where these differ."""
    tree = _Tree(group)
    equal = [(tree.count // n,) * n for n in range(2, min(tree.count, MOST_SUBMESHES) + 1) if tree.count % n == 0]
    levels = []  # the sizes of the members at each depth of the tree
    level = [group]
    while any(item.members for item in level):
        level = [member for item in level for member in (item.members or (item,))]
        levels.append(tuple(len(item.ranks) for item in level))
    every = dict.fromkeys([*equal, *levels])
    return tuple(_split(tree, sizes) for sizes in every if 1 < len(sizes) <= MOST_SUBMESHES)


class GroupLinks:
    """Links of axes and of submeshes that nobody has to choose among."""

    def __init__(self, group: Group) -> None:
        self.tree = _Tree(group)

    def along(self, stride: int, size: int) -> dict[str, LinkCost]:
        """Of an axis over so many devices, each `stride` places from the next; as slow as the slowest of its groups."""
        return _axis_links(self.tree, 0, self.tree.count, stride, size)

    def between(self, distance: int) -> LinkCost:
        """From each device of a submesh to the one so many places further, all at once, over the slowest way."""
        edges = range(distance, self.tree.count, distance)
        link = _slowest([self.tree.between(edge - 1, edge, distance) for edge in edges])
        return LinkCost(link.start + link.latency, link.one)


def _split(tree: _Tree, sizes: tuple[int, ...]) -> Split:
    """Submeshes of these sizes; the meshes of those of one size have each axis as slow as it is in any of them."""
    edges = list(accumulate(sizes))[:-1]
    beside = [min(pair) for pair in pairwise(sizes)]  # devices that send at once, each to one of the next submesh
    link = _slowest([tree.between(edge - 1, edge, crowd) for edge, crowd in zip(edges, beside, strict=True)])
    meshes = {}
    for size in dict.fromkeys(sizes):
        places = [edge - own for edge, own in zip(accumulate(sizes), sizes, strict=True) if own == size]
        found = [_meshes(tree, place, size) for place in (places[:1] if tree.even else places)]
        by_sizes = [{mesh.sizes: mesh.axes for mesh in own} for own in found]
        alike = (zip(*(own[mesh.sizes] for own in by_sizes), strict=True) for mesh in found[0])
        meshes[str(size)] = tuple(Mesh(tuple(max(axis, key=_price) for axis in axes)) for axes in alike)
    return Split(sizes, LinkCost(link.latency, link.one), meshes)


class _Tree:
    """The groups of the tree by the places of their devices in its order."""

    def __init__(self, group: Group) -> None:
        self.count = len(group.ranks)
        self.groups = list(_all(group))
        self.even = all(len({_shape(member) for member in part.members}) <= 1 for part in self.groups)
        self.largest = {id(g): max((len(m.ranks) for m in g.members), default=1) for g in self.groups}
        self.holders: list[tuple[Group, ...]] = []  # of each place, the largest group first
        self._place(group, ())

    def _place(self, group: Group, around: tuple[Group, ...]) -> None:
        for member in group.members:
            self._place(member, (*around, group))
        if not group.members:
            self.holders += [(*around, group)] * len(group.ranks)

    def common(self, first: int, last: int) -> Group:
        """The smallest group that holds both places, and so all between them."""
        pairs = zip(self.holders[first], self.holders[last], strict=False)
        return [one for one, other in pairs if one is other][-1]

    def between(self, first: int, last: int, crowd: int) -> LinkRates:
        """From one place to another, while `crowd` of their neighbours do the same."""
        return self._link(self.common(first, last), crowd, 1, 2)

    def along(self, first: int, stride: int, size: int) -> LinkRates:
        """Every `stride`-th place, while the `stride - 1` groups beside it are at work."""
        group = self.common(first, first + stride * (size - 1))
        return self._link(group, stride, self.largest[id(group)] // stride, size)

    def _link(self, group: Group, crowd: int, within: int, size: int) -> LinkRates:
        """`size` devices, up to `within` of them in one member of the group, while `crowd` such groups are at work."""
        if group.uplink is None or not group.members:
            return LinkRates.alike(group.latency, group.bandwidth, group.start)
        within = max(1, min(within, size - 1))
        share = group.uplink / min(crowd, self.largest[id(group)])
        around = min(share, within * group.bandwidth)
        if within > 1:  # the ring also runs inside the members
            around = min(around, *(member.bandwidth for member in group.members))
        out = share / within * (size - 1) / (size - within)  # what stays in the member needs no uplink
        return LinkRates(group.latency, around, min(share, group.bandwidth), min(out, group.bandwidth), group.start)


def _all(group: Group) -> Iterator[Group]:
    yield group
    for member in group.members:
        yield from _all(member)


def _shape(group: Group) -> tuple[object, ...]:
    members = tuple(_shape(member) for member in group.members)
    return len(group.ranks), group.bandwidth, group.latency, group.uplink, members


def _slowest(links: list[LinkRates]) -> LinkRates:
    return LinkRates(
        latency=max(link.latency for link in links),
        around=min(link.around for link in links),
        one=min(link.one for link in links),
        each=min(link.each for link in links),
        start=max(link.start for link in links),
    )


def _meshes(tree: _Tree, start: int, count: int) -> tuple[Mesh, ...]:
    groups = {1, *(len(group.ranks) for group in tree.groups)}
    found = []
    for shape in _shapes(count):
        strides = [prod(shape[number + 1 :]) for number in range(len(shape))]
        astray = sum(stride not in groups for stride in strides)
        axes = tuple(
            Axis(f"d{number}", size, _axis_links(tree, start, count, stride, size))
            for number, (size, stride) in enumerate(zip(shape, strides, strict=True))
        )
        found.append((len(shape), astray, sum(_price(axis) for axis in axes), shape, Mesh(axes)))
    return tuple(item[-1] for item in sorted(found, key=lambda item: item[:-1]))


def _shapes(count: int) -> Iterator[tuple[int, ...]]:
    """Ways to write the count as a product of one to three numbers, order told apart, none of them 1."""
    yield (count,)
    for first in range(2, count // 2 + 1):
        rest, over = divmod(count, first)
        if not over:
            yield first, rest
            yield from ((first, second, rest // second) for second in range(2, rest // 2 + 1) if rest % second == 0)


def _axis_links(tree: _Tree, start: int, count: int, stride: int, size: int) -> dict[str, LinkCost]:
    groups = count // size
    looked = min(groups, SAMPLES)
    chosen = [number * (groups - 1) // max(looked - 1, 1) for number in range(looked)]
    firsts = [start + number // stride * stride * size + number % stride for number in chosen]
    return group_links(size, _slowest([tree.along(first, stride, size) for first in firsts]))


def _price(axis: Axis) -> float:
    """Seconds to sum a megabyte: what axes are compared by."""
    link = axis.links["all_reduce"]
    return 0.0 if link == NOTHING else link.seconds(1e6)


# ---- collectives by formula


@dataclass(frozen=True)
class LinkRates:
    """What a group of devices has, in bytes/s, while the groups beside it do the same."""

    latency: float
    around: float  # past each device, from one to the next around a ring
    one: float  # from one device to the next, nothing else in the group
    each: float  # out of each device, to all others at once
    start: float = 0.0  # seconds of any collective beside its messages

    @classmethod
    def alike(cls, latency: float, bandwidth: float, start: float = 0.0) -> LinkRates:
        return cls(latency, bandwidth, bandwidth, bandwidth, start)


def group_links(size: int, link: LinkRates) -> dict[str, LinkCost]:
    """A ring sends 2 (n-1)/n of the tensor over each link for an all-reduce, (n-1)/n of it for the others."""
    if size == 1:
        return dict.fromkeys((*COLLECTIVES, SEND), NOTHING)
    share, steps = (size - 1) / size, size - 1
    once = LinkCost(link.start + steps * link.latency, link.around / share)
    ring = LinkCost(link.start + 2 * steps * link.latency, once.bandwidth / 2)
    tree = LinkCost(link.start + 2 * ceil(log2(size)) * link.latency, link.around / 2)
    if tree.latency < ring.latency:  # the faster of two lines that cross
        crossing = (ring.latency - tree.latency) / (1 / tree.bandwidth - 1 / ring.bandwidth)
        ring = replace(ring, points=((0.0, tree.latency), (crossing, ring.seconds(crossing))))
    return {
        "all_reduce": ring,
        "all_gather": once,
        "reduce_scatter": once,
        "all_to_all": LinkCost(once.latency, link.each * size / share),
        SEND: LinkCost(link.start + link.latency, link.one),
    }
