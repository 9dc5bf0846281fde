"""The inner loop of path_tables.py, compiled by numba on first use and kept on disk."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.base.kernel_cache import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@kernel()
def relax(
    least: Floats, counts: Ints, strides: Ints, bases: Ints, base_start: Ints, steps: Floats, step_start: Ints
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
