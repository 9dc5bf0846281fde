"""What a compiled block keeps for backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from pipeline.runtime.compiler import batch_norm, materialised, padding, rematerialisation, variance
from pipeline.runtime.compiler.materialised import write_once
from pipeline.runtime.compiler.padding import pad_once
from pipeline.runtime.compiler.rematerialisation import cheapest
from pipeline.runtime.compiler.variance import sum_up

AS_MARKED = {  # torch's reasons to keep what is not marked, on the way to what is
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}


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
        for result in results:
            for reader in result.users:
                if _is_mask(reader) and reader.all_input_nodes == [result]:
                    reader.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        if self.cheapest is None:
            return min_cut_rematerialization_partition(graph, inputs, **named)
        saved = _saved(graph, inputs, named)
        _mark(graph.graph, saved, cheapest(saved, results, self.cheapest))
        with config.patch(AS_MARKED):
            return min_cut_rematerialization_partition(graph, inputs, **named)

    def uuid(self) -> bytes:
        """What torch's caches know its work by: also another version of it would do something else."""
        files = (
            __file__,
            *(module.__file__ for module in (padding, rematerialisation, batch_norm, variance, materialised)),
        )
        digest: bytes = get_hash_for_files(files, f"{self.before_relu} {self.cheapest}")
        return digest


def _saved(graph: fx.GraphModule, inputs: Sequence[object], named: dict[str, Any]) -> list[fx.Node]:
    """What torch would keep; of views, what they are views of."""
    forward, _ = min_cut_rematerialization_partition(fx.GraphModule(graph, _copy(graph.graph)), inputs, **named)
    (end,) = forward.graph.find_nodes(op="output")
    names = {node.name for node in end.args[0][named["num_fwd_outputs"] :] if isinstance(node, fx.Node)}
    return list(dict.fromkeys(_viewed(node) for node in graph.graph.nodes if node.name in names))


def _viewed(node: fx.Node) -> fx.Node:
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    (end,) = graph.find_nodes(op="output")
    copied.output(copied.graph_copy(graph, {})).meta = dict(end.meta)
    return copied


def _mark(graph: fx.Graph, saved: Sequence[fx.Node], dropped: Sequence[fx.Node]) -> None:
    for node in saved:
        if node.op != "placeholder":
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node in dropped:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for node in graph.nodes:
        node.meta.setdefault("ac_graph_id", 0)  # of one region: else what enters a marked node would be kept too


def _use_as_it_comes(graph: fx.Graph, result: fx.Node) -> None:
    """The gradient of the result, where it is masked by the result: `where(result <= 0, 0, gradient)`."""
    own = next(node for node in graph.find_nodes(op="placeholder") if node.target.startswith("tangents"))
    for mask in [reader for reader in result.users if _is_mask(reader) and reader.all_input_nodes == [result]]:
        for masked in [reader for reader in mask.users if reader.target is torch.ops.aten.where.self]:
            _, _, gradient = masked.args
            if gradient is own:
                masked.replace_all_uses_with(gradient)
                graph.erase_node(masked)


def _is_mask(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.bool
