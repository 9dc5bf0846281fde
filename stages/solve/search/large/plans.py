"""Exact least cost over many nodes at once, the others as they are: elimination with tables of bounded size.

A plan says which nodes are free and in which order they are eliminated. `make_plan` finds one whose tables stay small,
by fixing nodes at random wherever they would not; `solve_plan` gives the free nodes the choices of least total,
exactly, given the fixed ones. A plan depends on sizes only and serves at any prices.

When node v is eliminated, its clique is the set of free nodes that it is still tied to. Its table holds, for every
combination of the clique's choices, the least total of v and of all that was eliminated into it. The clique is kept in
reverse order of elimination, so that the next to go is the last dim of the table.
"""

from __future__ import annotations

import numpy as np

from pipeline.base.kernel_cache import kernel

BLOCK = 128  # nodes whose least weight is kept together
DIMS = 24  # of a table at most: entries are at most 2 ** 23


@kernel()
def make_plan(seed, sizes, arc_start, arc_to, free, cap, tournament, order, clique_start, clique_node):
    """Eliminate the free nodes, cheapest table first; where the cheapest is over the cap, fix some node.

    `free` is changed: 0 for the nodes that got fixed. Returns how many nodes are eliminated.
    """
    np.random.seed(seed)
    n = len(sizes)
    nodes = np.flatnonzero(free)  # numbered 0 .. m - 1 here
    m = len(nodes)
    local = np.full(n, -1, np.int32)
    for i in range(m):
        local[nodes[i]] = i
    words = (m + 63) // 64
    near = np.zeros((m, words), np.uint64)
    logs = np.log(np.maximum(2, sizes[nodes]).astype(np.float64))
    weight = np.empty(m)
    noise = 1.0 + 0.3 * np.random.random(m)
    blocks = (m + BLOCK - 1) // BLOCK
    least = np.full(blocks, np.inf)
    one = np.uint64(1)
    left = m
    rest = np.arange(m)
    for i in range(m):
        v = nodes[i]
        total = logs[i]
        for a in range(arc_start[v], arc_start[v + 1]):
            w = local[arc_to[a]]
            if w >= 0:
                near[i, w >> 6] |= one << np.uint64(w & 63)
                total += logs[w]
        weight[i] = total
        least[i // BLOCK] = min(least[i // BLOCK], total * noise[i])
    limit = np.log(cap)
    count = 0
    members = np.empty(m, np.int64)
    clique_start[0] = 0
    for _step in range(m):
        b = np.argmin(least)
        v = -1
        low = np.inf
        for i in range(b * BLOCK, min(m, (b + 1) * BLOCK)):
            if weight[i] * noise[i] < low:
                low = weight[i] * noise[i]
                v = i
        fix = weight[v] > limit
        if fix:
            best = -1.0
            for _ in range(tournament):
                while True:
                    pick = np.random.randint(left)
                    if weight[rest[pick]] < np.inf:
                        break
                    left -= 1
                    rest[pick] = rest[left]
                if weight[rest[pick]] > best:
                    best = weight[rest[pick]]
                    v = rest[pick]
            free[nodes[v]] = 0
        number = 0
        for word in range(words):
            bits = near[v, word]
            position = word * 64
            while bits:
                if bits & one:
                    members[number] = position
                    number += 1
                bits >>= one
                position += 1
        weight[v] = np.inf
        vw, vb = v >> 6, ~(one << np.uint64(v & 63))
        if fix:
            for c in range(number):
                w = members[c]
                near[w, vw] &= vb
                weight[w] -= logs[v]
        else:
            order[count] = nodes[v]
            base = clique_start[count]
            for c in range(number):
                clique_node[base + c] = nodes[members[c]]
            count += 1
            clique_start[count] = base + number
            for c in range(number):
                w = members[c]
                for word in range(words):
                    near[w, word] |= near[v, word]
                near[w, w >> 6] &= ~(one << np.uint64(w & 63))
                near[w, vw] &= vb
                total = logs[w]
                for word in range(words):
                    bits = near[w, word]
                    position = word * 64
                    while bits:
                        if bits & one:
                            total += logs[position]
                        bits >>= one
                        position += 1
                weight[w] = total
        b = v // BLOCK
        least[b] = np.inf
        for i in range(b * BLOCK, min(m, (b + 1) * BLOCK)):
            least[b] = min(least[b], weight[i] * noise[i])
        for c in range(number):
            b = members[c] // BLOCK
            least[b] = np.inf
            for i in range(b * BLOCK, min(m, (b + 1) * BLOCK)):
                least[b] = min(least[b], weight[i] * noise[i])
    # cliques in reverse order of elimination
    place = np.empty(n, np.int64)
    for i in range(count):
        place[order[i]] = i
    end = 0
    lo = 0
    for i in range(count):
        hi = clique_start[i + 1]
        first = end
        for a in range(lo, hi):
            if free[clique_node[a]]:  # some were fixed since
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
    return count


@kernel()
def table_sizes(sizes, count, order, clique_start, clique_node, table_start):
    """Where each eliminated node's table begins; returns the entries that are looked at to fill them all."""
    table_start[0] = 0
    looks = 0
    for i in range(count):
        size = 1
        for c in range(clique_start[i], clique_start[i + 1]):
            size *= sizes[clique_node[c]]
        table_start[i + 1] = table_start[i] + size
        looks += size * sizes[order[i]]
    return looks


@kernel(fastmath=True)
def solve_plan(
    start, unary, arc_start, arc_to, arc_matrix, matrix_start, pool,
    free, count, order, clique_start, clique_node, table_start, tables, picked,
):  # fmt: skip
    """Give the free nodes the choices of least total. Returns how many choices changed."""
    n = len(picked)
    widest = 0
    for v in range(n):
        widest = max(widest, start[v + 1] - start[v])
    place = np.full(n, -1, np.int64)
    for i in range(count):
        place[order[i]] = i
    # tables that are added to a node's: a linked list per node
    child = np.full(count, -1, np.int64)
    following = np.full(count, -1, np.int64)
    value = np.empty(start[n])
    sum_ = np.empty(widest)
    strides = np.empty((count + DIMS, DIMS), np.int64)  # of each factor along each dim of the clique
    offset = np.empty(count + DIMS, np.int64)
    is_edge = np.empty(count + DIMS, np.uint8)
    x = np.empty(DIMS, np.int64)
    dim = np.empty(DIMS, np.int64)
    changed = 0
    for i in range(count):
        v = order[i]
        base = start[v]
        size = start[v + 1] - base
        lo, hi = clique_start[i], clique_start[i + 1]
        d = hi - lo
        for k in range(size):
            value[base + k] = unary[base + k]
        factors = 0
        for a in range(arc_start[v], arc_start[v + 1]):
            w = arc_to[a]
            if free[w] == 0:
                kw = start[w + 1] - start[w]
                m = matrix_start[arc_matrix[a]] + picked[w]
                for k in range(size):
                    value[base + k] += pool[m + k * kw]
            elif place[w] > i:
                for j in range(d):
                    strides[factors, j] = 0
                    if clique_node[lo + j] == w:
                        strides[factors, j] = size
                offset[factors] = matrix_start[arc_matrix[a] ^ 1]
                is_edge[factors] = 1
                factors += 1
        c = child[i]
        while c >= 0:
            clo, chi = clique_start[c], clique_start[c + 1]
            if chi - clo == 1:
                t = table_start[c]
                for k in range(size):
                    value[base + k] += tables[t + k]
            else:
                for j in range(d):
                    strides[factors, j] = 0
                step = size
                j = d - 1
                for q in range(chi - 2, clo - 1, -1):
                    w = clique_node[q]
                    while clique_node[lo + j] != w:
                        j -= 1
                    strides[factors, j] = step
                    step *= start[w + 1] - start[w]
                offset[factors] = table_start[c]
                is_edge[factors] = 0
                factors += 1
            c = following[c]
        t = table_start[i]
        if d == 0:
            continue
        p = place[clique_node[hi - 1]]
        following[i] = child[p]
        child[p] = i
        for j in range(d):
            x[j] = 0
            w = clique_node[lo + j]
            dim[j] = start[w + 1] - start[w]
        total = table_start[i + 1] - t
        for entry in range(total):
            for k in range(size):
                sum_[k] = value[base + k]
            for f in range(factors):
                o = offset[f]
                if is_edge[f]:
                    for k in range(size):
                        sum_[k] += pool[o + k]
                else:
                    for k in range(size):
                        sum_[k] += tables[o + k]
            best = sum_[0]
            for k in range(1, size):
                best = min(best, sum_[k])
            tables[t + entry] = best
            j = d - 1
            while j >= 0:
                x[j] += 1
                if x[j] < dim[j]:
                    for f in range(factors):
                        offset[f] += strides[f, j]
                    break
                x[j] = 0
                for f in range(factors):
                    offset[f] -= strides[f, j] * (dim[j] - 1)
                j -= 1
    for i in range(count - 1, -1, -1):
        v = order[i]
        base = start[v]
        size = start[v + 1] - base
        for k in range(size):
            sum_[k] = value[base + k]
        for a in range(arc_start[v], arc_start[v + 1]):
            w = arc_to[a]
            if free[w] and place[w] > i:
                m = matrix_start[arc_matrix[a] ^ 1] + picked[w] * size
                for k in range(size):
                    sum_[k] += pool[m + k]
        c = child[i]
        while c >= 0:
            clo, chi = clique_start[c], clique_start[c + 1]
            if chi - clo > 1:
                step = size
                o = table_start[c]
                for q in range(chi - 2, clo - 1, -1):
                    w = clique_node[q]
                    o += step * picked[w]
                    step *= start[w + 1] - start[w]
                for k in range(size):
                    sum_[k] += tables[o + k]
            c = following[c]
        old = picked[v]
        best = sum_[old]
        for k in range(size):
            if sum_[k] < best:
                best = sum_[k]
                picked[v] = k
        if picked[v] != old:
            changed += 1
    return changed


@kernel()
def grow_ball(seed, arc_start, arc_to, centre, size, free):
    """Mark about `size` nodes around a centre, at random among the nearest."""
    np.random.seed(seed)
    n = len(free)
    edge = np.empty(n, np.int64)
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
    return tail
