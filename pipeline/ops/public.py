"""The call that a reader knows of an op whose rule prints none: `F.celu(x)` for `aten.celu.default`.

A public function takes its overload by the arguments, and may do more than call it. So each that has the op's name is
asked: called with these arguments, on tensors without memory, it must do what the overload itself does and no more,
down to the last argument. Where none does, the op's own name is printed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import TYPE_CHECKING, Any

from shardwright.pipeline.ir.graph import Arg, Args, Ref, Torch
from shardwright.pipeline.ops.rule import Rendered, call, method

if TYPE_CHECKING:  # rules name this file, and plans are made of them without torch, which is slow to import
    from torch import Tensor
    from torch._ops import OpOverload
    from torch.fx import Node

Types = tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each tensor
ROOTS = {"torch": "torch", "F": "torch.nn.functional", "Tensor": "torch.Tensor"}
NAMESPACES = ("linalg", "special", "fft")  # of torch; their ops have the namespace in front of the name
RENAMED = {"im2col": "unfold", "col2im": "fold", "affine_grid_generator": "affine_grid"}  # ops -> functions of F
ATTRIBUTES = {"numpy_T": "T", "matrix_H": "H", "mT": "mT", "mH": "mH"}  # of a tensor
SYMBOLS = {"__and__": "&", "__or__": "|", "__xor__": "^", "__lshift__": "<<", "__rshift__": ">>"}
REDUCTIONS = ("none", "mean", "sum")  # what an op's number means


@dataclass(frozen=True)
class CallForm:
    """How an op is called."""

    name: str  # `F.celu`, `torch.linalg.inv`, `Tensor.unfold`, `torch.ops.aten.celu.default`
    spread: bool = False  # the tensors of its list are arguments of their own: `torch.broadcast_tensors(a, b)`
    worded: tuple[str, ...] = ()  # the op's arguments by name, of which the reduction is a word: `reduction="sum"`

    def render(self, r: Rendered) -> str:
        own = self.name.removeprefix("Tensor.")
        if own in SYMBOLS:
            return f" {SYMBOLS[own]} ".join(r.positional)
        if own in ATTRIBUTES.values():
            return f"{r.tensors[0]}.{own}"
        if own != self.name:
            return method(own)(r)
        if self.spread:
            return call(self.name)(replace(r, positional=r.tensors))
        named = self._by_name(r.positional, r.named, lambda number: f'"{REDUCTIONS[int(number)]}"')
        return call(self.name)(replace(r, positional=r.positional[: self._count(r.positional)], named=named))

    def run(self, args: Args, tensors: tuple[Tensor, ...]) -> Any:
        import torch

        root, _, path = self.name.partition(".")
        function: Any = reduce(getattr, [*ROOTS[root].split(".")[1:], *path.split(".")], torch)
        if path in ATTRIBUTES.values():
            return function.__get__(tensors[0])
        positional = tuple(_real(arg, tensors) for arg in args.positional)
        named = {name: _real(arg, tensors) for name, arg in args.named}
        named = self._by_name(positional, named, lambda number: REDUCTIONS[number])
        given = positional[0] if self.spread else positional[: self._count(positional)]
        found = function(*given, **named)
        return tuple(found) if isinstance(found, list) else found

    def _count(self, positional: tuple[Any, ...]) -> int:
        """The arguments that stay without a name: those before the reduction."""
        return self.worded.index("reduction") if self.worded else len(positional)

    def _by_name(
        self, positional: tuple[Any, ...], named: dict[str, Any], word: Callable[[Any], Any]
    ) -> dict[str, Any]:
        start = self._count(positional)
        found = dict(zip(self.worded[start:], positional[start:], strict=False)) | named
        return {name: word(each) if name == "reduction" and self.worded else each for name, each in found.items()}


def public_call(r: Rendered) -> str:
    """Prints the op's public call, or the op by its own name."""
    types = tuple((shape, t.dtype) for shape, t in zip(r.local_inputs, r.view.inputs, strict=True))
    args = _numbered(r.view.op.args, r.named)
    return form_of(r.view.op.target, args, types, repr(args)).render(r)


def _numbered(args: Args, names: Container[str]) -> Args:
    """Layers differ in the names of their tensors alone; of the named arguments those that are printed."""
    count = iter(range(1_000_000))

    def own(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(str(next(count)))
        return tuple(map(own, arg)) if isinstance(arg, tuple) else arg

    positional = tuple(map(own, args.positional))
    return Args(positional, tuple((name, own(arg)) for name, arg in args.named if name in names))


@cache
def form_of(target: str, args: Args, types: Types, written: str) -> CallForm:
    """`written` tells arguments apart that are equal in Python: 1, 1.0 and True."""
    itself = CallForm(f"torch.ops.{target}")
    wanted = _done_by(itself, args, types) if target.startswith("aten.") else ""
    if not wanted:
        return itself
    return next((form for form in _forms(target, args) if _done_by(form, args, types) == wanted), itself)


def _forms(target: str, args: Args) -> Iterator[CallForm]:
    """What may be the op, in the order in which a reader would look for it."""
    import torch

    _, name, overload = target.split(".")
    if name in SYMBOLS or name in ATTRIBUTES:
        yield CallForm(f"Tensor.{ATTRIBUTES.get(name, name)}")
    if name.startswith("_"):
        return
    schema = getattr(getattr(torch.ops.aten, name), overload)._schema
    names = tuple(argument.name for argument in schema.arguments)
    if "reduction" in names:
        yield CallForm(f"F.{name}", worded=names)
    yield CallForm(f"F.{RENAMED.get(name, name)}")
    space, _, rest = name.partition("_")
    if space in NAMESPACES:
        yield CallForm(f"torch.{space}.{rest}")
    yield CallForm(f"torch.{name}")
    if args.positional and isinstance(args.positional[0], Ref):
        yield CallForm(f"Tensor.{name}")
    elif len(args.positional) == 1 and _are_tensors(args.positional[0]):
        yield CallForm(f"torch.{name}", spread=True)


def overload_of(target: str) -> OpOverload | None:
    """Torch's op of that name, also of a library of the user's; None where there is none.

    `torch.ops` has more than ops, such as a function that loads a library.
    """
    import torch
    from torch._ops import OpOverload

    import shardwright.pipeline.ops.own  # noqa: F401  -- ours are among them

    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, OpOverload) else None


def _are_tensors(arg: Arg) -> bool:
    return isinstance(arg, tuple) and bool(arg) and all(isinstance(item, Ref) for item in arg)


def _done_by(form: CallForm, args: Args, types: Types) -> str:
    """The ops that the call runs, with all their arguments; "" where it cannot be called so, or just with a warning."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("error")
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in types]
        try:
            traced = make_fx(lambda *given: form.run(args, given), pre_dispatch=True)(*tensors)
        except Exception:  # whatever a function raises that is not there, or takes other arguments
            return ""
    return "\n".join(map(_told, traced.graph.nodes))


def _told(node: Node) -> str:
    """Python's functions say that memory is not pinned, which nothing else asks for."""
    named = {name: arg for name, arg in node.kwargs.items() if name != "pin_memory"}
    return f"{node.name} {node.target} {node.args} {named}"


def _real(arg: Arg, tensors: tuple[Tensor, ...]) -> Any:
    import torch

    if isinstance(arg, Ref):
        return tensors[int(arg.value)]
    if isinstance(arg, Torch):
        return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.name)
    return tuple(_real(item, tensors) for item in arg) if isinstance(arg, tuple) else arg
