"""In-place ops as plain ones: which value stands for a tensor after it, or a view of it, has been changed.

Every view remembers its parent and the op that made it. To change a view is to make its new content, then to write that
back into each parent up to the tensor that owns the memory (`slice` is undone by `slice_scatter`, a reshape by the
opposite reshape), which thereby gets a new value. Other views of that memory are made again when they are next read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.pipeline.base.errors import TraceError
from shardwright.pipeline.ir.graph import Arg, Args, Ref, TensorType

Emit = Callable[[str, Args, TensorType, str], str]  # (target, arguments, type, name to follow) -> new value

_RESHAPES = ("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "_unsafe_view")
_SAME = ("alias", "detach", "contiguous")


@dataclass(frozen=True)
class _View:
    parent: str
    target: str
    args: Args
    many: bool  # one of several results: it is not made again


class Mutations:
    def __init__(self, types: Callable[[str], TensorType], emit: Emit) -> None:
        self.types, self.emit = types, emit
        self.views: dict[str, _View] = {}
        self.latest: dict[str, str] = {}  # owner of memory, or view made again -> the value that stands for it now
        self.changes: dict[str, int] = {}  # owner -> how often it was changed
        self.seen: dict[str, int] = {}  # view -> how often its owner had been changed when it was made

    def note_view(self, name: str, parent: str, target: str, args: Args, many: bool) -> None:
        self.views[name] = _View(parent, target, args, many)
        self.seen[name] = self.changes.get(self._owner(name), 0)

    def _owner(self, name: str) -> str:
        while name in self.views:
            name = self.views[name].parent
        return name

    def fresh(self, name: str) -> str:
        """The value to read for a name: itself, unless its memory was changed since it was made."""
        owner = self._owner(name)
        if owner == name or self.seen[name] == self.changes.get(owner, 0):
            return self.latest.get(name, name)
        view = self.views[name]
        if view.many:
            raise TraceError(
                f"{view.target} gives shards of a tensor that is changed in place afterwards",
                where="conf/model: module",
                remedy="change it with an out-of-place operation",
            )
        args = Args((Ref(self.fresh(view.parent)), *view.args.positional[1:]), view.args.named)
        again = self.emit(view.target, args, self.types(name), name)
        self.seen[name] = self.changes[owner]
        self.views[again], self.seen[again] = view, self.changes[owner]
        self.latest[name] = again
        return again

    def can_change(self, name: str) -> bool:
        """Whether every step from the name to the owner of its memory can be undone."""
        while name in self.views:
            if _inverse(self.views[name], self.types(self.views[name].parent), "", "") is None:
                return False
            name = self.views[name].parent
        return True

    def change(self, name: str, content: str) -> None:
        """The tensor of that name now holds `content`; so does, at its place, the memory that it is a view of."""
        owner = self._owner(name)
        while name in self.views:
            view = self.views[name]
            parent = self.fresh(view.parent)
            undo = _inverse(view, self.types(view.parent), parent, content)
            assert undo is not None, f"{view.target} cannot be undone"
            content = self.emit(*undo, self.types(view.parent), name)
            name = view.parent
        self.latest[owner] = content
        self.changes[owner] = self.changes.get(owner, 0) + 1


def _inverse(view: _View, parent: TensorType, whole: str, part: str) -> tuple[str, Args] | None:
    """The op that writes the content of a view back into its parent."""
    kind = "" if view.many else view.target.split(".")[1]
    rest: tuple[Arg, ...] = view.args.positional[1:]
    if kind in ("slice", "select"):
        return f"aten.{kind}_scatter.default", Args((Ref(whole), Ref(part), *rest), view.args.named)
    if kind in _RESHAPES:
        return "aten.reshape.default", Args((Ref(part), parent.shape))
    if kind in ("transpose", "t"):
        return view.target, Args((Ref(part), *rest))
    if kind == "permute":
        order = rest[0]
        return "aten.permute.default", Args((Ref(part), tuple(order.index(i) for i in range(len(order)))))
    return ("aten.alias.default", Args((Ref(part),))) if kind in _SAME else None
