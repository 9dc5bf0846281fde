"""Our changes to what a compiled block computes: the same values, in fewer reads and writes of memory.

| change           | what torch does                                              | here                               |
|------------------|--------------------------------------------------------------|------------------------------------|
| `pad_once`       | pads what each product of odd sizes reads                    | pads it once                       |
| `sum_up`         | finds variances by Welford's way, which divides each time    | adds up, as fast as a GPU reads    |
| `write_once`     | makes a masked sum of gradients in each kernel that reads it | writes it to memory once           |
| `decompositions` | batch norm reads four statistics at every value              | a line, whose coefficients are two |
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import clone, register_lowering

ATEN = torch.ops.aten
MANY = 4096  # values of a mean: below, torch has all of them at hand and goes over them twice
FORWARD = ATEN._native_batch_norm_legit_functional.default
BACKWARD = ATEN.native_batch_norm_backward.default
COARSE = {torch.bfloat16, torch.float16}  # such values are rounded to more than a line loses


def _call(like: fx.Node, target: Any, *arguments: Any) -> fx.Node:
    """A call in the node's place."""
    made = like.graph.call_function(target, arguments)
    values: Any = fx.node.map_arg(arguments, lambda source: source.meta["val"])
    made.meta = like.meta | {"val": target(*values)}
    return made


# ------------------------------------------------------------------------------------------------------------- padding


def pad_once(graph: fx.Graph) -> None:
    """A matrix and its transpose: torch pads what each product reads, and a head's gradient is read by two."""
    known: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
    for pad in graph.find_nodes(op="call_function", target=ATEN.constant_pad_nd.default):
        matrix, amounts, *value = pad.args
        if len(amounts) != 4 or value:
            continue
        turned = False
        while _is_transpose(matrix):
            (matrix, _), turned = matrix.args, not turned
        amounts = (*amounts[2:], *amounts[:2]) if turned else tuple(amounts)
        with graph.inserting_before(pad):
            if (matrix, amounts) not in known:
                known[matrix, amounts] = _call(pad, pad.target, matrix, list(amounts))
            own = known[matrix, amounts]
            own = _call(pad, ATEN.permute.default, own, [1, 0]) if turned else own
        pad.replace_all_uses_with(own)
        graph.erase_node(pad)


def _is_transpose(node: fx.Node) -> bool:
    return node.target is ATEN.permute.default and list(node.args[1]) == [1, 0]


# ------------------------------------------------------------------------------------------------- means and variances


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
            made = partial(_call, node)
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


# ----------------------------------------------------------------------------------- what is written to memory once

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


# --------------------------------------------------------------------------------------------------------- batch norm
# torch's kernels read mean, deviation, weight and bias at every value, in backward what is added up too. Where two
# norms are in one kernel it waits for these reads, from the cache, longer than for the values, from memory.


def decompositions() -> dict[Any, Any]:
    """What ops are made of: as torch knows it, but for these two."""
    return {**select_decomp_table(), FORWARD: _forward, BACKWARD: _backward}


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """`rest`: running mean and variance, training, momentum, eps."""
    _, _, training, _, eps = rest
    result, mean, inverse, *running = decomposition_table[FORWARD](x, weight, bias, *rest)
    if training and x.dtype in COARSE:
        wide = x.float()
        var, middle = torch.var_mean(wide, _dims(x), correction=0, keepdim=True)  # found above too, and made once
        deviation = torch.rsqrt(var + eps)
        factor = written(deviation if weight is None else deviation * weight.view(middle.shape))
        summand = written(-middle * factor if bias is None else bias.view(middle.shape) - middle * factor)
        result = (wide * factor + summand).to(x.dtype)
        mean, inverse = middle.flatten(), deviation.flatten()  # on a CPU torch has them as coarse as the values
    return result, mean, inverse, *running


def _backward(gradient: Tensor, x: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor | None, ...]:
    """With d = x - mean: dx = a * (dy - sum(dy) / n - d * inverse² * sum(dy * d) / n), a = weight * inverse.

    `rest`: running mean and variance, the batch's mean and inverse deviation, training, eps, which gradients to make.
    """
    _, _, mean, inverse, training, _, wanted = rest
    if not training or x.dtype not in COARSE:
        others: tuple[Tensor | None, ...] = decomposition_table[BACKWARD](gradient, x, weight, *rest)
        return others
    dims, shape = _dims(x), [1, -1] + [1] * (x.dim() - 2)
    wide, given = x.float(), gradient.float()
    middle, inverse = mean.float().view(shape), inverse.float().view(shape)
    total = given.sum(dims, keepdim=True)
    along = (given * (wide - middle)).sum(dims, keepdim=True)
    count = math.prod(x.shape[dim] for dim in dims)
    of_gradient = inverse if weight is None else inverse * weight.view(shape)
    of_value = written(-of_gradient * inverse.square() * along / count)
    summand = written(-of_gradient * total / count - of_value * middle)
    own = (given * written(of_gradient) + wide * of_value + summand).to(x.dtype)
    dtype = x.dtype if weight is None else weight.dtype
    found = own, (along * inverse).flatten().to(dtype), total.flatten().to(dtype)
    return tuple(one if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True))


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
