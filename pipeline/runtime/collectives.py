"""The conversion table as autograd functions on local tensors: each fixes what happens forward and backward.

torch's own functional collectives pair an all-reduce with an all-reduce, which makes the gradient of `P -> R` too
large by the number of ranks; so each pair of the table is written out here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.runtime.mesh import MeshAxis, axis_of

Move = Callable[[Tensor], Tensor]

# torch 2.13 renamed the collectives on one tensor.
all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_from: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Move, backward: Move) -> Tensor:
        ctx.move_back = backward
        y = forward(x)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.move_back(gradients[0]), None, None


def _apply(x: Tensor, forward: Move, backward: Move) -> Tensor:
    result: Tensor = _Pair.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


# Moves of one rank's tensor. Each returns its argument, or a new tensor; none writes into its argument.


def _nothing(x: Tensor) -> Tensor:
    return x


def _sum(axis: MeshAxis) -> Move:
    def move(x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        if axis.size > 1:
            dist.all_reduce(total, group=axis.group)
        return total

    return move


def _join(axis: MeshAxis, dim: int) -> Move:
    def move(x: Tensor) -> Tensor:
        if axis.size == 1:
            return x
        pieces = x.new_empty((axis.size, *x.shape))
        all_gather_into(pieces.view(-1), x.contiguous().view(-1), group=axis.group)
        return pieces.flatten(0, 1) if dim == 0 else torch.cat(pieces.unbind(), dim)

    return move


def _sum_and_split(axis: MeshAxis, dim: int) -> Move:
    def move(x: Tensor) -> Tensor:
        if axis.size == 1:
            return x
        pieces = torch.stack(x.chunk(axis.size, dim))
        own = torch.empty_like(pieces[0])
        reduce_scatter_from(own.view(-1), pieces.view(-1), group=axis.group)
        return own

    return move


def _own_piece(axis: MeshAxis, dim: int) -> Move:
    return lambda x: x.chunk(axis.size, dim)[axis.rank].contiguous()


def _in_zeros(axis: MeshAxis, dim: int) -> Move:
    def move(x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[dim] *= axis.size
        whole = x.new_zeros(shape)
        whole.narrow(dim, axis.rank * x.shape[dim], x.shape[dim]).copy_(x)
        return whole

    return move


def _on_first(axis: MeshAxis) -> Move:
    return lambda x: x if axis.rank == 0 else torch.zeros_like(x)


def _exchange(axis: MeshAxis, split: int, join: int) -> Move:
    def move(x: Tensor) -> Tensor:
        if axis.size == 1:
            return x
        outgoing = torch.stack(x.chunk(axis.size, split))
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=axis.group)
        return torch.cat(incoming.unbind(), join)

    return move


# The conversions, by the names that generated programs use.


def sum_gradient(x: Tensor, axis: str) -> Tensor:
    """R -> B"""
    return _apply(x, _nothing, _sum(axis_of(axis)))


def all_reduce(x: Tensor, axis: str) -> Tensor:
    """P -> R"""
    return _apply(x, _sum(axis_of(axis)), _nothing)


def all_reduce_both(x: Tensor, axis: str) -> Tensor:
    """P -> B"""
    return _apply(x, _sum(axis_of(axis)), _sum(axis_of(axis)))


def all_gather(x: Tensor, axis: str, dim: int) -> Tensor:
    """S(dim) -> B"""
    return _apply(x, _join(axis_of(axis), dim), _sum_and_split(axis_of(axis), dim))


def gather(x: Tensor, axis: str, dim: int) -> Tensor:
    """S(dim) -> R"""
    return _apply(x, _join(axis_of(axis), dim), _own_piece(axis_of(axis), dim))


def reduce_scatter(x: Tensor, axis: str, dim: int) -> Tensor:
    """P -> S(dim)"""
    return _apply(x, _sum_and_split(axis_of(axis), dim), _join(axis_of(axis), dim))


def shard(x: Tensor, axis: str, dim: int) -> Tensor:
    """R -> S(dim)"""
    return _apply(x, _own_piece(axis_of(axis), dim), _join(axis_of(axis), dim))


def narrow(x: Tensor, axis: str, dim: int) -> Tensor:
    """B -> S(dim)"""
    return _apply(x, _own_piece(axis_of(axis), dim), _in_zeros(axis_of(axis), dim))


def pad(x: Tensor, axis: str, dim: int) -> Tensor:
    """S(dim) -> P"""
    return _apply(x, _in_zeros(axis_of(axis), dim), _own_piece(axis_of(axis), dim))


def all_to_all(x: Tensor, axis: str, dim: int, to: int) -> Tensor:
    """S(dim) -> S(to)"""
    return _apply(x, _exchange(axis_of(axis), to, dim), _exchange(axis_of(axis), dim, to))


def mask(x: Tensor, axis: str) -> Tensor:
    """R -> P"""
    return _apply(x, _on_first(axis_of(axis)), _nothing)


def mask_gradient(x: Tensor, axis: str) -> Tensor:
    """B -> R"""
    return _apply(x, _nothing, _on_first(axis_of(axis)))


def mask_both(x: Tensor, axis: str) -> Tensor:
    """B -> P"""
    return _apply(x, _on_first(axis_of(axis)), _on_first(axis_of(axis)))
