"""Parameters of which backward keeps the shard alone: what ops keep of a gathered copy is replaced by how to make it.

`again` runs a conversion and notes how its result was made. Inside `keep_shards` autograd keeps that note in place of
the result and of any view of it, so the copy goes when the link's function returns; backward makes it once more for the
first op that asks, and lets go of it when its gradient is there. Where one conversion follows another, the note goes
back to what is stored.

A link's parameters are gathered together (`regather_together`): one collective forward, one more in backward for those
of which backward needs something, when it asks for the first of them, and one for the gradients of those that become
`B` (large ones by their own: `collectives.Joining`); of what becomes `R` every rank has the whole gradient, and takes
its piece. A copy goes when the last op that needs it is undone. `all_gather_together` is the same where the copies are
kept (ZeRO-2), and waits for them: ahead of time they would lie beside all that forward keeps.

Recompute regions have hooks of their own on what autograd keeps, and autograd asks the innermost alone: `keep_shards`
passes on to the hooks around it what it does not replace. A region enters it on both its runs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.runtime.pipelining.deferred_weight_grads import at_border
from pipeline.runtime.programs.collectives import Joining, Split, mask, mask_both, own_copy, sum_and_split_several
from pipeline.runtime.programs.mesh import MeshAxis, axis_of
from pipeline.runtime.recompute.strided import StridedView
from pipeline.runtime.step import prefetch

ON_FIRST = (mask, mask_both)  # give the first rank what they are given, and others zeros


class _Note:
    """How a tensor was made, from a tensor that is there anyway or from a view of what another note makes."""

    def __init__(self, source: Tensor | _Source, move: Callable[[Tensor], Tensor]) -> None:
        self.source, self.move = source, move
        self.wanted = False
        self.made: Tensor | None = None  # by backward, for as long as its ops need it

    def want(self) -> None:
        """Backward will ask for it: once for each call, and once in all for what it is made from."""
        if not self.wanted and not isinstance(self.source, Tensor):
            self.source.want()
        self.wanted = True

    def take(self) -> Tensor:
        if self.made is None:
            with torch.no_grad():
                self.made = self.move(_taken(self.source))
        return self.made

    def forget(self, gradient: Tensor) -> None:
        self.made = None


@dataclass(frozen=True)
class _Ends:
    """How tensors that are gathered together lie before and after, and on which axis."""

    axis: MeshAxis
    splits: list[Split]
    summed: list[bool]  # gradients: those of `B`, not those of `R`


class _Group:
    """Tensors that are gathered together: how, and what backward needs of them."""

    def __init__(self, sources: Sequence[Tensor | _Source], ends: _Ends, early: bool) -> None:
        """`early`: they may be gathered ahead of time, as they are parameters themselves."""
        self.sources, self.early = sources, early
        self.axis, self.splits, self.summed = ends.axis, ends.splits, ends.summed
        self.wanted = [0] * len(sources)
        self.made: list[Tensor | None] = [None] * len(sources)

    def gather(self, pieces: Sequence[Tensor], numbers: Iterable[int]) -> list[Tensor]:
        splits = [self.splits[n] for n in numbers]
        return prefetch.gather(pieces, splits, self.axis) if self.early else Joining(pieces, splits, self.axis).finish()

    def wholes(self, pieces: list[Tensor]) -> Sequence[Tensor]:
        """For the forward pass."""
        found: Sequence[Tensor] = at_border(pieces, _Together.apply(self, *pieces))  # type: ignore[no-untyped-call]
        return found

    def take(self, number: int) -> Tensor:
        """One of them; when the first is asked for, all that will be are made, and each goes when it is asked for last.

        What is asked for once more, as by a second backward pass, is made once more.
        """
        if self.made[number] is None:
            missing = [
                n for n, wanted in enumerate(self.wanted) if (wanted > 0 or n == number) and self.made[n] is None
            ]
            with torch.no_grad():
                found = self.gather([_taken(self.sources[n]) for n in missing], missing)
            for n, made in zip(missing, found, strict=True):
                self.made[n] = made
        whole = self.made[number]
        assert whole is not None
        self.wanted[number] -= 1
        if self.wanted[number] <= 0:
            self.made[number] = None
        return whole


class _Member:
    """One tensor of a group."""

    def __init__(self, group: _Group, number: int) -> None:
        self.group, self.number = group, number

    def want(self) -> None:
        source = self.group.sources[self.number]
        if not self.group.wanted[self.number] and not isinstance(source, Tensor):
            source.want()
        self.group.wanted[self.number] += 1

    def take(self) -> Tensor:
        return self.group.take(self.number)


class _View:
    """A part of what a note makes, from which another is made."""

    def __init__(self, note: _Source, tensor: Tensor) -> None:
        self.note, self.view = note, StridedView.of(tensor)

    def want(self) -> None:
        self.note.want()

    def take(self) -> Tensor:
        return self.view.on(self.note.take())


_Source = _Note | _Member | _View


def _taken(source: Tensor | _Source) -> Tensor:
    return source if isinstance(source, Tensor) else source.take()


class _Kept:
    """What is kept in place of a tensor: the note, and which view of the result it was."""

    def __init__(self, note: _Source, tensor: Tensor) -> None:
        self.note, self.view = note, StridedView.of(tensor)
        note.want()

    def tensor(self) -> Tensor:
        return self.view.on(self.note.take())


_notes: dict[int, _Source] = {}  # by where the result lies in memory, for as long as it lives


def _remember(result: Tensor, note: _Source) -> None:
    place = _memory(result)
    _notes[place] = note
    weakref.finalize(result, _notes.pop, place, None)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _source_of(x: Tensor) -> Tensor | _Source:
    note = _notes.get(_memory(x))
    return x.detach() if note is None else _View(note, x)


def again(conversion: Callable[..., Tensor], x: Tensor, **arguments: Any) -> Tensor:
    """The conversion; inside `keep_shards` its result is dropped after the forward pass and made again in backward."""
    result = conversion(x, **arguments)
    if conversion in ON_FIRST and _memory(result) == _memory(x) and axis_of(arguments["axis"]).size > 1:
        result = result.clone()  # other ranks make one: all must have the same gathers ahead
    if _memory(result) not in (0, _memory(x)):  # on an axis of one rank nothing is made; a piece of dim 0 is a view
        note = _Note(_source_of(x), partial(conversion, **arguments))
        _remember(result, note)
        if result.requires_grad:
            result.register_hook(note.forget)
    return result


class _Together(torch.autograd.Function):
    """Gathered together; backward has the gradients of all, and sums and splits them together."""

    @staticmethod
    def forward(ctx: Any, group: _Group, *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.shapes = group, [piece.shape for piece in pieces]
        ctx.set_materialize_grads(False)
        wholes = group.gather(pieces, range(len(pieces)))
        ctx.mark_non_differentiable(
            *(w for w, needs in zip(wholes, ctx.needs_input_grad[1:], strict=True) if not needs)
        )
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        group, needs = ctx.group, ctx.needs_input_grad[1:]
        own = [n for n, need in enumerate(needs) if need and not group.summed[n] and gradients[n] is not None]
        found = {n: own_copy(group.axis, *group.splits[n][:2])(gradients[n]) for n in own}
        chosen = [n for n, need in enumerate(needs) if need and group.summed[n]]
        if chosen:
            like = next(gradient for gradient in gradients if gradient is not None)
            whole = [_zeros(like, ctx.shapes[n], group, n) if gradients[n] is None else gradients[n] for n in chosen]
            pieces = sum_and_split_several(whole, [group.splits[n] for n in chosen], group.axis)
            found |= dict(zip(chosen, pieces, strict=True))
        return (None, *(found.get(n) for n in range(len(needs))))


def _zeros(like: Tensor, shape: torch.Size, group: _Group, number: int) -> Tensor:
    """The gradient of what no op has read: every rank brings it, whatever the ranks have read."""
    dim, _, whole = group.splits[number]
    sizes = list(shape)
    sizes[dim] = sizes[dim] * group.axis.size if whole is None else whole
    return like.new_zeros(sizes)


# A tensor with its dim, its parts where there are several, then its size where it is uneven, and "R" where it becomes
# that and not B.
Given = tuple[Tensor | int | str, ...]


def regather_together(*given: Given, axis: str) -> tuple[Tensor, ...]:
    """`regather` of several tensors, or `again(gather)`, by one collective for each dtype."""

    def gathered(pieces: list[Tensor], ends: _Ends) -> Sequence[Tensor]:
        sources = [_source_of(piece) for piece in pieces]
        group = _Group(sources, ends, all(isinstance(source, Tensor) for source in sources))
        wholes = group.wholes(pieces)
        for number, whole in enumerate(wholes):
            _remember(whole, _Member(group, number))
        return wholes

    return _by_dtype(given, axis, gathered)


def all_gather_together(*given: Given, axis: str) -> tuple[Tensor, ...]:
    """`all_gather` of several parameters, or `gather`, by one collective for each dtype."""

    def gathered(pieces: list[Tensor], ends: _Ends) -> Sequence[Tensor]:
        return _Group([piece.detach() for piece in pieces], ends, early=False).wholes(pieces)

    return _by_dtype(given, axis, gathered)


def _by_dtype(
    given: Sequence[Given], axis: str, gathered: Callable[[list[Tensor], _Ends], Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    over = axis_of(axis)
    tensors = [tensor for tensor, *_ in given if isinstance(tensor, Tensor)]
    if over.size == 1:
        return tuple(tensors)
    numbers = [[told for told in own if isinstance(told, int)] for _, *own in given]
    splits = [(dim, rest[0] if rest else 1, rest[1] if len(rest) > 1 else None) for dim, *rest in numbers]
    summed = [own[-1] != "R" for own in given]
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [n for n, tensor in enumerate(tensors) if tensor.dtype == dtype]
        ends = _Ends(over, [splits[n] for n in alike], [summed[n] for n in alike])
        wholes = gathered([tensors[n] for n in alike], ends)
        found |= dict(zip(alike, wholes, strict=True))
    return tuple(found[n] for n in range(len(tensors)))


def regather(x: Tensor, axis: str, dim: int, parts: int = 1, size: int | None = None) -> Tensor:
    """S(dim) -> B, gathered again in backward"""
    (whole,) = regather_together((x, dim, parts) if size is None else (x, dim, parts, size), axis=axis)
    return whole


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def keeping_shards() -> bool:
    return _depth.value > 0


@contextmanager
def keep_shards() -> Iterator[None]:
    """A context for the forward pass: of what `again` makes, backward keeps the note alone."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack, unpack = around or (Tensor.detach, Tensor.detach)

    def keep(tensor: Tensor) -> Any:
        note = _notes.get(_memory(tensor)) if _notes else None
        return pack(tensor) if note is None else _Kept(note, tensor)

    def give(kept: Any) -> Tensor:
        return kept.tensor() if isinstance(kept, _Kept) else unpack(kept)

    _depth.value += 1
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            yield
    finally:
        _depth.value -= 1
