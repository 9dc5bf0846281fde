"""A tape of the ops that fill tensors, from which the content of any memory is made again.

The tape knows memory (`TapeMemory`), not tensors: a view is a way to look at it (`MemoryView`). An op is on it if it
writes memory or makes new; views and reads are not. The content of memory at some moment is that of the ops that wrote
it before, back to the last one that wrote all of it without reading it, and of what those ops read (`needed`). A random
op is on the tape with the state that its generator had, so it draws the same numbers again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

# They write their first argument whatever it held.
_FILLS = ("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal", "normal", "random")
OVERWRITE = frozenset(f"aten::{name}_" for name in (*_FILLS, "uniform", "zero"))
EMPTY = frozenset(("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"))


class TapeMemory:
    """What lies behind one or more tensors."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.reference = StorageWeakRef(storage)  # while it lives, no other storage has this address
        self.nbytes = storage.nbytes()
        self.writers: list[TapeEntry] = []  # in order; none: it is not of the tape's making
        self.given: Tensor | None = None  # of memory that was filled elsewhere: its content when it was last read
        self.dropped = False  # its storage has no bytes
        self.pinned = False  # it is never given back
        self.shared = False  # it may be written without an op

    def storage(self) -> torch.UntypedStorage | None:
        """None where the tensors are gone."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        return found


@dataclass(frozen=True)
class MemoryView:
    """How a tensor lies in its memory."""

    memory: TapeMemory
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    def whole(self) -> bool:
        """Whether it is all of its memory, each element once."""
        expected = count = 1
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=lambda pair: pair[1]):
            count *= size
            if size > 1 and stride != expected:
                return False
            expected *= size
        return bool(count * self.dtype.itemsize == self.memory.nbytes)


@dataclass(frozen=True, eq=False)
class TapeEntry:
    """An op on the tape; its arguments have views in place of tensors."""

    number: int
    function: Any  # of torch
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[TapeMemory, ...]
    overwrites: TapeMemory | None  # written whatever it held
    makes: tuple[MemoryView | None, ...]  # of each result that has new memory
    states: tuple[tuple[torch.Generator, Tensor], ...]  # of the generators it draws from, before
    dtype: torch.dtype  # the default one


class Tape:
    def __init__(self) -> None:
        self.entries: list[TapeEntry] = []

    def add(self, entry: TapeEntry, writes: Iterable[TapeMemory]) -> None:
        self.entries.append(entry)
        for memory in writes:
            memory.writers.append(entry)

    def needed(self, memory: TapeMemory) -> list[TapeEntry]:
        """The entries that make its content, in order."""
        found: set[TapeEntry] = set()
        seen: set[tuple[TapeMemory, int]] = set()
        todo = [(memory, len(self.entries))]
        while todo:
            wanted, before = todo.pop()
            if (wanted, before) in seen:
                continue
            seen.add((wanted, before))
            for entry in reversed(wanted.writers):
                if entry.number >= before:
                    continue
                if entry not in found:
                    found.add(entry)
                    todo += [(read, entry.number) for read in entry.reads if read is not wanted]
                if entry.overwrites is wanted:
                    break
        return sorted(found, key=lambda entry: entry.number)

    def make(self, memory: TapeMemory, storage: torch.UntypedStorage) -> None:
        """Puts its content into a storage of its size; generators are left as they were."""
        filled: dict[TapeMemory, torch.UntypedStorage] = {memory: storage}
        entries = self.needed(memory)
        last: dict[TapeMemory | None, TapeEntry] = {}  # memory -> the entry that is the last to need it
        for entry in entries:
            made = [view.memory for view in entry.makes if view is not None]
            last |= dict.fromkeys((*entry.reads, *made, entry.overwrites), entry)
        used = {id(generator): generator for entry in entries for generator, _ in entry.states}
        before = [(generator, generator.get_state()) for generator in used.values()]
        default = torch.get_default_dtype()
        try:
            with torch.no_grad():
                for entry in entries:
                    _perform(entry, filled, memory)
                    for done in [m for m in filled if m is not memory and last.get(m) is entry]:
                        del filled[done]
        finally:
            torch.set_default_dtype(default)
            for generator, state in before:
                generator.set_state(state)


def _perform(entry: TapeEntry, filled: dict[TapeMemory, torch.UntypedStorage], target: TapeMemory) -> None:
    def storage(memory: TapeMemory) -> torch.UntypedStorage:
        if memory not in filled:
            filled[memory] = torch.UntypedStorage(memory.nbytes)
        return filled[memory]

    def real(value: Any) -> Any:
        return value.on(storage(value.memory)) if isinstance(value, MemoryView) else value

    if entry.makes and entry.function._schema.name in EMPTY:
        return  # the memory is taken when it is first written
    for generator, state in entry.states:
        generator.set_state(state)
    torch.set_default_dtype(entry.dtype)
    result = entry.function(*tree_map(real, entry.args), **tree_map(real, entry.kwargs))
    for view, made in zip(entry.makes, result if isinstance(result, tuple | list) else (result,), strict=False):
        if view is None:
            continue
        same = (tuple(made.shape), made.stride(), made.storage_offset()) == (view.size, view.stride, view.offset)
        own = made.untyped_storage()
        if view.memory is not target and same and own.nbytes() == view.memory.nbytes:
            filled[view.memory] = own
        else:
            view.on(storage(view.memory)).copy_(made)
