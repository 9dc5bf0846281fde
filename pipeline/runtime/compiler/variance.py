"""Means and variances in a compiled block: of many values by sums, which a GPU adds up as fast as it reads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

MANY = 4096  # below, torch has all values at hand and goes over them twice
ATEN = torch.ops.aten


def sum_up(graph: fx.Graph) -> None:
    """Both from the sums of the differences to one of the values, and of their squares.

    torch's way (Welford's) divides at every value, and what is read waits for it. That one of the values is taken away
    first keeps what the sums have in common small: of equal values the variance is zero.
    """
    for node in graph.find_nodes(op="call_function", target=ATEN.var_mean.correction):
        values, dims = node.args
        size = values.meta["val"].size()
        count = math.prod(size[dim] for dim in dims) if dims else 0
        if count < MANY or not node.kwargs.get("keepdim") or values.meta["val"].is_complex():
            continue
        correction = node.kwargs.get("correction")
        with graph.inserting_before(node):
            made = _Maker(node)
            one = values
            for dim in dims:
                one = made(ATEN.slice.Tensor, one, dim, 0, 1)
            apart = made(ATEN.sub.Tensor, values, one)
            total = made(ATEN.sum.dim_IntList, apart, dims, True)
            squares = made(ATEN.sum.dim_IntList, made(ATEN.mul.Tensor, apart, apart), dims, True)
            mean = made(ATEN.mul.Tensor, total, 1 / count)
            rest = made(ATEN.sub.Tensor, squares, made(ATEN.mul.Tensor, total, mean))
            spread = made(ATEN.mul.Tensor, rest, 1 / (count - (1 if correction is None else correction)))
            results = made(ATEN.clamp_min.default, spread, 0), made(ATEN.add.Tensor, mean, one)
        for reader in list(node.users):
            reader.replace_all_uses_with(results[reader.args[1]])
            graph.erase_node(reader)
        graph.erase_node(node)


class _Maker:
    """Calls in the node's place."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def __call__(self, target: Any, *arguments: Any) -> fx.Node:
        made = self.node.graph.call_function(target, arguments)
        values: Any = fx.node.map_arg(arguments, lambda source: source.meta["val"])
        made.meta = self.node.meta | {"val": target(*values)}
        return made
