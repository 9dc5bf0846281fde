"""The compiled loops: totals, memory and its price, lower bounds by message passing; dominated choices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.pipeline.base.kernel_cache import kernel

Floats = NDArray[np.float64]


@kernel()
def total_cost(graph, costs, picked):
    start, arc_start, arc_to, arc_matrix, matrix_start, pool = graph
    total = 0.0
    for v in range(len(picked)):
        total += costs[start[v] + picked[v]]
        for a in range(arc_start[v], arc_start[v + 1]):
            w = arc_to[a]
            if w > v:
                total += pool[matrix_start[arc_matrix[a]] + picked[v] * (start[w + 1] - start[w]) + picked[w]]
    return total


@kernel()
def add_prices(start, costs, holdings, cumulated, wanted, priced):
    """priced = costs + memory at its price, for the wanted nodes; cumulated[t]: prices of all moments before t."""
    hold_start, first, end, usage_start, usage = holdings
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
def held_after(held, holdings, before, after):
    """Memory at every moment once the choices change; `before` of -1: nothing was counted for that node."""
    start, first, end, usage_start, usage = holdings
    change = np.zeros(len(held) + 1)
    for v in range(len(after)):
        if before[v] == after[v]:
            continue
        for h in range(start[v], start[v + 1]):
            u = usage[usage_start[h] + after[v]]
            if before[v] >= 0:
                u -= usage[usage_start[h] + before[v]]
            change[first[h]] += u
            change[end[h]] -= u
    return held + np.cumsum(change)[:-1]


@kernel()
def fill_matrices(old, new, own, leaves):
    """The matrices of few choices, `own` by their number among their node's; `leaves`: the node that an arc leaves."""
    for a in range(len(leaves)):
        v, w = leaves[a], old.arc_to[a]
        width = old.start[w + 1] - old.start[w]
        matrix, out = old.matrix_start[old.arc_matrix[a]], new.matrix_start[new.arc_matrix[a]]
        for k in range(new.start[v], new.start[v + 1]):
            row = matrix + own[k] * width
            for j in range(new.start[w], new.start[w + 1]):
                new.pool[out] = old.pool[row + own[j]]
                out += 1


@kernel()
def fill_usages(start, own, holder, old, new):
    """The same for bytes; `holder`: the node of each holding."""
    for h in range(len(holder)):
        out = new.usage_start[h]
        for k in range(start[holder[h]], start[holder[h] + 1]):
            new.usage[out] = old.usage[old.usage_start[h] + own[k]]
            out += 1


@kernel()
def reverse_arcs(arc_start, arc_to):
    """Of each arc the one that goes the other way."""
    back = np.zeros(len(arc_to), np.int64)
    for v in range(len(arc_start) - 1):
        for a in range(arc_start[v], arc_start[v + 1]):
            w = arc_to[a]
            for b in range(arc_start[w], arc_start[w + 1]):
                if arc_to[b] == v:
                    back[a] = b
                    break
    return back


@kernel(fastmath=True)
def pass_messages(graph, unary, back, message_start, message, forward, picked):
    """One pass of sequential tree-reweighted message passing; a lower bound of the total, and choices read off.

    message[message_start[a] + l]: from the node that arc a leaves to choice l of the node that it enters.
    """
    start, arc_start, arc_to, arc_matrix, matrix_start, pool = graph
    n = len(picked)
    widest = np.diff(start).max() if n else 0
    belief = np.empty(widest)
    own = np.empty(widest)
    scaled = np.empty(widest)
    bound = 0.0
    for step in range(n):
        v = step if forward else n - 1 - step
        base = start[v]
        size = start[v + 1] - base
        for k in range(size):
            belief[k] = own[k] = unary[base + k]
        before, after = 0, 0
        for a in range(arc_start[v], arc_start[v + 1]):
            w = arc_to[a]
            m = message_start[back[a]]
            for k in range(size):
                belief[k] += message[m + k]
            if (w > v) == forward:
                after += 1
                for k in range(size):
                    own[k] += message[m + k]
            else:
                before += 1
                row = matrix_start[arc_matrix[a] ^ 1] + picked[w] * size
                for k in range(size):
                    own[k] += pool[row + k]
        best, low = 0, belief[0]
        for k in range(1, size):
            best = k if own[k] < own[best] else best
            low = min(low, belief[k])
        picked[v] = best
        bound += low
        share = 1.0 / max(1, max(before, after))
        for a in range(arc_start[v], arc_start[v + 1]):
            w = arc_to[a]
            if (w > v) != forward:
                continue
            m = message_start[back[a]]
            for k in range(size):
                scaled[k] = share * (belief[k] - low) - message[m + k]
            row = matrix_start[arc_matrix[a] ^ 1]
            lowest = np.inf
            for l in range(message_start[a], message_start[a + 1]):
                least = np.inf
                for k in range(size):
                    least = min(least, scaled[k] + pool[row + k])
                row += size
                message[l] = least
                lowest = min(lowest, least)
            for l in range(message_start[a], message_start[a + 1]):
                message[l] -= lowest
            bound += lowest
    return bound


@kernel()
def beliefs(graph, unary, back, message_start, message):
    """What the choices of every node come to with all that reaches it."""
    found = unary.copy()
    for v in range(len(graph.start) - 1):
        base = graph.start[v]
        for a in range(graph.arc_start[v], graph.arc_start[v + 1]):
            m = message_start[back[a]]
            for k in range(graph.start[v + 1] - base):
                found[base + k] += message[m + k]
    return found


def undominated(costs: Floats, held: list[Floats], matrices: list[Floats]) -> NDArray[np.bool_]:
    """Which choices of a node no other makes needless. `held`: by interval; `matrices`: to each neighbour, by choice.

    Choice a makes b needless if it never holds more and costs no more whatever the neighbours take, each at its worst
    for a. There are many pairs, and few that need a look.
    """
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
