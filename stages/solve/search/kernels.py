"""The inner loops of elimination, compiled by numba on first use and kept on disk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.pipeline.base.kernel_cache import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Answers = tuple[Floats, NDArray[np.int32]]  # for every index the least cost, and where it is


_inlined = kernel(inline="always")  # by a plain call the loops take a tenth longer


class Tables(NamedTuple):
    """Table t holds its entry for an index at `data[starts[t] + sum(index * strides[t])]`.

    A stride is 0 on an axis that the table does not have. One more axis, the last, has a stride of 1.
    """

    data: Floats
    starts: Ints
    strides: Ints
    shape: Ints  # of the axes of the index


class _Readers(NamedTuple):
    """Of a shared tensor, at one index: what each pays by form, the forms of use to it, and room to combine them."""

    own: Floats  # own[reader, form]
    useful: Ints  # useful[reader, n]: a form
    number: Ints  # of useful forms
    made: Ints  # how many of those that chose already take a form of the maker's
    tried: Ints
    spent: Floats
    rest: Floats


@kernel()
def least_sums(tables: Tables, last: int) -> Answers:
    """For every index the least, over a last axis that all tables have, of their sum; and where it is."""
    data, starts, strides, shape = tables
    count = len(starts)
    size = np.prod(shape)
    least = np.empty(size, dtype=np.float64)
    best = np.empty(size, dtype=np.int32)
    index = np.zeros(len(shape), dtype=np.int64)
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
        _advance(index, at, strides, shape)
    return least, best


@kernel()
def least_shared(tables: Tables, owner: Ints, sizes: Ints, making: Floats, maker: int, forms: Ints) -> Answers:
    """For every index, the least cost of reading a shared tensor, and the form that each reader takes.

    Reader r pays by form the sum of the tables t with `owner[t] == r`, whose last axis is the form. Each form that
    someone takes is made once, for `making[maker's choice, form]`; `maker` is the number of the maker's axis,
    `forms[r]` translates the forms that a reader knows into those of `making`.
    """
    data, starts, strides, shape = tables
    count, readers, most = len(starts), len(sizes), forms.shape[1]
    size = np.prod(shape)
    least = np.empty(size, dtype=np.float64)
    best = np.zeros((size, readers), dtype=np.int32)
    index = np.zeros(len(shape), dtype=np.int64)
    at = starts.copy()
    work = _Readers(
        np.empty((readers, most), dtype=np.float64),
        np.empty((readers, most), dtype=np.int64),
        np.empty(readers, dtype=np.int64),
        np.zeros(making.shape[1], dtype=np.int64),
        np.empty(readers, dtype=np.int64),
        np.empty(readers + 1, dtype=np.float64),
        np.empty(readers + 1, dtype=np.float64),
    )
    own = work.own
    for n in range(size):
        for r in range(readers):
            for k in range(sizes[r]):
                own[r, k] = 0.0
        for t in range(count):
            r, start = owner[t], at[t]
            for k in range(sizes[r]):
                own[r, k] += data[start + k]
        least[n] = _find_useful(work, sizes, forms, making[index[maker]], best[n])
        if least[n] < np.inf:
            least[n] = _combine(work, forms, making[index[maker]], best[n])
        _advance(index, at, strides, shape)
    return least, best


@_inlined
def _find_useful(work: _Readers, sizes: Ints, forms: Ints, making: Floats, best: NDArray[np.int32]) -> float:
    """The forms of use to each reader, and what they come to if each pays for making its own best one alone.

    A form is of no use if another is cheaper even when the reader alone pays for making it. Few are left.
    """
    own, useful, number = work.own, work.useful, work.number
    found = 0.0
    for r in range(len(sizes)):
        alone, where = np.inf, 0
        for k in range(sizes[r]):
            both = own[r, k] + making[forms[r, k]]
            if both < alone:
                alone, where = both, k
        best[r] = where
        found += alone
        useful[r, 0] = where
        number[r] = 1
        for k in range(sizes[r]):
            if own[r, k] < alone and k != where:
                useful[r, number[r]] = k
                number[r] += 1
    return found


@_inlined
def _combine(work: _Readers, forms: Ints, making: Floats, best: NDArray[np.int32]) -> float:
    """The least of all combinations of useful forms, best first bound; `best` has a first one, and then that."""
    own, useful, number, made, tried, spent, rest = work
    readers = len(number)
    rest[readers] = 0.0
    for r in range(readers - 1, -1, -1):
        cheapest = np.inf
        for u in range(number[r]):
            cheapest = min(cheapest, own[r, useful[r, u]])
        rest[r] = rest[r + 1] + cheapest
    found = 0.0  # of the forms that each took for itself, counted once
    for r in range(readers):
        form = forms[r, best[r]]
        found += own[r, best[r]] + (making[form] if made[form] == 0 else 0.0)
        made[form] += 1
    for r in range(readers):
        made[forms[r, best[r]]] -= 1
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
        spent[r + 1] = spent[r] + own[r, k] + (making[form] if made[form] == 0 else 0.0)
        made[form] += 1
        if spent[r + 1] + rest[r + 1] >= found:
            continue
        if r + 1 < readers:
            r += 1
            tried[r] = -1
        else:
            found = spent[readers]
            for q in range(readers):
                best[q] = useful[q, tried[q]]
    return found


@_inlined
def _advance(index: Ints, at: Ints, strides: Ints, shape: Ints) -> None:
    """The next index, as on an odometer, and where each table has its entry."""
    for d in range(len(index) - 1, -1, -1):
        index[d] += 1
        for t in range(len(at)):
            at[t] += strides[t, d]
        if index[d] < shape[d]:
            return
        index[d] = 0
        for t in range(len(at)):
            at[t] -= strides[t, d] * shape[d]
