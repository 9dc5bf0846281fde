"""The search by random changes (Metropolis), on the same problem data: a check on the other searches, without a proof.

One node at a time takes another choice. A change for the better is kept; one for the worse with a probability that
falls with what it costs and with the temperature, which cools from a tenth of the step's cost per node down to nothing.
A change that does not fit the limit is not made. It starts from a plan that fits and returns the best that it met.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict

from stages.solve.problem.data import Edge, Problem, Share
from stages.solve.search.memory_price import Seen

CHANGES_PER_NODE = 300


def search(problem: Problem, limit: float, start: Seen, seed: int, deadline: float) -> Seen:
    """The best plan that was met; the same one for the same seed, unless the deadline ends the search."""
    chosen = random.Random(seed)
    touching: dict[int, list[Edge | Share]] = defaultdict(list)
    for edge in problem.edges:
        touching[edge.first].append(edge)
        touching[edge.second].append(edge)
    for share in problem.shares:
        for node in {share.maker, *(reader.node for reader in share.readers)}:
            touching[node].append(share)

    def paid(node: int) -> float:
        """What a node pays, with all that it takes part in."""
        total = float(problem.nodes[node].costs[picked[node]])
        for part in touching[node]:
            if isinstance(part, Edge):
                total += float(part.costs[picked[part.first], picked[part.second]])
            else:
                total += sum(float(part.costs[picked[part.maker], form]) for form in part.forms(picked))
        return total

    free = [i for i, node in enumerate(problem.nodes) if len(node.costs) > 1]
    picked, cost, best = list(start.picked), start.cost, start
    total = CHANGES_PER_NODE * len(free)
    hot = 0.1 * start.cost / max(1, len(problem.nodes))
    for step in range(total):
        if step % 256 == 0 and time.monotonic() > deadline:
            break
        node = chosen.choice(free)
        before, old = picked[node], paid(node)
        picked[node] = chosen.randrange(len(problem.nodes[node].costs))
        change = paid(node) - old
        heat = hot * (1 - step / total) ** 2
        refused = change > 0 and (heat <= 0 or chosen.random() >= math.exp(-change / heat))
        if refused or problem.peak(picked) > limit:
            picked[node] = before
            continue
        cost += change
        if cost < best.cost:
            best = Seen(tuple(picked), problem.cost(picked), problem.held(picked))
    return best
