"""Parameters of which backward keeps the shard alone: what ops keep of a gathered copy is replaced by how to make it.

`again` runs a conversion and notes how its result was made. Inside `keep_shards` autograd keeps that note in place of
the result and of any view of it, so the copy goes when the link's function returns; backward makes it once more for the
first op that asks, and lets go of it when its gradient is there. Where one conversion follows another, the note goes
back to what is stored.

Recompute regions have hooks of their own on what autograd keeps, and autograd asks the innermost alone: `keep_shards`
passes on to the hooks around it what it does not replace. A region enters it on both its runs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.runtime.collectives import all_gather


class _Note:
    """How a tensor was made, from a tensor that is there anyway or from a view of what another note makes."""

    def __init__(self, source: Tensor | _Kept, move: Callable[[Tensor], Tensor]) -> None:
        self.source, self.move = source, move
        self.made: Tensor | None = None  # by backward, for as long as its ops need it

    def make(self) -> Tensor:
        source = self.source.make() if isinstance(self.source, _Kept) else self.source
        with torch.no_grad():
            return self.move(source)

    def whole(self) -> Tensor:
        if self.made is None:
            self.made = self.make()
        return self.made

    def forget(self, gradient: Tensor) -> None:
        self.made = None


class _Kept:
    """What is kept in place of a tensor: the note, and which view of the result it was."""

    def __init__(self, note: _Note, tensor: Tensor) -> None:
        self.note, self.view = note, (tensor.size(), tensor.stride(), tensor.storage_offset())

    def tensor(self) -> Tensor:
        return self.note.whole().as_strided(*self.view)

    def make(self) -> Tensor:
        return self.note.make().as_strided(*self.view)


_notes: dict[int, _Note] = {}  # by where the result lies in memory, for as long as it lives


def again(conversion: Callable[..., Tensor], x: Tensor, **arguments: Any) -> Tensor:
    """The conversion; inside `keep_shards` its result is dropped after the forward pass and made again in backward."""
    result = conversion(x, **arguments)
    place, before = result.untyped_storage().data_ptr(), x.untyped_storage().data_ptr()
    if place not in (0, before):  # on an axis of one rank nothing is made, and a piece of the first dim is a view
        source = _Kept(_notes[before], x) if before in _notes else x.detach()
        note = _Note(source, partial(conversion, **arguments))
        _notes[place] = note
        weakref.finalize(result, _notes.pop, place, None)
        if result.requires_grad:
            result.register_hook(note.forget)
    return result


def regather(x: Tensor, axis: str, dim: int, parts: int = 1) -> Tensor:
    """S(dim) -> B, gathered again in backward"""
    return again(all_gather, x, axis=axis, dim=dim, parts=parts)


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
        note = _notes.get(tensor.untyped_storage().data_ptr()) if _notes else None
        return pack(tensor) if note is None else _Kept(note, tensor)

    def give(kept: Any) -> Tensor:
        return kept.tensor() if isinstance(kept, _Kept) else unpack(kept)

    _depth.value += 1
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            yield
    finally:
        _depth.value -= 1
