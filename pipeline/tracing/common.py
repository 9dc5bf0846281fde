"""Activations that are carried past the cuts of the chain: long skips, and what every later layer reads.

An activation is common where, while it is alive, more than six products (linear layers, convolutions, attention)
follow one another. A residual stays inside its layer: a bottleneck is three products in a row, with squeeze and excite
five, attention is four, with low-rank adapters six; experts side by side do not follow one another. An encoder's
output, a position bias that every layer adds, or a skip of a U-Net outlives that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.ir.graph import Op
from pipeline.ops.table import rule_of

LONGEST_RESIDUAL = 6  # products in a row


def find_common(ops: Sequence[Op]) -> set[str]:
    """The results of these ops, given in order, that outlive a long run of products."""
    last_read = {name: i for i, op in enumerate(ops) for name in op.inputs}
    before = _products_before(ops)
    return {
        name
        for i, op in enumerate(ops)
        for name in op.outputs
        if (last := last_read.get(name, i)) > i
        and before[last] - before[i + 1] > LONGEST_RESIDUAL  # fewer at all are fewer in a row
        and products_in_a_row(ops[i + 1 : last], enough=LONGEST_RESIDUAL + 1) > LONGEST_RESIDUAL
    }


def products_in_a_row(ops: Sequence[Op], enough: float = math.inf) -> int:
    """The most products on one path through these ops, or as many as are enough."""
    rows: dict[str, int] = {}
    longest = 0
    for op in ops:
        row = max((rows.get(name, 0) for name in op.inputs), default=0) + _is_product(op)
        rows |= dict.fromkeys(op.outputs, row)
        longest = max(longest, row)
        if longest >= enough:
            break
    return longest


def _products_before(ops: Sequence[Op]) -> list[int]:
    counts = [0]
    for op in ops:
        counts.append(counts[-1] + _is_product(op))
    return counts


def _is_product(op: Op) -> bool:
    rule = rule_of(op)
    return rule is not None and rule.is_product
