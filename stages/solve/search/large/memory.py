"""Costs with memory at its price, the memory held over time, and totals."""

from __future__ import annotations

import numpy as np

from pipeline.base.kernel_cache import kernel


@kernel()
def total_cost(start, costs, arc_start, arc_to, arc_matrix, matrix_start, pool, picked):
    total = 0.0
    for v in range(len(picked)):
        total += costs[start[v] + picked[v]]
        for a in range(arc_start[v], arc_start[v + 1]):
            w = arc_to[a]
            if w > v:
                total += pool[matrix_start[arc_matrix[a]] + picked[v] * (start[w + 1] - start[w]) + picked[w]]
    return total


@kernel()
def add_prices(start, costs, hold_start, first, end, usage_start, usage, cumulated, wanted, priced):
    """priced = costs + memory at its price, for the wanted nodes; cumulated[t]: prices of all moments before t."""
    for v in range(len(start) - 1):
        if wanted[v] == 0:
            continue
        base = start[v]
        for k in range(base, start[v + 1]):
            priced[k] = costs[k]
        for h in range(hold_start[v], hold_start[v + 1]):
            weight = cumulated[end[h]] - cumulated[first[h]]
            if weight != 0.0:
                u = usage_start[h]
                for k in range(usage_start[h + 1] - u):
                    priced[base + k] += usage[u + k] * weight


@kernel()
def held_after(held, hold_start, first, end, usage_start, usage, before, after):
    """Memory at every moment once the choices change; `before` of -1: nothing was counted for that node."""
    change = np.zeros(len(held) + 1)
    for v in range(len(after)):
        if before[v] == after[v]:
            continue
        for h in range(hold_start[v], hold_start[v + 1]):
            u = usage[usage_start[h] + after[v]]
            if before[v] >= 0:
                u -= usage[usage_start[h] + before[v]]
            change[first[h]] += u
            change[end[h]] -= u
    new = np.empty(len(held))
    running = 0.0
    for t in range(len(held)):
        running += change[t]
        new[t] = held[t] + running
    return new
