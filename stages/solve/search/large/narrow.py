"""The same arrays with few of each node's choices: tables over several nodes at once stay small."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeline.base.kernel_cache import kernel
from stages.solve.search.large.arrays import Arrays, Floats, Ints


def candidates(arrays: Arrays, rank: Floats, most: int, always: Ints) -> Ints:
    """The `most` choices of each node with the least rank, and the one that is always kept: places, in their order."""
    node = np.repeat(np.arange(arrays.count), np.diff(arrays.start))
    rank = rank.copy()
    rank[arrays.start[:-1] + always] = -np.inf
    order = np.lexsort((rank, node))
    return np.sort(order[np.arange(len(order)) - arrays.start[node] < most])


def narrowed(arrays: Arrays, kept: Ints, back: Ints) -> Arrays:
    """Arrays with these choices alone; `back`: the arc that goes the other way."""
    node = np.searchsorted(arrays.start, kept, side="right") - 1
    sizes = np.bincount(node, minlength=arrays.count)
    start = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    own = kept - arrays.start[node]  # choices by their number among the node's
    leaves = np.repeat(np.arange(arrays.count), np.diff(arrays.arc_start))
    forward = leaves < arrays.arc_to
    matrix = np.zeros(len(leaves), np.int32)
    matrix[forward] = 2 * np.arange(int(forward.sum()))
    matrix[back[forward]] = matrix[forward] + 1
    entries = (sizes[leaves] * sizes[arrays.arc_to])[forward]
    matrix_start = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.repeat(entries, 2))])
    pool = np.empty(int(matrix_start[-1]))
    _fill(arrays.start, start, own, leaves, *arrays.graph, matrix, matrix_start, pool)
    holder = np.repeat(np.arange(arrays.count), np.diff(arrays.hold_start))
    usage_start = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[holder])])
    usage = np.empty(int(usage_start[-1]))
    _fill_usages(start, own, holder, arrays.usage_start, arrays.usage, usage_start, usage)
    return replace(
        arrays, start=start, costs=arrays.costs[kept], arc_matrix=matrix, matrix_start=matrix_start, pool=pool,
        usage_start=usage_start, usage=usage,
    )  # fmt: skip


@kernel()
def _fill(old_start, start, own, leaves, arc_start, arc_to, arc_matrix, old_matrix_start, old_pool, matrix,
          matrix_start, pool):  # fmt: skip
    for a in range(len(leaves)):
        v, w = leaves[a], arc_to[a]
        width = old_start[w + 1] - old_start[w]
        old, new = old_matrix_start[arc_matrix[a]], matrix_start[matrix[a]]
        for k in range(start[v], start[v + 1]):
            row = old + own[k] * width
            for j in range(start[w], start[w + 1]):
                pool[new] = old_pool[row + own[j]]
                new += 1


@kernel()
def _fill_usages(start, own, holder, old_usage_start, old_usage, usage_start, usage):
    for h in range(len(holder)):
        new = usage_start[h]
        for k in range(start[holder[h]], start[holder[h] + 1]):
            usage[new] = old_usage[old_usage_start[h] + own[k]]
            new += 1
