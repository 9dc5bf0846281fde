"""Exact least cost over many nodes at once, the others as they are: elimination with tables of bounded size.

A plan says which nodes are free and in which order they are eliminated. `make_plan` finds one whose tables stay small,
by fixing nodes at random wherever they would not; `solve_plan` gives the free nodes the choices of least total,
exactly, given the fixed ones. A plan depends on sizes only and serves at any prices.

When node v is eliminated, its clique is the set of free nodes that it is still tied to. Its table holds, for every
combination of the clique's choices, the least total of v and of all that was eliminated into it. The clique is kept in
reverse order of elimination, so that the next to go is the last dim of the table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.pipeline.base.kernel_cache import kernel

BLOCK = 128  # nodes whose least weight is kept together
DIMS = 24  # of a table at most: entries are at most 2 ** 23
ONE = np.uint64(1)

Ints = NDArray[np.int64]
_inlined = kernel(inline="always")  # by plain calls the loops take a tenth longer
_inlined_fast = kernel(fastmath=True, inline="always")


class EliminationPlan(NamedTuple):
    free: NDArray[np.uint8]  # which nodes are eliminated
    order: Ints
    clique_start: Ints  # the clique of order[i]: clique_start[i] .. clique_start[i + 1] - 1 of clique_node
    clique_node: Ints
    table_start: Ints  # of order[i]
    looks: int  # entries that are looked at to fill all tables

    @property
    def work(self) -> int:
        """Entries of all tables."""
        return int(self.table_start[-1])


class _Ties(NamedTuple):
    """The free nodes that are still there, numbered 0 .. m - 1, and what ties them together."""

    near: NDArray[np.uint64]  # near[i]: a bit per neighbour
    logs: NDArray[np.float64]  # of a node's choices
    weight: NDArray[np.float64]  # log of the entries that are looked at to eliminate a node; infinite: it is gone
    noise: NDArray[np.float64]
    least: NDArray[np.float64]  # weight * noise of each block
    others: Ints  # room for neighbours


@kernel()
def make_plan(graph, free, cap, tournament, seed):
    """Eliminate the free nodes, cheapest table first; where the cheapest is over the cap, fix some node.

    `free` is changed: 0 for the nodes that got fixed.
    """
    np.random.seed(seed)
    sizes = np.diff(graph.start)
    nodes = np.flatnonzero(free)
    m = len(nodes)
    ties, limit = _tie(graph, nodes, sizes), np.log(cap)
    order, clique_start = np.zeros(m, np.int64), np.zeros(m + 1, np.int64)
    clique_node = np.zeros(m * DIMS, np.int64)
    members = np.empty(m, np.int64)
    rest, left, count = np.arange(m), m, 0
    for _step in range(m):
        v = _lightest(ties)
        fix = ties.weight[v] > limit
        if fix:
            best = -1.0
            for _ in range(tournament):
                pick = np.random.randint(left)
                while ties.weight[rest[pick]] == np.inf:
                    left -= 1
                    rest[pick] = rest[left]
                    pick = np.random.randint(left)
                if ties.weight[rest[pick]] > best:
                    v, best = rest[pick], ties.weight[rest[pick]]
            free[nodes[v]] = 0
        number = _members(ties.near[v], members)
        if not fix:
            order[count] = nodes[v]
            base = clique_start[count]
            clique_node[base : base + number] = nodes[members[:number]]
            count += 1
            clique_start[count] = base + number
        _take_out(ties, v, members[:number], fix)
    order, clique_start = order[:count], clique_start[: count + 1]
    _order_cliques(free, order, clique_start, clique_node)
    table_start, looks = _table_sizes(sizes, order, clique_start, clique_node)
    return EliminationPlan(free, order, clique_start, clique_node, table_start, looks)


@kernel()
def _tie(graph, nodes, sizes):
    m = len(nodes)
    local = np.full(len(sizes), -1, np.int32)
    for i in range(m):
        local[nodes[i]] = i
    near = np.zeros((m, (m + 63) // 64), np.uint64)
    logs = np.log(np.maximum(2, sizes[nodes]).astype(np.float64))
    weight = np.empty(m)
    noise = 1.0 + 0.3 * np.random.random(m)
    least = np.full((m + BLOCK - 1) // BLOCK, np.inf)
    for i in range(m):
        v = nodes[i]
        weight[i] = logs[i]
        for a in range(graph.arc_start[v], graph.arc_start[v + 1]):
            w = local[graph.arc_to[a]]
            if w >= 0:
                near[i, w >> 6] |= ONE << np.uint64(w & 63)
                weight[i] += logs[w]
        least[i // BLOCK] = min(least[i // BLOCK], weight[i] * noise[i])
    return _Ties(near, logs, weight, noise, least, np.empty(m, np.int64))


@_inlined
def _lightest(ties):
    block, v, low = np.argmin(ties.least), -1, np.inf
    for i in range(block * BLOCK, min(len(ties.weight), (block + 1) * BLOCK)):
        if ties.weight[i] * ties.noise[i] < low:
            v, low = i, ties.weight[i] * ties.noise[i]
    return v


@_inlined
def _members(row, members):
    """The bits that are set; how many."""
    number = 0
    for word in range(len(row)):
        bits = row[word]
        position = word * 64
        while bits:
            if bits & ONE:
                members[number] = position
                number += 1
            bits >>= ONE
            position += 1
    return number


@_inlined
def _take_out(ties, v, members, fix):
    """Node v goes; where it is eliminated, not fixed, its neighbours are tied to one another."""
    near, logs, weight, noise, least, others = ties
    weight[v] = np.inf
    near_v, own = near[v], ~(ONE << np.uint64(v & 63))
    for w in members:
        if fix:
            near[w, v >> 6] &= own
            weight[w] -= logs[v]
        else:
            for word in range(len(near_v)):
                near[w, word] |= near_v[word]
            near[w, w >> 6] &= ~(ONE << np.uint64(w & 63))
            near[w, v >> 6] &= own
            total = logs[w]
            for c in range(_members(near[w], others)):
                total += logs[others[c]]
            weight[w] = total
    for n in range(-1, len(members)):
        b = (v if n < 0 else members[n]) // BLOCK
        least[b] = np.inf
        for i in range(b * BLOCK, min(len(weight), (b + 1) * BLOCK)):
            least[b] = min(least[b], weight[i] * noise[i])


@kernel()
def _order_cliques(free, order, clique_start, clique_node):
    """Cliques in reverse order of elimination, without the nodes that were fixed since."""
    place = np.empty(len(free), np.int64)
    for i in range(len(order)):
        place[order[i]] = i
    lo, end = 0, 0
    for i in range(len(order)):
        hi, first = clique_start[i + 1], end
        for a in range(lo, hi):
            if free[clique_node[a]]:
                clique_node[end] = clique_node[a]
                end += 1
        lo, hi = hi, end
        clique_start[i + 1] = end
        for a in range(first + 1, hi):
            w = clique_node[a]
            b = a - 1
            while b >= first and place[clique_node[b]] < place[w]:
                clique_node[b + 1] = clique_node[b]
                b -= 1
            clique_node[b + 1] = w


@kernel()
def _table_sizes(sizes, order, clique_start, clique_node):
    """Where each eliminated node's table begins, and the entries that are looked at to fill them all."""
    table_start = np.zeros(len(order) + 1, np.int64)
    looks = 0
    for i in range(len(order)):
        size = 1
        for c in range(clique_start[i], clique_start[i + 1]):
            size *= sizes[clique_node[c]]
        table_start[i + 1] = table_start[i] + size
        looks += size * sizes[order[i]]
    return table_start, looks


class _Scratch(NamedTuple):
    place: Ints  # of a node in the order; -1: fixed
    child: Ints  # the tables that are added to a node's, as a linked list: the first,
    following: Ints  # and the next
    value: NDArray[np.float64]  # by choice: what a node comes to with what is fixed around it
    total: NDArray[np.float64]
    strides: Ints  # of each factor along each dim of the clique
    offset: Ints
    is_edge: NDArray[np.uint8]  # else the factor is a table
    at: Ints  # the clique's choices
    shape: Ints


@kernel(fastmath=True)
def solve_plan(graph, unary, plan, tables, picked):
    """Give the free nodes the choices of least total."""
    count = len(plan.order)
    if count == 0:
        return
    work = _Scratch(
        np.full(len(picked), -1, np.int64),
        np.full(count, -1, np.int64),
        np.full(count, -1, np.int64),
        np.empty(len(unary)),
        np.empty(np.diff(graph.start).max()),
        np.empty((count + DIMS, DIMS), np.int64),
        np.empty(count + DIMS, np.int64),
        np.empty(count + DIMS, np.uint8),
        np.empty(DIMS, np.int64),
        np.empty(DIMS, np.int64),
    )
    for i in range(count):
        work.place[plan.order[i]] = i
    for i in range(count):
        factors = _gather(i, graph, unary, plan, tables, picked, work)
        lo, hi = plan.clique_start[i], plan.clique_start[i + 1]
        if hi > lo:
            p = work.place[plan.clique_node[hi - 1]]
            work.following[i] = work.child[p]
            work.child[p] = i
            _fill_table(i, factors, graph, plan, tables, work)
    for i in range(count - 1, -1, -1):
        _choose(i, graph, plan, tables, picked, work)


@_inlined_fast
def _gather(i, graph, unary, plan, tables, picked, work):
    """What is fixed around a node goes into its value; edges to free nodes and tables are factors: how many."""
    start, arc_start, arc_to, arc_matrix, matrix_start, pool = graph
    clique_start, clique_node, value, strides = plan.clique_start, plan.clique_node, work.value, work.strides
    v = plan.order[i]
    base = start[v]
    size = start[v + 1] - base
    lo = clique_start[i]
    d = clique_start[i + 1] - lo
    for k in range(base, base + size):
        value[k] = unary[k]
    factors = 0
    for a in range(arc_start[v], arc_start[v + 1]):
        w = arc_to[a]
        if plan.free[w] == 0:
            kw = start[w + 1] - start[w]
            m = matrix_start[arc_matrix[a]] + picked[w]
            for k in range(size):
                value[base + k] += pool[m + k * kw]
        elif work.place[w] > i:
            for j in range(d):
                strides[factors, j] = size if clique_node[lo + j] == w else 0
            work.offset[factors] = matrix_start[arc_matrix[a] ^ 1]
            work.is_edge[factors] = 1
            factors += 1
    c = work.child[i]
    while c >= 0:
        clo, chi = clique_start[c], clique_start[c + 1]
        if chi - clo == 1:
            t = plan.table_start[c]
            for k in range(size):
                value[base + k] += tables[t + k]
        else:
            for j in range(d):
                strides[factors, j] = 0
            step, j = size, d - 1
            for q in range(chi - 2, clo - 1, -1):
                w = clique_node[q]
                while clique_node[lo + j] != w:
                    j -= 1
                strides[factors, j] = step
                step *= start[w + 1] - start[w]
            work.offset[factors] = plan.table_start[c]
            work.is_edge[factors] = 0
            factors += 1
        c = work.following[c]
    return factors


@_inlined_fast
def _fill_table(i, factors, graph, plan, tables, work):
    """For every combination of the clique's choices, the least over the node's own."""
    total, offset, strides, is_edge, pool = work.total, work.offset, work.strides, work.is_edge, graph.pool
    v, lo = plan.order[i], plan.clique_start[i]
    base = graph.start[v]
    size = graph.start[v + 1] - base
    d = plan.clique_start[i + 1] - lo
    at, shape = work.at, work.shape
    for j in range(d):
        w = plan.clique_node[lo + j]
        at[j], shape[j] = 0, graph.start[w + 1] - graph.start[w]
    for entry in range(plan.table_start[i], plan.table_start[i + 1]):
        for k in range(size):
            total[k] = work.value[base + k]
        for f in range(factors):
            o = offset[f]
            if is_edge[f]:
                for k in range(size):
                    total[k] += pool[o + k]
            else:
                for k in range(size):
                    total[k] += tables[o + k]
        best = total[0]
        for k in range(1, size):
            best = min(best, total[k])
        tables[entry] = best
        for j in range(d - 1, -1, -1):
            at[j] += 1
            if at[j] < shape[j]:
                for f in range(factors):
                    offset[f] += strides[f, j]
                break
            at[j] = 0
            for f in range(factors):
                offset[f] -= strides[f, j] * (shape[j] - 1)


@_inlined_fast
def _choose(i, graph, plan, tables, picked, work):
    """The best choice of a node, given those that are eliminated after it; the present one where it is as good."""
    start, arc_start, arc_to, arc_matrix, matrix_start, pool = graph
    v, total = plan.order[i], work.total
    size = start[v + 1] - start[v]
    for k in range(size):
        total[k] = work.value[start[v] + k]
    for a in range(arc_start[v], arc_start[v + 1]):
        w = arc_to[a]
        if plan.free[w] and work.place[w] > i:
            m = matrix_start[arc_matrix[a] ^ 1] + picked[w] * size
            for k in range(size):
                total[k] += pool[m + k]
    c = work.child[i]
    while c >= 0:
        clo, chi = plan.clique_start[c], plan.clique_start[c + 1]
        if chi - clo > 1:
            step, o = size, plan.table_start[c]
            for q in range(chi - 2, clo - 1, -1):
                w = plan.clique_node[q]
                o += step * picked[w]
                step *= start[w + 1] - start[w]
            for k in range(size):
                total[k] += tables[o + k]
        c = work.following[c]
    best = total[picked[v]]
    for k in range(size):
        if total[k] < best:
            best = total[k]
            picked[v] = k


@kernel()
def grow_ball(graph, centre, size, free, seed):
    """Mark about `size` nodes around a centre, at random among the nearest."""
    np.random.seed(seed)
    arc_start, arc_to = graph.arc_start, graph.arc_to
    edge = np.empty(len(free), np.int64)
    free[:] = 0
    free[centre] = 1
    edge[0] = centre
    head, tail = 0, 1
    while head < tail and tail < size:
        swap = head + np.random.randint(min(tail - head, 8))
        edge[head], edge[swap] = edge[swap], edge[head]
        v = edge[head]
        head += 1
        lo, hi = arc_start[v], arc_start[v + 1]
        first = np.random.randint(hi - lo) if hi > lo else 0
        for a in range(hi - lo):
            w = arc_to[lo + (first + a) % (hi - lo)]
            if free[w] == 0:
                free[w] = 1
                edge[tail] = w
                tail += 1
                if tail >= size:
                    break
