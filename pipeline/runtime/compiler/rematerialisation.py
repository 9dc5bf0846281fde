"""What of a compiled block's activations takes least to make again in backward."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

FLOPS_PER_BYTE = 150  # that a GPU computes while it moves one: 990 TFLOP/s and 4.8 TB/s, neither of them reached
SMALL = 32  # times fewer bytes


def cheapest(saved: Iterable[fx.Node], results: Iterable[fx.Node], keeps: float) -> list[fx.Node]:
    """Of what would be kept for backward, what to make again so that at most the part `keeps` of its bytes is kept.

    With the products on the way to it, which are not kept either. What leaves the block and what enters it are there
    anyway. Each is made of others that are kept or made again themselves, so the one has no influence on what the other
    takes: bytes that are moved, and what products compute.
    """
    there = {*saved, *results}
    own = [node for node in saved if node.op != "placeholder" and node not in set(results)]
    whole = left = sum(map(_bytes, own))
    ways = {node: _made_of(node, there) for node in own}
    costs = {node: _cost(node, *way) for node, way in ways.items()}
    dropped: dict[fx.Node, None] = {}
    for node in sorted(own, key=lambda node: costs[node] / max(_bytes(node), 1)):  # as they were where they are equal
        if left <= keeps * whole or not math.isfinite(costs[node]):
            break
        steps, _ = ways[node]
        dropped |= dict.fromkeys([node, *filter(_is_product, steps)])
        left -= _bytes(node)
    return list(dropped)


def _cost(node: fx.Node, steps: Iterable[fx.Node], sources: Iterable[fx.Node]) -> float:
    """In bytes that are moved; infinite where an op on the way is another than products and element-wise ones."""
    cost = float(_bytes(node) + sum(map(_bytes, sources)))
    for step in steps:
        if _is_product(step):
            packet: Any = step.target.overloadpacket  # type: ignore[union-attr]
            given = fx.node.map_arg((step.args, step.kwargs), lambda source: source.meta["val"])
            cost += flop_registry[packet](*given[0], **given[1], out_val=step.meta["val"]) / FLOPS_PER_BYTE
            cost += 0 if step is node else 2 * _bytes(step)  # written for those that come after it
        elif not _is_plain(step):
            return math.inf
    return cost


def _made_of(node: fx.Node, there: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The ops between what is there and the node, itself included, and what is there that they read.

    What is small beside the node, such as a norm's means, is as good as there: it is kept in its place.
    """
    steps: dict[fx.Node, None] = {node: None}
    sources: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source in there or source.op == "placeholder" or SMALL * _bytes(source) < _bytes(node):
                sources[source] = None
            elif source not in steps:
                steps[source] = None
                waiting.append(source)
    return list(steps), list(sources)


def _is_product(node: fx.Node) -> bool:
    """Of which torch knows how much it computes: attention too, but that has several results, and taking one is not."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in flop_registry


def _is_plain(node: fx.Node) -> bool:
    """Element-wise, and the same each time."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    tags = node.target.tags
    return node.target.is_view or (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
