"""Parameters of which backward keeps the shard alone: what ops keep of a gathered copy is replaced by how to make it.

`again` runs a conversion and notes how its result was made. Inside `keep_shards` autograd keeps that note in place of
the result and of any view of it, so the copy goes when the link's function returns; backward makes it once more for the
first op that asks, and lets go of it with the last. Where one conversion follows another, the note goes back to what is
stored.

A link's parameters are gathered together (`regather_together`): one collective forward, one more in backward for those
of which backward needs something, when it asks for the first of them, and one for the gradients of those that become
`B` (large ones by their own: `collectives.Joining`); of what becomes `R` every rank has the whole gradient, and takes
its shard. A copy goes when the last op that needs it is undone. `all_gather_together` is the same where the copies are
kept (ZeRO-2), and waits for them: ahead of time they would lie beside all that forward keeps.

Recompute regions have hooks of their own on what autograd keeps, and autograd asks the innermost alone: `keep_shards`
passes on to the hooks around it what it does not replace. A region enters it on both its runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.pipeline.runtime.context import setting, step
from shardwright.pipeline.runtime.pipelining.deferred_weight_grads import at_border
from shardwright.pipeline.runtime.programs.collectives import (
    Joining,
    Split,
    mask,
    mask_both,
    own_copy,
    sum_and_split_several,
)
from shardwright.pipeline.runtime.programs.mesh import MeshAxis, axis_of

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # on what autograd keeps
ON_FIRST = (mask, mask_both)  # give the first rank what they are given, and others zeros


@dataclass(frozen=True)
class StridedView:
    """How a tensor looks at memory, so that the same can be seen of other memory.

    Also of another type than the memory's: real numbers are looked at as complex ones, and conjugated as read.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @staticmethod
    def of(tensor: Tensor) -> StridedView:
        lies = tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        return StridedView(tensor.dtype, *lies, tensor.is_conj(), tensor.is_neg())

    def on(self, memory: Tensor) -> Tensor:
        if memory.dtype == self.dtype:
            found = memory.as_strided(self.size, self.stride, self.offset)
        else:
            found = torch.empty(0, dtype=self.dtype, device=memory.device)
            found.set_(memory.untyped_storage(), self.offset, self.size, self.stride)
        if found.is_conj() != self.conjugated:
            found = found.conj()
        return torch._neg_view(found) if found.is_neg() != self.negated else found


def memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


# ------------------------------------------------------------------------------------------------------------- sources


class _Remade:
    """Tensors that are made together, each from a tensor that is there anyway or from a view of what was made so."""

    def __init__(
        self, sources: Sequence[Tensor | _ViewOf], make: Callable[[Sequence[Tensor], Sequence[int]], list[Tensor]]
    ) -> None:
        """`make` takes the sources of some of them, and their numbers."""
        self.sources, self.make = sources, make
        self.wanted = [0] * len(sources)
        self.made: list[Tensor | None] = [None] * len(sources)  # by backward, for as long as its ops need them

    def want(self, number: int) -> None:
        """Backward will ask for it: once for each call, and once in all for what it is made from."""
        source = self.sources[number]
        if not self.wanted[number] and isinstance(source, _ViewOf):
            source.want()
        self.wanted[number] += 1

    def take(self, number: int) -> Tensor:
        """One of them; when the first is asked for, all that will be are made, and each goes when it is asked for last.

        What is asked for once more, as by a second backward pass, is made once more.
        """
        if self.made[number] is None:
            asked = {number, *(n for n, wanted in enumerate(self.wanted) if wanted > 0)}
            missing = [n for n in sorted(asked) if self.made[n] is None]
            sources = [self.sources[n] for n in missing]
            with torch.no_grad():
                found = self.make([s if isinstance(s, Tensor) else s.take() for s in sources], missing)
            for n, made in zip(missing, found, strict=True):
                self.made[n] = made
        whole = self.made[number]
        assert whole is not None
        self.wanted[number] -= 1
        if self.wanted[number] <= 0:
            self.made[number] = None
        return whole


GatherSource = tuple[_Remade, int]  # one of them


class _ViewOf:
    """A part of what is made again: another is made from it, or autograd keeps it in place of the tensor."""

    def __init__(self, source: GatherSource, tensor: Tensor) -> None:
        (self.remade, self.number), self.view = source, StridedView.of(tensor)

    def want(self) -> None:
        self.remade.want(self.number)

    def take(self) -> Tensor:
        return self.view.on(self.remade.take(self.number))


def _remember(results: Iterable[Tensor], remade: _Remade) -> None:
    for number, result in enumerate(results):
        place = memory_of(result)
        step.gathered[place] = remade, number
        weakref.finalize(result, step.gathered.pop, place, None)


def _source_of(x: Tensor) -> Tensor | _ViewOf:
    source = step.gathered.get(memory_of(x))
    return x.detach() if source is None else _ViewOf(source, x)


# --------------------------------------------------------------------------------------------- what programs call


def again(conversion: Callable[..., Tensor], x: Tensor, **arguments: Any) -> Tensor:
    """The conversion; inside `keep_shards` its result is dropped after the forward pass and made again in backward."""
    result = conversion(x, **arguments)
    if conversion in ON_FIRST and memory_of(result) == memory_of(x) and axis_of(arguments["axis"]).size > 1:
        result = result.clone()  # other ranks make one: all must have the same gathers ahead
    if memory_of(result) not in (0, memory_of(x)):  # on an axis of one rank nothing is made; a shard of dim 0 is a view
        _remember([result], _Remade([_source_of(x)], lambda shards, _: [conversion(shards[0], **arguments)]))
    return result


@dataclass(frozen=True)
class _GatherGroup:
    """How tensors of one dtype are gathered together."""

    axis: MeshAxis
    splits: list[Split]
    summed: list[bool]  # whether their gradients are: those of `B`, and not those of `R`
    early: bool  # ahead of time if that may be: where backward gathers again, and all are parameters themselves

    def gather(self, shards: Sequence[Tensor], numbers: Iterable[int]) -> list[Tensor]:
        splits = [self.splits[n] for n in numbers]
        if self.early and step.prefetch is not None:
            return step.prefetch.gather(shards, splits, self.axis)
        return Joining(shards, splits, self.axis).finish()


class _Together(torch.autograd.Function):
    """Gathered together; backward has the gradients of all, and sums and splits them together."""

    @staticmethod
    def forward(ctx: Any, group: _GatherGroup, *shards: Tensor) -> tuple[Tensor, ...]:
        wholes = group.gather(shards, range(len(shards)))
        ctx.group, ctx.shapes = group, [whole.shape for whole in wholes]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(w for w, needs in zip(wholes, ctx.needs_input_grad[1:], strict=True) if not needs)
        )
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        group, needs = ctx.group, ctx.needs_input_grad[1:]
        own = [n for n, need in enumerate(needs) if need and not group.summed[n] and gradients[n] is not None]
        found = {n: own_copy(gradients[n], group.axis, *group.splits[n][:2]) for n in own}
        chosen = [n for n, need in enumerate(needs) if need and group.summed[n]]
        if chosen:  # every rank brings a gradient also of what no op has read, whatever the ranks have read
            like = next(gradient for gradient in gradients if gradient is not None)
            whole = [like.new_zeros(ctx.shapes[n]) if gradients[n] is None else gradients[n] for n in chosen]
            shards = sum_and_split_several(whole, [group.splits[n] for n in chosen], group.axis)
            found |= dict(zip(chosen, shards, strict=True))
        return (None, *(found.get(n) for n in range(len(needs))))


# A tensor with its dim, its parts where there are several, then its size where it is uneven, and "R" where it becomes
# that and not B.
Given = tuple[Tensor | int | str, ...]


def regather_together(*given: Given, axis: str) -> tuple[Tensor, ...]:
    """`regather` of several tensors, or `again(gather)`, by one collective for each dtype."""
    return _together(given, axis, drops=True)


def all_gather_together(*given: Given, axis: str) -> tuple[Tensor, ...]:
    """`all_gather` of several parameters, or `gather`, by one collective for each dtype."""
    return _together(given, axis, drops=False)


def _together(given: Sequence[Given], axis: str, drops: bool) -> tuple[Tensor, ...]:
    over = axis_of(axis)
    tensors = [tensor for tensor, *_ in given if isinstance(tensor, Tensor)]
    if over.size == 1:
        return tuple(tensors)
    numbers = [[number for number in own if isinstance(number, int)] for _, *own in given]
    splits = [(dim, rest[0] if rest else 1, rest[1] if len(rest) > 1 else None) for dim, *rest in numbers]
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [n for n, tensor in enumerate(tensors) if tensor.dtype == dtype]
        shards = [tensors[n] for n in alike]
        sources = [_source_of(shard) for shard in shards]
        early = drops and all(isinstance(source, Tensor) for source in sources)
        group = _GatherGroup(over, [splits[n] for n in alike], [given[n][-1] != "R" for n in alike], early)
        wholes = at_border(shards, _Together.apply(group, *shards))  # type: ignore[no-untyped-call]
        if drops:
            _remember(wholes, _Remade(sources, group.gather))
        found |= dict(zip(alike, wholes, strict=True))
    return tuple(found[n] for n in range(len(tensors)))


def regather(x: Tensor, axis: str, dim: int, parts: int = 1, size: int | None = None) -> Tensor:
    """S(dim) -> B, gathered again in backward"""
    (whole,) = regather_together((x, dim, parts) if size is None else (x, dim, parts, size), axis=axis)
    return whole


def hooks_around() -> Hooks:
    """Those in force, or what autograd does without any."""
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found or (Tensor.detach, Tensor.detach)


@contextmanager
def keep_shards() -> Iterator[None]:
    """A context for the forward pass: of what `again` makes, backward keeps how to make it alone."""
    pack, unpack = hooks_around()

    def keep(tensor: Tensor) -> Any:
        source = step.gathered.get(memory_of(tensor)) if step.gathered else None
        if source is None:
            return pack(tensor)
        view = _ViewOf(source, tensor)
        view.want()
        return view

    def give(kept: Any) -> Tensor:
        return kept.take() if isinstance(kept, _ViewOf) else unpack(kept)

    deeper = step.thread.keeping_shards + 1
    with setting(step.thread, keeping_shards=deeper), torch.autograd.graph.saved_tensors_hooks(keep, give):
        yield
