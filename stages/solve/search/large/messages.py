"""Lower bounds by sequential tree-reweighted message passing, and choices read off the messages."""

from __future__ import annotations

import numpy as np

from pipeline.base.kernel_cache import kernel


@kernel()
def reverse_arcs(arc_start, arc_to, arc_back):
    n = len(arc_start) - 1
    for v in range(n):
        for a in range(arc_start[v], arc_start[v + 1]):
            w = arc_to[a]
            for b in range(arc_start[w], arc_start[w + 1]):
                if arc_to[b] == v:
                    arc_back[a] = b
                    break


@kernel(fastmath=True)
def pass_messages(
    start, unary, arc_start, arc_to, arc_matrix, matrix_start, pool, arc_back, message_start, message, forward, picked
):  # fmt: skip
    """One pass of sequential tree-reweighted message passing; a lower bound of the total, and choices read off.

    message[message_start[a] + l]: from the node that arc a leaves to choice l of the node that it enters.
    """
    n = len(picked)
    widest = 0
    for v in range(n):
        widest = max(widest, start[v + 1] - start[v])
    belief = np.empty(widest)
    own = np.empty(widest)
    scaled = np.empty(widest)
    bound = 0.0
    for step in range(n):
        v = step if forward else n - 1 - step
        base = start[v]
        size = start[v + 1] - base
        for k in range(size):
            belief[k] = unary[base + k]
            own[k] = unary[base + k]
        before, after = 0, 0
        for a in range(arc_start[v], arc_start[v + 1]):
            w = arc_to[a]
            m = message_start[arc_back[a]]
            for k in range(size):
                belief[k] += message[m + k]
            ahead = w > v if forward else w < v
            if ahead:
                after += 1
                for k in range(size):
                    own[k] += message[m + k]
            else:
                before += 1
                row = matrix_start[arc_matrix[a] ^ 1] + picked[w] * size
                for k in range(size):
                    own[k] += pool[row + k]
        best = own[0]
        picked[v] = 0
        for k in range(1, size):
            if own[k] < best:
                best = own[k]
                picked[v] = k
        low = belief[0]
        for k in range(1, size):
            low = min(low, belief[k])
        bound += low
        share = 1.0 / max(1, max(before, after))
        for a in range(arc_start[v], arc_start[v + 1]):
            w = arc_to[a]
            ahead = w > v if forward else w < v
            if not ahead:
                continue
            m = message_start[arc_back[a]]
            for k in range(size):
                scaled[k] = share * (belief[k] - low) - message[m + k]
            out = message_start[a]
            kw = start[w + 1] - start[w]
            row = matrix_start[arc_matrix[a] ^ 1]
            lowest = np.inf
            for l in range(kw):
                best = np.inf
                for k in range(size):
                    best = min(best, scaled[k] + pool[row + k])
                row += size
                message[out + l] = best
                lowest = min(lowest, best)
            for l in range(kw):
                message[out + l] -= lowest
            bound += lowest
    return bound


@kernel()
def beliefs(unary, start, arc_start, arc_back, message_start, message):
    """What the choices of every node come to with all that reaches it."""
    found = unary.copy()
    for v in range(len(start) - 1):
        base = start[v]
        for a in range(arc_start[v], arc_start[v + 1]):
            m = message_start[arc_back[a]]
            for k in range(start[v + 1] - base):
                found[base + k] += message[m + k]
    return found
