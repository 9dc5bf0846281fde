"""Everything in float64, or in float32, with random numbers that both sides share: a mode around what is run.

| what is run            | types that it names                                                              |
|------------------------|----------------------------------------------------------------------------------|
| the user's module      | as written: a cast to float32 is one, and is noted; widened where it fails so     |
| graph, written program | widened: they were traced in another type, and name that type where it was read   |

In float32 lower types alone are widened, on both sides. What a written program's own lines ask to be cast to is noted
(`foreign_cast`): a cast that is widened leaves no other trace.

Random numbers are drawn alike where the program draws whole tensors, as the module does: in the order of the elements,
whatever their order in memory. A program that splits a random op has other numbers than the module, and takes others
from the stream: then nothing is drawn from it, on either side.

| not drawn                                              | instead                                          |
|--------------------------------------------------------|--------------------------------------------------|
| what may be split (`DRAWS`): dropout, `rand`, ...      | dropout keeps all, others give their mean        |
| any other op that takes from the generator: `rrelu`,   | numbers of a seed that every call begins with:   |
| `multinomial`, an op of another library                | the same wherever it runs whole, as these do     |
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Sharding
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.runtime.recompute.regions import replaying
from shardwright.pipeline.tracing.lower import is_random

WIDENED = {  # to the one type, the others
    torch.float64: {
        **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
        **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
    },
    torch.float32: {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.complex32: torch.complex64},
}
OF_TORCH = ("aten", "prim", "prims", "c10d", "_c10d_functional")
SEED = 5
Asked = tuple[torch.dtype, int]  # a type, and the line that asks for it
ANY = "any"  # in place of the path of a file
_OF_TORCH = str(Path(torch.__file__).parent)
aten = torch.ops.aten


class InOneType(TorchDispatchMode):
    """Notes to which lower types anything was cast, and whether anything was drawn."""

    def __init__(self, wide: torch.dtype, *, widen: bool, draws: bool, path: str = "") -> None:
        super().__init__()
        self.low, self.widen, self.draws, self.path = WIDENED[wide], widen, draws, path
        self.casts: set[torch.dtype] = set()
        self.asked: Counter[Asked] = Counter()  # types below float64 that lines of the file of that path name
        self.drew = False
        self.others: set[str] = set()  # ops that drew and are not in `DRAWS`

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if self.path and dtype in WIDENED[torch.float64] and not replaying() and (line := _line_of(self.path)):
            self.asked[dtype, line] += 1
        if dtype in self.low:
            if any(isinstance(a, Tensor) and a.dtype in self.low.values() for a in args):
                self.casts.add(dtype)
            kwargs["dtype"] = self.low[dtype] if self.widen else dtype
        if self.widen and not function._schema.is_mutable:
            args = tree_map(self._widened, args)
        if function is aten._grouped_mm.default and args[0].dtype is torch.float64:  # it has no such kernel
            return grouped_product(*args, **kwargs)
        if function in DRAWS:
            self.drew = True
            return DRAWS[function](self.draws, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded in function.tags or function.namespace not in OF_TORCH:
            return self._random(function, args, kwargs)  # of an op of another library nothing tells
        result = function(*args, **kwargs)
        if function is aten.lift_fresh.default and self.widen:  # torch.tensor(numbers)
            return self._widened(result)
        return result

    def _widened(self, value: Any) -> Any:
        """A tensor that the module keeps beside its parameters and buffers has the type it was made with."""
        return value.to(self.low[value.dtype]) if isinstance(value, Tensor) and value.dtype in self.low else value

    def _random(self, function: Any, args: Any, kwargs: Any) -> Any:
        """It may draw nothing, as attention without dropout."""
        generator = torch.default_generator
        before = generator.get_state()
        if not self.draws:
            generator.manual_seed(SEED)
        start = generator.get_state()
        result = in_order(function, args, kwargs)
        drew = not torch.equal(start, generator.get_state())
        if drew:
            self.drew = True
            self.others.add(str(function).rpartition(".")[0])
        if not self.draws:
            generator.set_state(before)
        return result


Within = Callable[..., AbstractContextManager[InOneType]]


@contextmanager
def in_float64(*, widen: bool, draws: bool, path: str = "") -> Iterator[InOneType]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InOneType(torch.float64, widen=widen, draws=draws, path=path) as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)


in_float32: Within = partial(InOneType, torch.float32, widen=True)


def _line_of(path: str) -> int:
    """The line of that file that calls, where it does so itself and not by a function of ours; else 0."""
    if path == ANY:
        return 1
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OF_TORCH):
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_lineno if frame is not None and frame.f_code.co_filename == path else 0


# ---- random numbers


def draws_alike(graph: OpGraph, text: str) -> bool:
    """Whether the program draws what the module does, in its order: no op apart, none moved before the chain."""
    return "drawn_apart(" not in text and not any(is_random(graph.op(name)) for name in graph.prologue)


def in_order(function: Any, args: Any, kwargs: Any) -> Any:
    """The op on tensors that lie in the order of their elements, in which it draws."""
    laid: dict[int, tuple[Tensor, Tensor]] = {}

    def lay(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_contiguous():
            return value
        return laid.setdefault(id(value), (value, value.contiguous()))[1]

    result = function(*tree_map(lay, args), **tree_map(lay, kwargs))
    known = function._schema.arguments
    written = {a.name for a in known if a.alias_info is not None and a.alias_info.is_write}
    for name, own in [*zip((a.name for a in known), args, strict=False), *kwargs.items()]:
        if id(own) in laid and name in written:
            own.copy_(laid[id(own)][1])
    given = {id(copy): own for own, copy in laid.values()}
    return tree_map(lambda value: given.get(id(value), value), result)


def split_draws(graph: OpGraph, shardings: Iterable[Sharding], others: Container[str]) -> str:
    """The first op that draws and is split by a rule of the user's own; "" if there is none.

    Ranks then draw what the module does not, and there is no value that stands for it.
    """
    strategies = {name: strategy for sharding in shardings for name, strategy in sharding.strategies.items()}
    for op in graph.ops:
        rule = rule_of(op)
        draws = op.target.rpartition(".")[0] in others or (is_random(op) and not (rule and rule.random))
        strategy = strategies.get(op.name)
        layouts = (*strategy.inputs, *strategy.outputs) if strategy else ()
        if draws and any(state.kind == "S" for layout in layouts for state in layout.states):
            return op.target
    return ""


def _fill(draw: Callable[..., Any], mean: Callable[..., float]) -> Callable[..., Tensor]:
    """An op that fills a tensor: in the order of its elements, or with the mean of what it would draw."""

    def run(draws: bool, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not draws:
            return x.fill_(mean(*args))
        return x.copy_(draw(torch.empty(x.shape, dtype=x.dtype), *args, **kwargs))

    return run


def _make(draw: Callable[..., Any], mean: float, like: bool) -> Callable[..., Tensor]:
    """An op that makes a tensor of a shape, or of the shape of another."""

    def run(draws: bool, given: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        shape: Sequence[int] = given.shape if like else given
        dtype = dtype or (given.dtype if like else torch.get_default_dtype())
        x = torch.empty(tuple(shape), dtype=dtype)
        return draw(x, *args) if draws else x.fill_(mean)

    return run


def _whole(draw: Callable[..., Any], least: Callable[..., int]) -> Callable[..., Tensor]:
    """An op that draws whole numbers: in order already; the least of them in place of a mean."""

    def run(draws: bool, *args: Any, **kwargs: Any) -> Tensor:
        return draw(*args, **kwargs) if draws else draw(*args, **kwargs).fill_(least(*args))

    return run


DRAWS: dict[Any, Callable[..., Any]] = {
    # What rules of pipeline/ops may split, as these ops are run: each has a value that its shards have too.
    aten.bernoulli_.float: _fill(aten.bernoulli_.float, lambda p=0.5: 1.0),
    aten.bernoulli.default: lambda draws, p, **kwargs: (
        aten.bernoulli.default(p.contiguous()) if draws else torch.ones_like(p)
    ),
    aten.bernoulli.p: _make(lambda x, p=0.5: aten.bernoulli_.float(x, p), 1.0, like=True),
    aten.uniform_.default: _fill(aten.uniform_.default, lambda low=0.0, high=1.0: (low + high) / 2),
    aten.normal_.default: _fill(aten.normal_.default, lambda mean=0.0, std=1.0: mean),
    aten.exponential_.default: _fill(aten.exponential_.default, lambda rate=1.0: 1 / rate),
    aten.rand.default: _make(aten.uniform_.default, 0.5, like=False),
    aten.randn.default: _make(aten.normal_.default, 0.0, like=False),
    aten.randint.default: _whole(aten.randint.default, lambda *args: 0),
    aten.randint.low: _whole(aten.randint.low, lambda low, *args: low),
    aten.randperm.default: lambda draws, count, **named: (
        aten.randperm.default(count, **named) if draws else torch.arange(count)
    ),
    aten.rand_like.default: _make(aten.uniform_.default, 0.5, like=True),
    aten.randn_like.default: _make(aten.normal_.default, 0.0, like=True),
}


# ---- a product of groups, which torch has for lower types alone


def grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
    """`torch._grouped_mm`: the groups end at `offs`, on the dim that the three-dimensional factor does not have."""
    if offs is None:
        return a @ b
    ends = offs.tolist()
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if a.dim() == 2 and b.dim() == 3:  # rows
        found = a.new_zeros(a.shape[0], b.shape[2])
        for number, (start, end) in enumerate(groups):
            found[start:end] = a[start:end] @ b[number]
        return found
    if a.dim() == 3:  # columns
        found = a.new_zeros(a.shape[1], b.shape[1])
        for number, (start, end) in enumerate(groups):
            found[:, start:end] = a[number] @ b[:, start:end]
        return found
    return torch.stack([a[:, start:end] @ b[start:end] for start, end in groups])


def widest(tensor: Tensor) -> Tensor:
    """In float64, or complex numbers of two such."""
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()
