"""Blocks that `torch.compile` turns into kernels of their own, inside recompute regions and not around them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Literal

import torch
import torch._functorch.config as partitioning
from torch import Tensor, fx

from pipeline.runtime import host_calls
from pipeline.runtime.recompute import replaying
from pipeline.runtime_names import NAMES

STATEFUL = {"batch_norm"}  # does something else on the second run of a region


class _Here:
    as_written = False


@contextmanager
def as_written() -> Iterator[None]:
    """Programs that are loaded in it are not compiled: their arithmetic is that of their lines."""
    before, _Here.as_written = _Here.as_written, True
    try:
        yield
    finally:
        _Here.as_written = before


def compiled(function: Callable[..., Any], keeps: float, calls: Literal["c++", "python"] = "c++") -> Callable[..., Any]:
    """The function, compiled when it is first called.

    Of what it has for backward it keeps at most the part `keeps`; backward makes the rest again, in its own kernels.
    On a GPU the host's calls of kernels are compiled as well: short steps wait for the host, which is faster so than in
    Python. Compiling takes several times as long, and torch's cache on disk remembers it. Without a C++ compiler, or
    with one that fails, Python makes the calls.
    """
    if _Here.as_written:
        return function
    from torch._inductor import config as inductor  # slow to import, and few programs need them
    from torch._inductor.compile_fx import compile_fx

    from pipeline.runtime.partitioner import ReadsMasksOff

    def build(graph: fx.GraphModule, inputs: Sequence[Any], in_cpp: bool) -> Any:
        # Backward is compiled here too, not when it first runs: torch 2.11 forgets by then that calls are in C++, and a
        # compiler that fails would end the step.
        with (
            partitioning.patch(activation_memory_budget=keeps, force_non_lazy_backward_lowering=True),
            inductor.patch(custom_partitioner_fn=ReadsMasksOff(), cpp_wrapper=in_cpp),
        ):
            return compile_fx(graph, inputs)

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if calls == "python" or not host_calls.in_cpp(inputs):
            return build(graph, inputs, False)
        kept = copy.deepcopy(graph)  # compiling changes what it is given
        return host_calls.or_from_python(lambda: build(graph, inputs, True), lambda: build(kept, inputs, False))

    def made(label: str) -> Callable[..., Any]:
        # What was compiled is known by the code that it was made of: each way to compile it needs a code of its own.
        name = f"{function.__name__}_keeps_{round(100 * keeps)}{label}"
        code = function.__code__.replace(co_name=name, co_qualname=name)
        own = FunctionType(code, outside, name, function.__defaults__)
        result: Callable[..., Any] = torch.compile(own, backend=backend, dynamic=False)
        return result

    assert isinstance(function, FunctionType)
    # Collectives and what else knows of ranks run as they are, between the compiled parts of the function.
    as_they_are = (name for name in function.__code__.co_names if name in NAMES and name not in STATEFUL)
    known = function.__globals__
    outside = known | {name: torch.compiler.disable(known[name]) for name in as_they_are}
    first = made("")
    if not STATEFUL.intersection(function.__code__.co_names):
        return first
    second = made("_again")  # compiling sees no difference between the two runs of a region
    return lambda *arguments: (second if replaying() else first)(*arguments)


def channels_last(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of two-dimensional convolutions with their channels together in memory, as tensor cores read them."""
    for tensor in tensors.values():
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    return tensors
