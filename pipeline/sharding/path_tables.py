"""What all conversions between many layouts of one tensor cost, found together.

The search of pipeline.sharding.paths asks for one pair at a time; a solver wants every pair of the layouts that an op
writes and the layouts that the next one reads. So all layouts between them form one array with a dim per axis of the
mesh, a step along an axis is a minimum over that dim, and from all sources at once the least cost of every layout is
brought up to date, axis by axis, until nothing changes. Costs are those of `Paths`, in the same whole femtoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from pipeline.base.kernel_cache import kernel
from pipeline.ir.layout import Layout
from pipeline.sharding.paths import FEMTO, WHOLE, Paths, Space, Spot, is_clear, spots_between, uneven_at

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


def conversion_table(
    paths: Paths, sources: Sequence[Layout], targets: Sequence[Layout], shape: tuple[int, ...], nbytes: int, grad: bool
) -> Array:
    """Seconds from each source to each target, forward and backward."""
    if len({*sources, *targets}) == 1:  # always so on one device
        return np.zeros((len(sources), len(targets)))
    lattice = _Lattice(paths, (*sources, *targets), shape, nbytes, grad)
    starts = {layout: None for layout in sources}
    least = lattice.spread(list(starts))
    row = {layout: number for number, layout in enumerate(starts)}
    columns = tuple(np.array(part) for part in zip(*(lattice.node(t) for t in targets), strict=True))
    found: Array = least[(np.array([row[s] for s in sources])[:, None], *(c[None, :] for c in columns))] / FEMTO
    return found


class _Lattice(Space):
    """The layouts, one dim per axis of the mesh and one entry per spot, and the price of a step along each dim."""

    def __init__(self, paths: Paths, ends: Sequence[Layout], shape: tuple[int, ...], nbytes: int, grad: bool) -> None:
        spots, uneven = spots_between(ends, shape, grad, paths.sizes), uneven_at(ends, shape, paths.sizes)
        super().__init__(paths, spots, uneven, nbytes, grad)
        self.shape = tuple(len(own) for own in spots)
        self.prices = [self._prices(axis) for axis in range(len(self.sizes))]

    def _prices(self, axis: int) -> Array:
        """Femtoseconds[spots of the other axes..., from, to]; infinite where the two are no step, or no layout."""
        others = [a for a in range(len(self.sizes)) if a != axis]
        found = np.empty((*(self.shape[a] for a in others), self.shape[axis], self.shape[axis]))
        halves = [np.array([self.sizes[a] if kind == "S" else 1 for kind in self.kinds[a]]) for a in others]
        pieces = prod(np.ix_(*halves), start=np.ones((1,) * len(others), dtype=int)) if others else np.array(1)
        pieces = np.broadcast_to(pieces, found.shape[:-2])
        for count in np.unique(pieces):
            found[pieces == count] = self._by_kind(axis, self.nbytes // int(count))
        own = self.spots[axis]
        apart = np.array(
            [[self._clear(axis, a, axis, b) or i == j for j, b in enumerate(own)] for i, a in enumerate(own)]
        )
        found[..., ~apart] = np.inf
        for position, other in enumerate(others):
            free = np.array([[self._clear(other, b, axis, a) for a in own] for b in self.spots[other]])
            spread = free.reshape(*(len(free) if n == position else 1 for n in range(len(others))), 1, len(own))
            found = np.where(spread & np.swapaxes(spread, -1, -2), found, np.inf)
        return found

    def _by_kind(self, axis: int, local: int) -> Array:
        """The price of a step between any two spots of the axis, of a tensor with so many bytes without it."""
        pairs = [(a, b) for a in (*WHOLE, "S") for b in (*WHOLE, "S") if a != b or a == "S"]
        price = {(a, b): float(self.paths.cost(axis, a, b, local, self.grad)) for a, b in pairs}
        table = np.array([[price.get((a, b), 0.0) for b in self.kinds[axis]] for a in self.kinds[axis]])
        np.fill_diagonal(table, 0.0)
        return table

    def _clear(self, axis: int, spot: Spot, other: int, taken: Spot) -> bool:
        return is_clear((axis, spot), (other, taken), self.sizes, self.uneven)

    def spread(self, sources: list[Layout]) -> Array:
        """The least cost from each source to every node, by relaxing one axis after another until all is quiet."""
        least = np.full((len(sources), *self.shape), np.inf)
        for row, layout in enumerate(sources):
            least[(row, *self.node(layout))] = 0.0
        cells = np.arange(prod(self.shape)).reshape(self.shape)
        lines = [np.moveaxis(cells, axis, -1).reshape(-1, count) for axis, count in enumerate(self.shape)]
        _relax(
            least.reshape(len(sources), -1),
            np.array(self.shape),
            np.array([prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]),
            np.concatenate([own[:, 0] for own in lines]),
            np.cumsum([0, *(len(own) for own in lines)]),
            np.concatenate([own.reshape(-1) for own in self.prices]),
            np.cumsum([0, *(own.size for own in self.prices[:-1])]),
        )
        return least


@kernel()
def _relax(
    least: Array, counts: Ints, strides: Ints, bases: Ints, base_start: Ints, steps: Array, step_start: Ints
) -> None:
    """Brings least[source, layout] down, source by source, by steps along one axis after another until all is quiet.

    A line of an axis holds the layouts that differ on it alone, counts[axis] of them, strides[axis] apart from
    bases[base_start[axis] + line] on; the price of a step from k to l lies at step_start[axis] + (line, k, l) in steps.
    """
    axes = len(counts)
    before, after = np.empty(counts.max()), np.empty(counts.max())
    for row in least:
        quiet, axis = 0, 0
        while quiet < axes:
            count, stride = counts[axis], strides[axis]
            changed = False
            price = step_start[axis]
            for line in range(base_start[axis], base_start[axis + 1]):
                base = bases[line]
                for k in range(count):
                    before[k] = row[base + k * stride]
                    after[k] = before[k]
                for k in range(count):
                    if before[k] < np.inf:
                        for to in range(count):
                            after[to] = min(after[to], before[k] + steps[price + to])
                    price += count
                for k in range(count):
                    if after[k] < before[k]:
                        row[base + k * stride] = after[k]
                        changed = True
            quiet = 0 if changed else quiet + 1
            axis = (axis + 1) % axes
