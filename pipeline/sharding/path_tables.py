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

from shardwright.pipeline.base.kernel_cache import kernel
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.sharding.paths import FEMTO, WHOLE, Paths, Space, Spot, is_clear, spots_between, uneven_at

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


def conversion_table(
    paths: Paths, sources: Sequence[Layout], targets: Sequence[Layout], shape: tuple[int, ...], nbytes: int, grad: bool
) -> Array:
    """Seconds from each source to each target, forward and backward."""
    return conversion_tables(paths, sources, targets, shape, nbytes, grad)[0]


def conversion_tables(
    paths: Paths, sources: Sequence[Layout], targets: Sequence[Layout], shape: tuple[int, ...], nbytes: int, grad: bool
) -> tuple[Array, Array]:
    """The same, and the bytes of all copies that are made on the way, but for the last."""
    if len({*sources, *targets}) == 1:  # always so on one device
        return np.zeros((len(sources), len(targets))), np.zeros((len(sources), len(targets)))
    lattice = _Lattice(paths, (*sources, *targets), shape, nbytes, grad)
    number = {layout: n for n, layout in enumerate(dict.fromkeys(sources))}
    least, came = lattice.spread(list(number))
    rows = np.array([number[source] for source in sources])[:, None]
    columns = np.ravel_multi_index(tuple(zip(*map(lattice.node, targets), strict=True)), lattice.shape)[None, :]
    return least[rows, columns] / FEMTO, lattice.between(came, rows, columns)


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
        shards = prod(np.ix_(*halves), start=np.ones((1,) * len(others), dtype=int)) if others else np.array(1)
        shards = np.broadcast_to(shards, found.shape[:-2])
        for count in np.unique(shards):
            found[shards == count] = self._by_kind(axis, self.nbytes // int(count))
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

    def spread(self, sources: list[Layout]) -> tuple[Array, Ints]:
        """By source and node: the least cost, by relaxing one axis after another until all is quiet; and the node
        before it on the way, which is itself at the source."""
        starts = np.ravel_multi_index(tuple(zip(*map(self.node, sources), strict=True)), self.shape)
        least = np.full((len(sources), prod(self.shape)), np.inf)
        least[np.arange(len(sources)), starts] = 0.0
        came = np.tile(np.arange(prod(self.shape)), (len(sources), 1))
        cells = np.arange(prod(self.shape)).reshape(self.shape)
        lines = [np.moveaxis(cells, axis, -1).reshape(-1, count) for axis, count in enumerate(self.shape)]
        _relax(
            least,
            came,
            np.array(self.shape),
            np.concatenate([own[:, 0] for own in lines]),
            np.cumsum([0, *(len(own) for own in lines)]),
            np.concatenate([own.reshape(-1) for own in self.prices]),
            np.cumsum([0, *(own.size for own in self.prices[:-1])]),
        )
        return least, came

    def between(self, came: Ints, rows: Ints, columns: Ints) -> Array:
        """Bytes that the steps to these nodes write, but for the last that writes. R and B lie in the same memory."""
        shards = [
            np.array([n if kind == "S" else 1 for kind in own]) for own, n in zip(self.kinds, self.sizes, strict=True)
        ]
        nbytes = (self.nbytes / prod(np.ix_(*shards), start=np.ones((1,) * len(shards)))).reshape(-1)
        whole = [[own.index("R") if kind == "B" else n for n, kind in enumerate(own)] for own in self.kinds]
        memory = np.ravel_multi_index(np.ix_(*map(np.array, whole)), self.shape).reshape(-1)
        at, before = np.broadcast_arrays(columns, came[rows, columns])
        found, written = np.zeros(at.shape), np.zeros(at.shape, dtype=bool)
        while (at != before).any():
            moves = memory[at] != memory[before]
            found += np.where(moves & written, nbytes[at], 0.0)
            written = written | moves
            at, before = before, came[rows, before]
        return found


@kernel()
def _relax(
    least: Array, came: Ints, counts: Ints, bases: Ints, base_start: Ints, steps: Array, step_start: Ints
) -> None:
    """Brings least[source, layout] down, source by source, by steps along one axis after another until all is quiet,
    and notes in came[source, layout] where the last step began.

    A line of an axis holds the layouts that differ on it alone, counts[axis] of them, strides[axis] apart from
    bases[base_start[axis] + line] on; the price of a step from k to l lies at step_start[axis] + (line, k, l) in steps.
    """
    axes = len(counts)
    strides = np.ones(axes, dtype=np.int64)
    for axis in range(axes - 2, -1, -1):
        strides[axis] = strides[axis + 1] * counts[axis + 1]
    before, after = np.empty(counts.max()), np.empty(counts.max())
    begun = np.empty(counts.max(), dtype=np.int64)
    for source in range(len(least)):
        row = least[source]
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
                            if before[k] + steps[price + to] < after[to]:
                                after[to] = before[k] + steps[price + to]
                                begun[to] = base + k * stride
                    price += count
                for k in range(count):
                    if after[k] < before[k]:
                        row[base + k * stride] = after[k]
                        came[source, base + k * stride] = begun[k]
                        changed = True
            quiet = 0 if changed else quiet + 1
            axis = (axis + 1) % axes
