"""Choices that another of their node makes needless, in a compiled loop: there are many pairs and few that need a look.

Choice a makes b needless if it never holds more and is no dearer whatever the neighbours take, each at its worst for a.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.base.kernel_cache import kernel
from stages.solve.search.large.arrays import Floats


def undominated(costs: Floats, held: list[Floats], matrices: list[Floats]) -> NDArray[np.bool_]:
    """Which choices stay. `held`: by interval; `matrices`: to each neighbour, a row per choice."""
    size = len(costs)
    usages = np.array(held).reshape(len(held), size)
    widths = np.array([m.shape[1] for m in matrices], np.int64)
    whole = np.concatenate(matrices, axis=1) if matrices else np.zeros((size, 0))
    kept: NDArray[np.bool_] = _undominated(costs, usages, np.ascontiguousarray(whole), widths)
    return kept


@kernel()
def _undominated(costs, usages, whole, widths):
    size, edges = len(costs), len(widths)
    suits = np.empty((size, edges), np.int64)  # where each edge is cheapest for a choice
    for b in range(size):
        lo = 0
        for e in range(edges):
            suits[b, e] = lo
            for k in range(lo, lo + widths[e]):
                if whole[b, k] < whole[b, suits[b, e]]:
                    suits[b, e] = k
            lo += widths[e]
    kept = np.ones(size, np.bool_)
    for b in range(size):
        for a in range(size):
            if a != b and kept[a] and _beats(a, b, costs, usages, whole, widths, suits):
                kept[b] = False
                break
    return kept


@kernel()
def _beats(a, b, costs, usages, whole, widths, suits):
    for h in range(len(usages)):
        if usages[h, a] > usages[h, b]:
            return False
    worse = costs[a] - costs[b]
    for e in range(len(widths)):  # the neighbours at what suits b best: quick, and tells most pairs apart
        k = suits[b, e]
        if whole[b, k] < np.inf:
            worse += whole[a, k] - whole[b, k]
    if worse > 0:
        return False
    worse = costs[a] - costs[b]
    lo = 0
    for e in range(len(widths)):
        most = -np.inf
        for k in range(lo, lo + widths[e]):
            if whole[b, k] < np.inf:  # else it is forbidden for b, and a is no worse
                most = max(most, whole[a, k] - whole[b, k])
        if most == np.inf:
            return False
        worse += most
        lo += widths[e]
    return worse <= 0
