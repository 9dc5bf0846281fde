"""The inner loops of the solvers, compiled by numba on first use and kept on disk."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.base.kernel_cache import kernel


@kernel()
def least_sums(
    data: NDArray[np.float64], starts: NDArray[np.int64], strides: NDArray[np.int64], shape: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """For every index of all axes but the last, the least over the last of the sum of tables, and where it is.

    Table t holds its entry for an index at `data[starts[t] + sum(index * strides[t])]`: a stride is 0 on an axis that
    the table does not have. All tables have the last axis, with a stride of 1.
    """
    dims, count = len(shape), len(starts)
    last = shape[dims - 1]
    size = 1
    for d in range(dims - 1):
        size *= shape[d]
    least = np.empty(size, dtype=np.float64)
    best = np.empty(size, dtype=np.int32)
    index = np.zeros(dims, dtype=np.int64)
    at = starts.copy()
    total = np.empty(last, dtype=np.float64)
    for n in range(size):
        start = at[0]
        for k in range(last):
            total[k] = data[start + k]
        for t in range(1, count):
            start = at[t]
            for k in range(last):
                total[k] += data[start + k]
        found = np.inf
        for k in range(last):
            found = min(found, total[k])
        where = 0
        while where < last - 1 and total[where] != found:
            where += 1
        least[n], best[n] = found, where
        d = dims - 2
        while d >= 0:  # the next index, as on an odometer
            index[d] += 1
            for t in range(count):
                at[t] += strides[t, d]
            if index[d] < shape[d]:
                break
            index[d] = 0
            for t in range(count):
                at[t] -= strides[t, d] * shape[d]
            d -= 1
    return least, best


@kernel()
def least_shared(
    data: NDArray[np.float64],
    starts: NDArray[np.int64],
    strides: NDArray[np.int64],
    shape: NDArray[np.int64],
    owner: NDArray[np.int64],
    sizes: NDArray[np.int64],
    making: NDArray[np.float64],
    maker: int,
    forms: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """For every index of the axes, the least cost of reading a shared tensor, and the form that each reader takes.

    Reader r pays by form the sum of the tables t with `owner[t] == r`, which lie as in `least_sums` with the form as
    their last axis. Each form that someone takes is made once, for `making[maker's choice, form]`; `maker` is the
    number of the maker's axis, `forms[r]` translates the forms that a reader knows into those of `making`.

    Given an index, a form is of no use to a reader if another is cheaper even when it alone pays for making it. Few are
    left; of these all combinations are tried, best first bound.
    """
    dims, count, readers, most = len(shape), len(starts), len(sizes), forms.shape[1]
    size = 1
    for d in range(dims):
        size *= shape[d]
    least = np.empty(size, dtype=np.float64)
    best = np.zeros((size, readers), dtype=np.int32)
    index = np.zeros(dims, dtype=np.int64)
    at = starts.copy()
    own = np.empty((readers, most), dtype=np.float64)
    useful = np.empty((readers, most), dtype=np.int64)
    number = np.empty(readers, dtype=np.int64)
    made = np.zeros(making.shape[1], dtype=np.int64)
    tried = np.empty(readers, dtype=np.int64)
    spent = np.empty(readers + 1, dtype=np.float64)
    rest = np.empty(readers + 1, dtype=np.float64)
    for n in range(size):
        have = index[maker]
        found = 0.0
        for r in range(readers):
            for k in range(sizes[r]):
                own[r, k] = 0.0
        for t in range(count):
            r, start = owner[t], at[t]
            for k in range(sizes[r]):
                own[r, k] += data[start + k]
        for r in range(readers):
            alone, where = np.inf, 0
            for k in range(sizes[r]):
                both = own[r, k] + making[have, forms[r, k]]
                if both < alone:
                    alone, where = both, k
            best[n, r] = where
            found += alone
            useful[r, 0] = where
            number[r] = 1
            for k in range(sizes[r]):
                if own[r, k] < alone and k != where:
                    useful[r, number[r]] = k
                    number[r] += 1
        if found < np.inf:
            rest[readers] = 0.0
            for r in range(readers - 1, -1, -1):
                cheapest = np.inf
                for u in range(number[r]):
                    cheapest = min(cheapest, own[r, useful[r, u]])
                rest[r] = rest[r + 1] + cheapest
            total = 0.0  # of the forms that each took for itself, counted once
            for r in range(readers):
                form = forms[r, best[n, r]]
                total += own[r, best[n, r]] + (making[have, form] if made[form] == 0 else 0.0)
                made[form] += 1
            for r in range(readers):
                made[forms[r, best[n, r]]] -= 1
            found = total
            r = 0
            tried[0] = -1
            spent[0] = 0.0
            while r >= 0:
                if tried[r] >= 0:
                    made[forms[r, useful[r, tried[r]]]] -= 1
                tried[r] += 1
                if tried[r] >= number[r]:
                    r -= 1
                    continue
                k = useful[r, tried[r]]
                form = forms[r, k]
                spent[r + 1] = spent[r] + own[r, k] + (making[have, form] if made[form] == 0 else 0.0)
                made[form] += 1
                if spent[r + 1] + rest[r + 1] >= found:
                    continue
                if r + 1 < readers:
                    r += 1
                    tried[r] = -1
                else:
                    found = spent[readers]
                    for q in range(readers):
                        best[n, q] = useful[q, tried[q]]
        least[n] = found
        d = dims - 1
        while d >= 0:
            index[d] += 1
            for t in range(count):
                at[t] += strides[t, d]
            if index[d] < shape[d]:
                break
            index[d] = 0
            for t in range(count):
                at[t] -= strides[t, d] * shape[d]
            d -= 1
    return least, best
