"""Products of odd sizes in a compiled block: what they read is padded once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def pad_once(graph: fx.Graph) -> None:
    """A matrix and its transpose: torch pads what each product reads, and a head's gradient is read by two."""
    known: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
    for pad in graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default):
        matrix, amounts, *value = pad.args
        if len(amounts) != 4 or value:
            continue
        turned = False
        while _is_transpose(matrix):
            (matrix, _), turned = matrix.args, not turned
        amounts = (*amounts[2:], *amounts[:2]) if turned else tuple(amounts)
        with graph.inserting_before(pad):
            if (matrix, amounts) not in known:
                known[matrix, amounts] = _like(pad, pad.target, matrix, list(amounts))
            own = known[matrix, amounts]
            own = _like(pad, torch.ops.aten.permute.default, own, [1, 0]) if turned else own
        pad.replace_all_uses_with(own)
        graph.erase_node(pad)


def _is_transpose(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.permute.default and list(node.args[1]) == [1, 0]


def _like(node: fx.Node, target: Any, source: fx.Node, how: list[int]) -> fx.Node:
    """A call in the node's place."""
    made = node.graph.call_function(target, (source, how))
    made.meta = node.meta | {"val": target(source.meta["val"], how)}
    return made
