"""The initial values of a module, one parameter at a time, without memory for all of them.

`Initial(build)` runs the user's constructor as it is, on ordinary tensors, and keeps a tape of what fills them. Memory
that was not used lately is given back in the meantime (its storage has no bytes for a while) and is filled again, from
the tape, when something reads it; so whatever the constructor does with values it does with the true ones. What lies
around is bounded by a few times the largest tensor. `values` then fills one parameter after another.

| the constructor                                      | what happens                                                 |
|------------------------------------------------------|--------------------------------------------------------------|
| runs an op on tensors                                | their memory is filled first; a write goes on the tape       |
| asks for a pointer, a list, an array on the memory   | the memory is filled first, and stays                        |
| reads what may be filled elsewhere (numpy)           | its content goes on the tape, each time that it has changed  |
| does what the tape cannot hold                       | all is filled and stays from then on, and `whole` says why   |
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.pipeline.runtime.step.tape import EMPTY, OVERWRITE, MemoryView, Tape, TapeEntry, TapeMemory

ROOM = 1.5  # memory that was used before the current op, in sizes of the largest: what trunc_normal_ goes back to
SMALL = 1 << 16  # bytes that are not worth giving back
GIVEN = 1 << 26  # bytes of content from elsewhere that the tape holds at most
# They look into memory without an op; through what some of them return it may be written, too.
LOOKS = frozenset(("__deepcopy__", "__reduce_ex__", "data_ptr", "tolist"))
HANDS_OUT = frozenset(
    ("__array__", "__dlpack__", "_typed_storage", "numpy", "share_memory_", "storage", "untyped_storage")
)

States = list[tuple[torch.Generator, Tensor]]  # of the generators that an op may draw from, before it


class Initial:
    """The module that `build` gives, and its values when they are asked for; the generators are as `build` left them.

    `whole` says why all of it is in memory, or nothing.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._keeper = _Keeper()
        with _Looks(self._keeper), self._keeper:
            self.module = build()
        self.whole = self._keeper.whole

    def values(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Each of these tensors of the module in turn, filled until the next is asked for."""
        for tensor in tensors:
            with self._keeper.filled(tensor):
                yield tensor.detach()


class BuiltModule:
    """As `Initial`, for a rank that has all of the module: built as it is, which draws every number once."""

    whole = ""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.module = build()

    def values(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        return (tensor.detach() for tensor in tensors)


class _Looks(TorchFunctionMode):
    """Fills the memory that is looked into without an op."""

    def __init__(self, keeper: _Keeper) -> None:
        super().__init__()
        self.keeper = keeper

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in LOOKS or name in HANDS_OUT:
            with torch._C.DisableTorchFunction():
                tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                self.keeper.pin(tensors, shared=name in HANDS_OUT)
        return func(*args, **(kwargs or {}))


class _Unknown(Exception):
    """The tape cannot hold this."""


class _Keeper(TorchDispatchMode):
    """Keeps the tape, and as much of the memory as there is room for."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self.known: dict[int, TapeMemory] = {}  # by the address of the storage
        self.filled_ones: dict[TapeMemory, None] = {}  # that may be given back, least recently used first
        self.largest = 0
        self.given_bytes = 0
        self.busy = False  # with what is no op of the constructor's
        self.whole = ""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not self.whole:
            self._make_room(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.whole or self.busy or func._schema.name == "aten::set_":  # that looks at other memory and writes none
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            try:
                views = self._before(func, args, kwargs)
            except _Unknown as reason:
                self.keep_all(str(reason))
                return func(*args, **kwargs)
            given = kwargs.get("generator")
            generators = [torch.default_generator, *([given] if given is not None else [])]
            states = [(generator, generator.get_state()) for generator in generators]
            result = func(*args, **kwargs)
            try:
                self._after(func, args, kwargs, views, states, result)
            except _Unknown as reason:
                self.keep_all(str(reason))
            return result

    # -- ops ----------------------------------------------------------------------------------------------------------

    def _before(self, func: Any, args: Any, kwargs: Any) -> dict[int, MemoryView]:
        """What an op needs is filled; its tensors as views, by their ids."""
        views = {id(leaf): self._view(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        written, target = _written(func, args, kwargs, views)
        used = {view.memory for view in views.values()}
        self._make_room(ROOM * self.largest, used)
        for memory in used:
            if not memory.writers or memory.given is not None:
                self._take_given(memory, memory in written)
            self._fill(memory, empty=memory is target)
        return views

    def _after(
        self, func: Any, args: Any, kwargs: Any, views: dict[int, MemoryView], states: States, result: Any
    ) -> None:
        """An op that has written or made something goes on the tape."""
        used = {view.memory for view in views.values()}
        makes = self._made(result, used)
        new = [view.memory for view in makes if view is not None]
        written, target = _written(func, args, kwargs, views)
        if not written and not new:
            return
        storages = [(memory.storage(), memory.nbytes) for memory in used]
        if any(storage is not None and storage.nbytes() != nbytes for storage, nbytes in storages):
            raise _Unknown("an op that resizes a tensor")
        args, kwargs = (tree_map(lambda value: views.get(id(value), value), part) for part in (tuple(args), kwargs))
        reads = tuple(dict.fromkeys(view.memory for view in views.values() if view.memory is not target))
        drawn = tuple((g, state) for g, state in states if not torch.equal(g.get_state(), state))
        number, default = len(self.tape.entries), torch.get_default_dtype()
        entry = TapeEntry(number, func, args, kwargs, reads, target, makes, drawn, default)
        self.tape.add(entry, dict.fromkeys([*written, *new]))
        for memory in new:
            self._drop(memory) if func._schema.name in EMPTY else self._note_use(memory)

    def _view(self, tensor: Tensor) -> MemoryView:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise _Unknown(f"a tensor on {tensor.device}, {tensor.layout}")
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or tensor.is_quantized:
            raise _Unknown(f"a tensor of {type(tensor).__name__}")
        storage = tensor.untyped_storage()
        memory = self.known.get(storage._cdata)
        if memory is None:
            memory = self.known[storage._cdata] = TapeMemory(storage)
            self.largest = max(self.largest, memory.nbytes)
        return MemoryView(memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def _made(self, result: Any, before: set[TapeMemory]) -> tuple[MemoryView | None, ...]:
        """The results that have new memory."""
        results = result if isinstance(result, tuple | list) else (result,)
        if any(isinstance(leaf, Tensor) for r in results if not isinstance(r, Tensor) for leaf in tree_leaves(r)):
            raise _Unknown("an op with lists of results")
        views = [self._view(r) if isinstance(r, Tensor) else None for r in results]
        return tuple(view if view is not None and view.memory not in before else None for view in views)

    def _take_given(self, memory: TapeMemory, written: bool) -> None:
        """Content from elsewhere goes on the tape, again where it has changed since."""
        storage = memory.storage()
        assert storage is not None
        view = MemoryView(memory, torch.uint8, (memory.nbytes,), (1,), 0)
        content = view.on(storage)
        if memory.given is None or not torch.equal(content, memory.given):
            self.given_bytes += memory.nbytes
            if self.given_bytes > GIVEN:
                raise _Unknown("large tensors that were filled elsewhere")
            memory.given = content.clone()
            number = len(self.tape.entries)
            entry = TapeEntry(number, Tensor.copy_, (view, memory.given), {}, (), memory, (), (), torch.float32)
            self.tape.add(entry, [memory])
        if written:
            if memory.shared or not storage.resizable():
                raise _Unknown("a tensor that is written through and beside torch")
            memory.given = None  # from here on it is the tape's

    # -- memory -------------------------------------------------------------------------------------------------------

    def _note_use(self, memory: TapeMemory) -> None:
        self.filled_ones.pop(memory, None)
        if not memory.pinned and memory.nbytes > SMALL:
            self.filled_ones[memory] = None

    def _fill(self, memory: TapeMemory, empty: bool = False) -> None:
        if memory.dropped:
            storage = memory.storage()
            assert storage is not None
            storage.resize_(memory.nbytes)
            memory.dropped = False
            if not empty:
                self.tape.make(memory, storage)
        if memory.writers and memory.given is None:
            self._note_use(memory)

    def _drop(self, memory: TapeMemory) -> None:
        storage = memory.storage()
        self.filled_ones.pop(memory, None)
        if storage is not None and not memory.pinned and memory.nbytes > SMALL:
            storage.resize_(0)
            memory.dropped = True

    def _make_room(self, room: float, needed: Container[TapeMemory] = ()) -> None:
        """Gives back what was not used lately until the rest has room."""
        for memory in [m for m in self.filled_ones if m.reference.expired()]:
            del self.filled_ones[memory]
        others = [memory for memory in self.filled_ones if memory not in needed]
        total = sum(memory.nbytes for memory in others)
        for memory in others:
            if total <= room:
                break
            self._drop(memory)
            total -= memory.nbytes

    def pin(self, tensors: Iterable[Tensor], shared: bool) -> None:
        """Filled, and never given back; shared: it may be written elsewhere from now on."""
        if self.whole:
            return
        self.busy = True
        try:
            for memory in [self._view(tensor).memory for tensor in tensors]:
                self._fill(memory)
                self.filled_ones.pop(memory, None)
                memory.pinned = True
                if shared:
                    memory.shared = True
                    self._take_given(memory, written=False)
        except _Unknown as reason:
            self.keep_all(str(reason))
        finally:
            self.busy = False

    def keep_all(self, reason: str) -> None:
        self.whole = reason
        for memory in self.known.values():
            if memory.dropped and not memory.reference.expired():
                self._fill(memory)

    @contextmanager
    def filled(self, tensor: Tensor) -> Iterator[None]:
        """In it the tensor's memory is filled; after it, it is given back where it was before."""
        memory = self.known.get(tensor.untyped_storage()._cdata)
        if memory is None:
            yield
            return
        was_dropped = memory.dropped
        self._fill(memory)
        try:
            yield
        finally:
            if was_dropped:
                self._drop(memory)


def _written(
    func: Any, args: Any, kwargs: Any, views: dict[int, MemoryView]
) -> tuple[list[TapeMemory], TapeMemory | None]:
    """What memory an op writes, and what it writes all of without reading it."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [views[id(leaf)].memory for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if func._schema.name not in OVERWRITE:
        return written, None
    target = views[id(args[0])]
    others = (views[id(leaf)] for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor))
    alone = target.whole() and all(view.memory is not target.memory for view in others)
    return written, target.memory if alone else None
