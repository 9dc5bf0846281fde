"""What a compiled block writes to memory once, because the kernels that read it would each make it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.lowering import clone, register_lowering

ATEN = torch.ops.aten
_LIBRARY = torch.library.Library("shardwright", "DEF")
_LIBRARY.define("written(Tensor x) -> Tensor")
_LIBRARY.impl("written", Tensor.clone, "CompositeExplicitAutograd")
_LIBRARY.impl("written", torch.empty_like, "Meta")
written = torch.ops.shardwright.written.default


@register_lowering(written, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _in_memory(x: Any) -> object:
    """Kernels read it where it is; a copy of it, should both leave the block, is a tensor of its own."""
    x.realize()
    return clone(x)


def write_once(graph: fx.Graph) -> None:
    """Gradients that are added up and masked by a relu's result.

    A norm's backward reads what it is given in two kernels, one that adds up and one that scales: both would read each
    of the sum's terms and the result.
    """
    for masked in graph.find_nodes(op="call_function", target=ATEN.where.self):
        mask, _, gradient = masked.args
        added = isinstance(gradient, fx.Node) and gradient.target is ATEN.add.Tensor
        if added and mask.target is ATEN.le.Scalar and len(_readers(masked)) > 1:
            with graph.inserting_after(masked):
                own = graph.call_function(written, (masked,))
            own.meta = dict(masked.meta)
            masked.replace_all_uses_with(own, delete_user_cb=lambda reader, own=own: reader is not own)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Also of what it is in another precision."""
    readers = list(node.users)
    if len(readers) == 1 and readers[0].target is torch.ops.prims.convert_element_type.default:
        return _readers(readers[0])
    return readers
