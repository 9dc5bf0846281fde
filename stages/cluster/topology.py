"""From measured pairs to nested groups, without torch: who shares a host, an island of fast links, a switch.

The network is taken to be nested: b(i, k) >= min(b(i, j), b(j, k)) but for noise. So a pair that was not measured has
the bandwidth of the widest path between its ends (`fill_gaps`), and groups are found by joining the fastest first
(`_join_fastest`: the median over all pairs between two groups, which a few wrong measurements do not move), which gives
a binary tree; then a node that is hardly faster than the one above it, or not more so than the noise explains, is
dissolved into it (`_dissolve`), so that a group has as many members as it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median

from shardwright.pipeline.ir.cluster import Group
from shardwright.stages.cluster.meshes import FASTEST

Matrix = Sequence[Sequence[float | None]]  # by rank and rank; None was not measured

DISTINCT = 1.5  # times faster than its surroundings: what makes a group
SIGMAS = 5.0  # of the noise of both: what it must exceed as well
ENOUGH = 6  # pairs between the members of a group: what tells the noise


@dataclass
class _Node:
    """A group in the making. `inside` are the logarithms of the bandwidths between its members."""

    ranks: list[int]
    members: list[_Node] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)

    @property
    def level(self) -> float:
        return median(self.inside)


def find_groups(bandwidth: Matrix, latency: Matrix | None = None, hosts: Sequence[str] = ()) -> Group:
    """The nested groups of all ranks, from bytes/s (and seconds) of each pair; `hosts` names the host of each rank."""
    count = len(bandwidth)
    full = fill_gaps(symmetric(bandwidth))
    logs = [[math.log(value) if i != j else 0.0 for j, value in enumerate(row)] for i, row in enumerate(full)]
    root = _join_fastest(logs)
    _dissolve(root)
    _dissolve(root, _noise(root))
    delays = symmetric(latency or [[0.0] * count for _ in range(count)])
    return _group(root, delays, list(hosts), top=True)


def pair_matrices(pairs: list[dict[str, float]], count: int) -> tuple[Matrix, Matrix]:
    """Bandwidth and latency by rank and rank."""
    bandwidth: list[list[float | None]] = [[None] * count for _ in range(count)]
    latency: list[list[float | None]] = [[None] * count for _ in range(count)]
    for pair in pairs:
        a, b = int(pair["a"]), int(pair["b"])
        bandwidth[a][b] = bandwidth[b][a] = pair["bandwidth"]
        latency[a][b] = latency[b][a] = pair["latency"]
    return bandwidth, latency


def symmetric(matrix: Matrix) -> list[list[float | None]]:
    """Each pair as the mean of what its two ends measured, on a logarithmic scale; zero stays zero."""
    count = len(matrix)
    if any(len(row) != count for row in matrix):
        raise ValueError("a matrix of pairs needs as many columns as rows")

    def both(one: float | None, other: float | None) -> float | None:
        if one is None or other is None:
            return one if other is None else other
        return math.sqrt(one * other)

    return [[both(matrix[i][j], matrix[j][i]) for j in range(count)] for i in range(count)]


def fill_gaps(matrix: Matrix) -> list[list[float]]:
    """Pairs that were not measured, by the widest path between them: a maximal spanning tree holds all of these."""
    pairs = [(width, i, j) for i, row in enumerate(matrix) for j, width in enumerate(row) if width and i != j]
    widest = [[0.0] * len(matrix) for _ in matrix]
    groups = [[rank] for rank in range(len(matrix))]  # of each rank: those that are reached over links as fast
    for width, i, j in sorted(pairs, reverse=True):
        if groups[i] is not groups[j]:
            for a, b in product(groups[i], groups[j]):
                widest[a][b] = widest[b][a] = width
            joined = groups[i] + groups[j]
            for rank in joined:
                groups[rank] = joined
    if apart := set(range(len(matrix))).difference(groups[0]):
        raise ValueError(f"rank {min(apart)} was measured with none of the others")
    return [[w if v is None else v for v, w in zip(*rows, strict=True)] for rows in zip(matrix, widest, strict=True)]


def _join_fastest(logs: list[list[float]]) -> _Node:
    """A binary tree: the two groups with the fastest links between them become one, until one is left."""
    nodes = {rank: _Node([rank]) for rank in range(len(logs))}
    between = {(i, j): [logs[i][j]] for i in nodes for j in nodes if i < j}
    medians = {pair: values[0] for pair, values in between.items()}
    while len(nodes) > 1:
        i, j = max(medians, key=lambda pair: (medians[pair], -pair[0], -pair[1]))
        inside = between.pop((i, j))
        nodes[i] = _Node([*nodes[i].ranks, *nodes[j].ranks], [nodes[i], nodes.pop(j)], inside)
        del medians[i, j]
        for k in nodes:
            if k != i:
                kept, gone = (min(i, k), max(i, k)), (min(j, k), max(j, k))
                between[kept] += between.pop(gone)
                del medians[gone]
                medians[kept] = median(between[kept])
    return next(iter(nodes.values()))


def _dissolve(root: _Node, noise: float = 0.0) -> None:
    """Dissolves nodes that are not distinctly faster than the one above, the least distinct first.

    Levels are medians over all pairs between members, so they become firmer as a group takes in its noise.
    """
    while True:
        edges = list(_edges(root))
        beyond = []  # by how much a child is faster than it must be to be a group of its own
        for node, child in edges:
            needed = SIGMAS * noise * math.sqrt(1 / len(node.inside) + 1 / len(child.inside))
            beyond.append(child.level - node.level - max(math.log(DISTINCT), needed))
        if not beyond or min(beyond) >= 0:
            return
        node, child = edges[beyond.index(min(beyond))]
        node.members.remove(child)
        node.members += child.members
        node.inside += child.inside


def _noise(root: _Node) -> float:
    """The standard deviation of like pairs on a logarithmic scale, from the median so that outliers do not count."""
    nodes = [root, *(child for _, child in _edges(root))]
    off = [abs(value - node.level) for node in nodes if len(node.inside) >= ENOUGH for value in node.inside]
    return 1.4826 * median(off) if off else 0.0


def _edges(node: _Node) -> Iterator[tuple[_Node, _Node]]:
    for child in node.members:
        if child.members:
            yield node, child
            yield from _edges(child)


def _group(node: _Node, delays: list[list[float | None]], hosts: list[str], top: bool = False) -> Group:
    ranks = tuple(sorted(node.ranks))
    if len(ranks) == 1:
        return Group("host" if top and hosts else "device", ranks, FASTEST, 0.0)
    members = sorted((_group(m, delays, hosts) for m in node.members), key=lambda m: m.ranks[0])
    across = [delays[i][j] for a in members for b in members if a is not b for i in a.ranks for j in b.ranks]
    seen = [delay for delay in across if delay is not None]
    flat = all(len(member.ranks) == 1 for member in members)
    names = {hosts[rank] for rank in ranks} if hosts else set()
    if len(names) == 1:
        kind = "host" if len(ranks) == hosts.count(hosts[ranks[0]]) else "island"
    else:  # without the names of the hosts, what is not the whole is an island
        kind = "cluster" if top else "switch" if hosts else "island"
    return Group(
        kind=kind,
        ranks=ranks,
        bandwidth=math.exp(node.level),
        latency=median(seen) if seen else 0.0,
        members=() if flat else tuple(members),
    )


def with_uplinks(group: Group, uplink: float | None, faster: float = 1.0) -> Group:
    """Uplinks are no property of pairs: they are told of the groups that span hosts.

    Pairs that were measured while others crossed are `faster` alone.
    """
    if group.kind not in ("switch", "cluster"):
        return group
    members = tuple(with_uplinks(member, uplink, faster) for member in group.members)
    shared = uplink if members else None
    return replace(group, bandwidth=group.bandwidth * faster, uplink=shared, members=members)


def common_group(group: Group, ranks: set[int]) -> Group:
    """The smallest group that holds these ranks."""
    inner = next((member for member in group.members if ranks <= set(member.ranks)), None)
    return common_group(inner, ranks) if inner else group


def device_order(group: Group) -> tuple[int, ...]:
    """Ranks with the members of each group next to each other; () where that is 0, 1, 2..."""

    def leaves(part: Group) -> tuple[int, ...]:
        return tuple(rank for member in part.members for rank in leaves(member)) if part.members else part.ranks

    order = leaves(group)
    return () if order == tuple(range(len(order))) else order


def partition_of(group: Group) -> frozenset[frozenset[int]]:
    """Every group of two devices or more as its set of ranks: equal for equal topologies."""
    own = [frozenset(group.ranks)] if len(group.ranks) > 1 else []
    return frozenset([*own, *(ranks for member in group.members for ranks in partition_of(member))])
