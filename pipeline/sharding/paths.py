"""The cheapest way from one layout to another on a mesh: a search over layouts, one step of the conversion table each.

A node is a layout, an edge changes the state on one axis, and costs what that step costs for the bytes a rank holds at
that point: gathering on axis 1 what axis 0 has split moves a part of it. The search is A* (Hart, Nilsson and Raphael):
what remains is at least, axis by axis, the cheapest way between the two kinds of state if every other axis had split
the tensor. Of equally cheap paths the one with fewest steps is taken, then the first in the order of nodes.

Between source and target a layout may use the dims that these split and one more that they do not, on which an axis can
wait for its place: another such dim would cost the same. On a dim, an axis may take the outermost or the innermost
digit, the one next to it, or one where an axis of the source or the target begins or ends. A tensor without a gradient
may be a mask or hold indices, which have no summands: it passes through `P` only on an axis where an end is `P`. A dim
is in uneven shards on the way where it is so at an end, on that axis, and then no other axis splits it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from shardwright.pipeline.ir.cluster import Axis, Compute
from shardwright.pipeline.ir.layout import Layout, Place, S, State, at_places
from shardwright.pipeline.rates.compute import Seconds
from shardwright.pipeline.sharding.conversions import (
    GATHERS,
    TABLE,
    conversion_of,
    entry_seconds,
    made_again,
    step_axis,
)

WHOLE = ("R", "B", "P")
FEMTO = 1e15  # costs are compared as whole femtoseconds: equal is equal, in whatever order the steps are added

Spot = str | Place  # what an axis does in a node: a kind of WHOLE, or the digit that it takes
Uneven = frozenset[tuple[int, int]]  # axes, each with a dim that does not divide by its ranks
Node = tuple[int, ...]  # per axis the number of its spot


@dataclass(frozen=True)
class Path:
    layouts: tuple[Layout, ...]  # the source, what lies between, the target
    seconds: Seconds


class Paths:
    """The cheapest paths on one mesh, each searched once.

    `share` is below one for a parameter that is gathered together with others: the part that it has of their bytes.
    """

    def __init__(self, axes: tuple[Axis, ...], compute: Compute, share: float = 1.0) -> None:
        self.axes, self.compute = axes, compute
        self.gathering = axes if share == 1.0 else tuple(_joined(axis, share) for axis in axes)
        self.sizes = tuple(axis.size for axis in axes)
        self._found: dict[tuple[Layout, Layout, tuple[int, ...], int, bool], Path] = {}
        self._spaces: dict[tuple[tuple[tuple[Spot, ...], ...], Uneven, int, bool], Space] = {}
        self._costs: dict[tuple[int, str, str, int, bool], int] = {}
        self._ways: dict[tuple[int, int, bool], dict[tuple[str, str], int]] = {}

    def cheapest(self, source: Layout, target: Layout, shape: tuple[int, ...], nbytes: int, grad: bool) -> Path:
        key = source, target, shape, nbytes, grad
        if key not in self._found:
            for layout in (source, target):
                if not layout.holds(shape, self.sizes):
                    raise ValueError(f"no path {source} -> {target}: {layout} does not fit {shape} on {self.sizes}")
            ends = source, target
            spots, uneven = spots_between(ends, shape, grad, self.sizes), uneven_at(ends, shape, self.sizes)
            space = self._spaces.setdefault((spots, uneven, nbytes, grad), Space(self, spots, uneven, nbytes, grad))
            layouts = _search(space, source, target)
            steps = [self.step(before, after, nbytes, grad) for before, after in pairwise(layouts)]
            total = Seconds(sum(step.forward for step in steps), sum(step.backward for step in steps))
            self._found[key] = Path(layouts, total)
        return self._found[key]

    def step(self, before: Layout, after: Layout, nbytes: int, grad: bool, again: bool = False) -> Seconds:
        """Of one step; `again` where backward makes it once more."""
        number = step_axis(before, after, self.sizes)
        entry = conversion_of(before, after, self.sizes)
        axis = (self.gathering if entry in GATHERS else self.axes)[number]
        local = nbytes // prod(self.sizes[i] for i, s in enumerate(before.states) if s.kind == "S" and i != number)
        return entry_seconds(made_again(entry) if again else entry, local, grad, axis, self.compute)

    def cost(self, axis: int, before: str, after: str, local: int, grad: bool) -> int:
        """Femtoseconds of a step between two kinds of state, for a tensor that has so many bytes without this axis."""
        key = axis, before, after, local, grad
        if key not in self._costs:
            entry = TABLE[before + after]
            axes = self.gathering if entry in GATHERS else self.axes
            seconds = entry_seconds(entry, local, grad, axes[axis], self.compute)
            self._costs[key] = round(seconds.total * FEMTO)
        return self._costs[key]

    def ways(self, axis: int, local: int, grad: bool) -> dict[tuple[str, str], int]:
        """The cheapest way between two kinds of state on one axis, in any number of steps; `SS` to another place."""
        key = axis, local, grad
        if key not in self._ways:
            kinds = (*WHOLE, "S")
            away = {(a, b): self.cost(axis, a, b, local, grad) if a != b else 0 for a in kinds for b in kinds}
            for middle in kinds:
                for a in kinds:
                    for b in kinds:
                        away[a, b] = min(away[a, b], away[a, middle] + away[middle, b])
            around = (away["S", kind] + away[kind, "S"] for kind in WHOLE)
            self._ways[key] = away | {("S", "S"): min(self.cost(axis, "S", "S", local, grad), *around)}
        return self._ways[key]


def _joined(axis: Axis, share: float) -> Axis:
    """The axis for a tensor that has such a share of what a collective gathers, and sums in backward."""
    own = {name: axis.links[name].part(share) for name in ("all_gather", "reduce_scatter")}
    return replace(axis, links=axis.links | own)


class Space:
    """The layouts that a search may visit, and the steps between them: shared by all searches between like layouts."""

    def __init__(
        self, paths: Paths, spots: tuple[tuple[Spot, ...], ...], uneven: Uneven, nbytes: int, grad: bool
    ) -> None:
        self.paths, self.sizes, self.spots, self.uneven = paths, paths.sizes, spots, uneven
        self.nbytes, self.grad = nbytes, grad
        self.kinds = [tuple("S" if isinstance(spot, Place) else spot for spot in own) for own in spots]
        self.numbers = [{spot: number for number, spot in enumerate(own)} for own in spots]
        self._steps: dict[Node, list[tuple[Node, int]]] = {}

    def node(self, layout: Layout) -> Node:
        places = layout.places(self.sizes)
        return tuple(self.numbers[a][places.get(a, state.kind)] for a, state in enumerate(layout.states))

    def layout(self, node: Node) -> Layout:
        spots = [self.spots[axis][number] for axis, number in enumerate(node)]
        states = tuple(S(spot.dim) if isinstance(spot, Place) else State(spot) for spot in spots)
        return at_places(states, {a: spot for a, spot in enumerate(spots) if isinstance(spot, Place)}, self.sizes)

    def steps(self, node: Node) -> list[tuple[Node, int]]:
        if node not in self._steps:
            self._steps[node] = list(self._find_steps(node))
        return self._steps[node]

    def _find_steps(self, node: Node) -> Iterator[tuple[Node, int]]:
        held = [self.spots[axis][number] for axis, number in enumerate(node)]
        for axis, number in enumerate(node):
            own = held[axis]
            others = [(a, p) for a, p in enumerate(held) if a != axis and isinstance(p, Place)]
            local = self.nbytes // prod(self.sizes[a] for a, _ in others)
            # One place leads to another only if shards of the one make up shards of the other.
            blocked = [*others, *([(axis, own)] if isinstance(own, Place) else [])]
            for after, spot in enumerate(self.spots[axis]):
                free = all(is_clear((axis, spot), other, self.sizes, self.uneven) for other in blocked)
                if after != number and free:
                    kinds = self.kinds[axis][number], self.kinds[axis][after]
                    cost = self.paths.cost(axis, *kinds, local, self.grad)
                    yield (*node[:axis], after, *node[axis + 1 :]), cost

    def remaining(self, axis: int, goal: int) -> list[int]:
        """Spot -> the least that bringing the axis to its goal can cost, whatever the other axes do."""
        local = self.nbytes // (prod(self.sizes) // self.sizes[axis])
        ways, kinds = self.paths.ways(axis, local, self.grad), self.kinds[axis]
        return [0 if number == goal else ways[kind, kinds[goal]] for number, kind in enumerate(kinds)]


def _search(space: Space, source: Layout, target: Layout) -> tuple[Layout, ...]:
    """A* from one layout to the other."""
    start, goal = space.node(source), space.node(target)
    least = [space.remaining(axis, number) for axis, number in enumerate(goal)]
    best: dict[Node, tuple[int, int]] = {start: (0, 0)}  # cost, steps
    came: dict[Node, Node] = {}
    queue = [(0, 0, start)]
    done: set[Node] = set()
    while goal not in done:
        _, steps, node = heapq.heappop(queue)
        if node in done:
            continue
        done.add(node)
        for after, cost in space.steps(node):
            reached = best[node][0] + cost, steps + 1
            if after not in best or reached < best[after]:
                best[after] = reached
                came[after] = node
                bound = reached[0] + sum(own[number] for own, number in zip(least, after, strict=True))
                heapq.heappush(queue, (bound, steps + 1, after))
    nodes = [goal]
    while nodes[-1] != start:
        nodes.append(came[nodes[-1]])
    between = tuple(space.layout(node) for node in nodes[-2:0:-1])
    return (source, *between, target) if len(nodes) > 1 else (source,)


def spots_between(
    ends: Sequence[Layout], shape: tuple[int, ...], grad: bool, sizes: tuple[int, ...]
) -> tuple[tuple[Spot, ...], ...]:
    """What each axis may do on the way between these layouts."""
    taken = {(place, sizes[a]) for layout in ends for a, place in layout.places(sizes).items()}
    dims = {place.dim for place, _ in taken}
    found: list[tuple[Spot, ...]] = []
    for axis, size in enumerate(sizes):
        others = [1, *(n for a, n in enumerate(sizes) if a != axis)]
        places = set()
        for dim in (*dims, *_waiting(axis, shape, dims, sizes)):
            edges = [o for p, n in taken if p.dim == dim for o in (p.outside, p.outside * n)]
            innermost = [shape[dim] // (size * n) for n in others]
            places |= {Place(dim, o) for o in (*edges, *others, *innermost) if o and shape[dim] % (o * size) == 0}
        places |= {Place(dim, 1) for own, dim in uneven_at(ends, shape, sizes) if own == axis}
        kinds = {layout.states[axis].kind for layout in ends}
        found.append((*(kind for kind in WHOLE if grad or kind == "R" or kind in kinds), *sorted(places)))
    return tuple(found)


def is_clear(wanted: tuple[int, Spot], taken: tuple[int, Spot], sizes: tuple[int, ...], uneven: Uneven) -> bool:
    """Whether an axis may be in a spot while another, or itself before, is in one."""
    (axis, spot), (other, held) = wanted, taken
    if not isinstance(spot, Place) or not isinstance(held, Place):
        return True
    if uneven and spot.dim == held.dim and {(axis, spot.dim), (other, held.dim)} & uneven:
        return False
    return spot.clear_of(sizes[axis], held, sizes[other])


def uneven_at(ends: Sequence[Layout], shape: tuple[int, ...], sizes: tuple[int, ...]) -> Uneven:
    """Where these layouts are in uneven shards."""
    return frozenset(
        (axis, place.dim)
        for layout in ends
        for axis, place in layout.places(sizes).items()
        if shape[place.dim] % (place.outside * sizes[axis])
    )


def _waiting(axis: int, shape: tuple[int, ...], dims: set[int], sizes: tuple[int, ...]) -> list[int]:
    """A dim that neither end splits: one with room for all axes, else for this one."""
    free = [dim for dim, size in enumerate(shape) if dim not in dims and size]
    room = [dim for dim in free if shape[dim] % prod(sizes) == 0]
    return [*room, *(dim for dim in free if shape[dim] % sizes[axis] == 0)][:1]
