"""Batch norm in compiled blocks: a line in each value, whose coefficients are found once per channel.

torch's kernels read mean, deviation, weight and bias at every value, in backward what is added up too. Where two norms
are in one kernel it waits for these reads, from the cache, longer than for the values, from memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._inductor.decomposition import select_decomp_table

from pipeline.runtime.compiler.materialised import written

FORWARD = torch.ops.aten._native_batch_norm_legit_functional.default
BACKWARD = torch.ops.aten.native_batch_norm_backward.default
COARSE = {torch.bfloat16, torch.float16}  # such values are rounded to more than a line loses


def decompositions() -> dict[Any, Any]:
    """What ops are made of: as torch knows it, but for these two."""
    return {**select_decomp_table(), FORWARD: _forward, BACKWARD: _backward}


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    result, mean, inverse, *running = decomposition_table[FORWARD](
        x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    if training and x.dtype in COARSE:
        wide = x.float()
        var, middle = torch.var_mean(wide, _dims(x), correction=0, keepdim=True)  # found above too, and made once
        deviation = torch.rsqrt(var + eps)
        factor = written(deviation if weight is None else deviation * weight.view(middle.shape))
        summand = written(-middle * factor if bias is None else bias.view(middle.shape) - middle * factor)
        result = (wide * factor + summand).to(x.dtype)
        mean, inverse = middle.flatten(), deviation.flatten()  # on a CPU torch has them as coarse as the values
    return result, mean, inverse, *running


def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    training: bool,
    eps: float,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """With d = x - mean: dx = a * (dy - sum(dy) / n - d * inverse² * sum(dy * d) / n), a = weight * inverse."""
    if not training or x.dtype not in COARSE:
        statistics = running_mean, running_var, mean, inverse
        others: tuple[Tensor | None, ...] = decomposition_table[BACKWARD](
            gradient, x, weight, *statistics, training, eps, wanted
        )
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
