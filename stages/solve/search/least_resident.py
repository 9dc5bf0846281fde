"""The plan that keeps least for good: no recompute saves what parameters, gradients and optimizer state take."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from stages.solve.problem.data import Node, Problem
from stages.solve.search.elimination import Elimination, Prices, TooWide

FINEST = 2.0**50  # ticks in the largest sum: floats count them exactly


def least_resident(problem: Problem, parameters: Collection[int], seconds: float) -> tuple[int, ...] | None:
    """The choices by which these nodes hold least during the whole step, and of such plans the fastest.

    A byte is as dear as `seconds`, which is to be about what a step takes. None where no plan exists, or where the
    graph is too wide to tell.
    """
    kept = Problem(
        tuple(_held(n, problem.length if i in parameters else None) for i, n in enumerate(problem.nodes)),
        tuple(replace(edge, holdings=()) for edge in problem.edges),
        tuple(replace(share, holdings=()) for share in problem.shares),
    )
    most = sum(float(h.usages.max(initial=0.0)) for node in kept.nodes for h in node.holdings)
    if not math.isfinite(seconds) or not kept.length:
        return None
    price = seconds or 1.0
    try:
        found = Elimination(kept, tick=price * max(1.0, most) / FINEST).minimise(Prices((0,), (price,)))
    except TooWide:
        return None
    return found.picked if math.isfinite(problem.cost(found.picked)) else None


def _held(node: Node, length: int | None) -> Node:
    """The node with what it holds for the whole length; with nothing where none is given."""
    return replace(node, holdings=tuple(h for h in node.holdings if (h.first, h.end) == (0, length)))
