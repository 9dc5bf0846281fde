"""The cheapest way from one layout to another on a mesh: a search over layouts, one step of the conversion table each.

A node is a layout, an edge changes the state on one axis, and costs what that step costs for the bytes a rank holds at
that point: gathering on axis 1 what axis 0 has split moves a part of it. The search is A* (Hart, Nilsson and Raphael):
what remains is at least, axis by axis, the cheapest way between the two kinds of state if every other axis had split
the tensor. Of equally cheap paths the one with fewest steps is taken, then the first in the order of nodes.

Between source and target a layout may use the dims that these split and one more that they do not, on which an axis can
wait for its place: another such dim would cost the same. On a dim, an axis may take the outermost or the innermost
digit, the one next to it, or one where an axis of the source or the target begins or ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from pipeline.cost.compute import Seconds
from pipeline.cost.conversions import TABLE, conversion_of, entry_bytes, entry_seconds, step_axis
from pipeline.ir.cluster import Axis, Compute
from pipeline.ir.layout import Layout, Place, S, State, at_places

WHOLE = ("R", "B", "P")
FEMTO = 1e15  # costs are compared as whole femtoseconds: equal is equal, in whatever order the steps are added

Spot = str | Place  # what an axis does in a node: a kind of WHOLE, or the digit that it takes
Node = tuple[int, ...]  # per axis the number of its spot


@dataclass(frozen=True)
class Path:
    layouts: tuple[Layout, ...]  # the source, what lies between, the target
    seconds: Seconds
    moved_bytes: float  # that a rank sends, forward and backward
    peak_bytes: int  # the most that a step of the forward pass reads and writes on a rank

    @property
    def steps(self) -> tuple[tuple[Layout, Layout], ...]:
        return tuple(pairwise(self.layouts))


def cheapest_path(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    nbytes: int,
    grad: bool,
    axes: tuple[Axis, ...],
    compute: Compute,
) -> Path:
    """For a tensor of that shape and that many bytes (unsplit)."""
    return Paths(axes, compute).cheapest(source, target, shape, nbytes, grad)


class Paths:
    """The cheapest paths on one mesh, each searched once."""

    def __init__(self, axes: tuple[Axis, ...], compute: Compute) -> None:
        self.axes, self.compute = axes, compute
        self.sizes = tuple(axis.size for axis in axes)
        self._found: dict[tuple[Layout, Layout, tuple[int, ...], int, bool], Path] = {}

    def cheapest(self, source: Layout, target: Layout, shape: tuple[int, ...], nbytes: int, grad: bool) -> Path:
        key = source, target, shape, nbytes, grad
        if key not in self._found:
            for layout in (source, target):
                if not layout.fits(shape, self.sizes):
                    raise ValueError(f"no path {source} -> {target}: {layout} does not fit {shape} on {self.sizes}")
            self._found[key] = self.priced(_Search(self, *key).run(), nbytes, grad)
        return self._found[key]

    def priced(self, layouts: tuple[Layout, ...], nbytes: int, grad: bool) -> Path:
        """These steps with their price."""
        forward = backward = moved = 0.0
        peak = 0
        for before, after in pairwise(layouts):
            seconds, sent = self.step(before, after, nbytes, grad)
            forward, backward, moved = forward + seconds.forward, backward + seconds.backward, moved + sent
            held = [nbytes // layout.pieces(self.sizes) for layout in (before, after)]
            peak = max(peak, sum(held) if conversion_of(before, after, self.sizes).forward else max(held))
        return Path(layouts, Seconds(forward, backward), moved, peak)

    def step(self, before: Layout, after: Layout, nbytes: int, grad: bool) -> tuple[Seconds, float]:
        """Seconds of one step, and the bytes that a rank sends."""
        number = step_axis(before, after, self.sizes)
        axis, entry = self.axes[number], conversion_of(before, after, self.sizes)
        others = (s.kind == "S" and i != number for i, s in enumerate(before.states))
        local = nbytes // prod(size for size, split in zip(self.sizes, others, strict=True) if split)
        seconds = entry_seconds(entry, local, grad, axis, self.compute)
        return seconds, entry_bytes(entry, local, grad, axis.size)


class _Search:
    def __init__(
        self, paths: Paths, source: Layout, target: Layout, shape: tuple[int, ...], nbytes: int, grad: bool
    ) -> None:
        self.paths, self.sizes = paths, paths.sizes
        self.nbytes, self.grad = nbytes, grad
        self.ends = source, target
        self.spots = [self._spots(axis, shape) for axis in range(len(self.sizes))]
        self.kinds = [tuple(_kind(spot) for spot in spots) for spots in self.spots]
        self.start, self.goal = (self._node(layout) for layout in self.ends)
        self._costs: dict[tuple[int, str, str, int], int] = {}
        self._least = [self._remaining(axis) for axis in range(len(self.sizes))]

    def run(self) -> tuple[Layout, ...]:
        best: dict[Node, tuple[int, int]] = {self.start: (0, 0)}  # cost, steps
        came: dict[Node, Node] = {}
        queue = [(self._bound(self.start), 0, self.start)]
        done: set[Node] = set()
        while queue:
            _, steps, node = heapq.heappop(queue)
            if node == self.goal:
                return self._way(came)
            if node in done:
                continue
            done.add(node)
            for after, cost in self._steps(node):
                reached = best[node][0] + cost, steps + 1
                if after not in best or reached < best[after]:
                    best[after] = reached
                    came[after] = node
                    heapq.heappush(queue, (reached[0] + self._bound(after), steps + 1, after))
        raise AssertionError(f"every layout reaches every other through R: {self.ends}")

    def _way(self, came: dict[Node, Node]) -> tuple[Layout, ...]:
        nodes = [self.goal]
        while nodes[-1] != self.start:
            nodes.append(came[nodes[-1]])
        source, target = self.ends
        return (source, *(self._layout(node) for node in nodes[-2:0:-1]), *([target] if len(nodes) > 1 else []))

    def _spots(self, axis: int, shape: tuple[int, ...]) -> tuple[Spot, ...]:
        """What the axis may do on the way."""
        size = self.sizes[axis]
        taken = [(place, self.sizes[a]) for layout in self.ends for a, place in layout.places(self.sizes).items()]
        dims = {place.dim for place, _ in taken}
        found = set()
        for dim in (*dims, *self._waiting(axis, shape, dims)):
            edges = [o for p, n in taken if p.dim == dim for o in (p.outside, p.outside * n)]
            others = [1, *(n for a, n in enumerate(self.sizes) if a != axis)]
            innermost = [shape[dim] // (size * n) for n in others]
            found |= {Place(dim, o) for o in (*edges, *others, *innermost) if o and shape[dim] % (o * size) == 0}
        return (*WHOLE, *sorted(found))

    def _waiting(self, axis: int, shape: tuple[int, ...], dims: set[int]) -> list[int]:
        """A dim that neither end splits: one with room for all axes, else for this one."""
        free = [dim for dim, size in enumerate(shape) if dim not in dims and size]
        room = [dim for dim in free if shape[dim] % prod(self.sizes) == 0]
        return [*room, *(dim for dim in free if shape[dim] % self.sizes[axis] == 0)][:1]

    def _node(self, layout: Layout) -> Node:
        places = layout.places(self.sizes)
        spots = (places.get(axis, state.kind) for axis, state in enumerate(layout.states))
        return tuple(self.spots[axis].index(spot) for axis, spot in enumerate(spots))

    def _layout(self, node: Node) -> Layout:
        spots = [self.spots[axis][number] for axis, number in enumerate(node)]
        states = tuple(S(spot.dim) if isinstance(spot, Place) else State(spot) for spot in spots)
        return at_places(states, {a: spot for a, spot in enumerate(spots) if isinstance(spot, Place)}, self.sizes)

    def _steps(self, node: Node) -> Iterator[tuple[Node, int]]:
        split = [self.spots[axis][number] for axis, number in enumerate(node)]
        for axis, number in enumerate(node):
            others = [(p, self.sizes[a]) for a, p in enumerate(split) if a != axis and isinstance(p, Place)]
            local = self.nbytes // prod(size for _, size in others)
            kind, size, own = self.kinds[axis][number], self.sizes[axis], split[axis]
            for after, spot in enumerate(self.spots[axis]):
                if after == number:
                    continue
                if isinstance(spot, Place):
                    if isinstance(own, Place) and not spot.clear_of(size, own, size):
                        continue  # the pieces of one do not make up pieces of the other
                    if not all(spot.clear_of(size, place, n) for place, n in others):
                        continue
                cost = self._cost(axis, kind, self.kinds[axis][after], local)
                yield (*node[:axis], after, *node[axis + 1 :]), cost

    def _cost(self, axis: int, before: str, after: str, local: int) -> int:
        key = axis, before, after, local
        if key not in self._costs:
            entry = TABLE[before + after]
            seconds = entry_seconds(entry, local, self.grad, self.paths.axes[axis], self.paths.compute)
            self._costs[key] = round(seconds.total * FEMTO)
        return self._costs[key]

    def _bound(self, node: Node) -> int:
        return sum(least[number] for least, number in zip(self._least, node, strict=True))

    def _remaining(self, axis: int) -> list[int]:
        """Spot -> the least that bringing the axis to its goal can cost, whatever the other axes do."""
        local = self.nbytes // (prod(self.sizes) // self.sizes[axis])
        kinds = (*WHOLE, "S")
        away = {(a, b): self._cost(axis, a, b, local) if a != b else 0 for a in kinds for b in kinds}
        for middle in kinds:
            for a in kinds:
                for b in kinds:
                    away[a, b] = min(away[a, b], away[a, middle] + away[middle, b])
        goal = self.goal[axis]
        around = min(self._cost(axis, "S", "S", local), *(away["S", k] + away[k, "S"] for k in WHOLE))
        wanted = self.kinds[axis][goal]
        found = [around if kind == wanted == "S" else away[kind, wanted] for kind in self.kinds[axis]]
        found[goal] = 0
        return found


def _kind(spot: Spot) -> str:
    return "S" if isinstance(spot, Place) else spot
