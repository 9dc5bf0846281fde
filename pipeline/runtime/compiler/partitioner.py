"""What a compiled block keeps for backward, and what of it takes least to make again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from shardwright.pipeline.runtime.compiler import graph_passes, host_calls
from shardwright.pipeline.runtime.compiler.graph_passes import decompositions, pad_once, sum_up, write_once

FLOPS_PER_BYTE = 150  # that a GPU computes while it moves one: 990 TFLOP/s and 4.8 TB/s, neither of them reached
SMALL = 32  # times fewer bytes
AS_MARKED = {  # torch's reasons to keep what is not marked, on the way to what is
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}


def graph_compiler(keeps: float, cheapest: bool) -> Callable[..., Any]:
    """What compiles a block's graph; `masked`: the gradient of its result has been, by the next block.

    Backward is compiled here too, not when it first runs: torch 2.11 forgets by then that calls are in C++, and a
    compiler that fails would end the step.

    Products of odd sizes are padded, always (without it they take several times as long): torch would time which is
    faster, and might do what takes more memory than the plan was made for, on one rank and not on another. Convolutions
    of single pixels are products, and a GPU's are faster as such.
    """
    from torch._inductor.compile_fx import compile_fx  # warns when it is imported

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any], masked: bool, in_cpp: bool) -> Any:
        partitioner, budget = Partitioner(masked, keeps if cheapest else None), 1.0 if cheapest else keeps
        with (
            config.patch(activation_memory_budget=budget, force_non_lazy_backward_lowering=True),
            inductor.patch(custom_partitioner_fn=partitioner, cpp_wrapper=in_cpp, force_shape_pad=True),
            inductor.patch(conv_1x1_as_mm=host_calls.on_card(inputs)),
        ):
            return compile_fx(graph, inputs, decompositions=decompositions())

    return compile_graph


class Partitioner(CustomPartitionerFn):  # type: ignore[misc]
    """What torch would keep for backward, but for masks that can be read off a result (where it is not above zero).

    The next block keeps the result anyway. torch sees one block alone, where a mask is smaller. With `before_relu` the
    gradient of the first result, a relu's, has been masked by the next block: here it is used as it comes. What several
    products need with the same padding is padded once. With `cheapest`, the part of its bytes that is kept, the rest is
    what takes least to make again.
    """

    def __init__(self, before_relu: bool = False, cheapest: float | None = None) -> None:
        self.before_relu, self.cheapest = before_relu, cheapest

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[object], **named: Any) -> Any:
        named = {"compiler": "inductor"} | named
        (end,) = graph.graph.find_nodes(op="output")
        pad_once(graph.graph)
        sum_up(graph.graph)
        write_once(graph.graph)
        if self.before_relu:
            _use_as_it_comes(graph.graph, end.args[0][0])
        results = [result for result in end.args[0][: named["num_fwd_outputs"]] if isinstance(result, fx.Node)]
        for mask in [mask for result in results for mask in _masks(result)]:
            mask.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        if self.cheapest is None:
            return min_cut_rematerialization_partition(graph, inputs, **named)
        saved = _saved(graph, inputs, named)
        for node in saved:
            if node.op != "placeholder":
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in cheapest(saved, results, self.cheapest):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        for node in graph.graph.nodes:
            node.meta.setdefault("ac_graph_id", 0)  # of one region: else what enters a marked node would be kept too
        with config.patch(AS_MARKED):
            return min_cut_rematerialization_partition(graph, inputs, **named)

    def uuid(self) -> bytes:
        """What torch's caches know its work by: also another version of it would do something else."""
        digest: bytes = get_hash_for_files((__file__, graph_passes.__file__), f"{self.before_relu} {self.cheapest}")
        return digest


def _saved(graph: fx.GraphModule, inputs: Sequence[object], named: dict[str, Any]) -> list[fx.Node]:
    """What torch would keep; of views, what they are views of."""
    copied = fx.Graph()
    (end,) = graph.graph.find_nodes(op="output")
    copied.output(copied.graph_copy(graph.graph, {})).meta = dict(end.meta)
    forward, _ = min_cut_rematerialization_partition(fx.GraphModule(graph, copied), inputs, **named)
    (end,) = forward.graph.find_nodes(op="output")
    names = {node.name for node in end.args[0][named["num_fwd_outputs"] :] if isinstance(node, fx.Node)}
    return list(dict.fromkeys(_viewed(node) for node in graph.graph.nodes if node.name in names))


def _viewed(node: fx.Node) -> fx.Node:
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _use_as_it_comes(graph: fx.Graph, result: fx.Node) -> None:
    """The gradient of the result, where it is masked by the result: `where(result <= 0, 0, gradient)`."""
    own = next(node for node in graph.find_nodes(op="placeholder") if node.target.startswith("tangents"))
    for mask in _masks(result):
        for masked in [reader for reader in mask.users if reader.target is torch.ops.aten.where.self]:
            _, _, gradient = masked.args
            if gradient is own:
                masked.replace_all_uses_with(gradient)
                graph.erase_node(masked)


def _masks(result: fx.Node) -> list[fx.Node]:
    """That are read off the result alone."""
    own = [reader for reader in result.users if reader.all_input_nodes == [result]]
    return [mask for mask in own if isinstance(v := mask.meta.get("val"), Tensor) and v.dtype == torch.bool]


# --------------------------------------------------------------------------------------- what takes least to make again


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
