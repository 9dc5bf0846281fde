"""Blocks that `torch.compile` turns into kernels of their own, inside recompute regions and not around them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, fx

from shardwright.pipeline.runtime.compiler import host_calls
from shardwright.pipeline.runtime.context import setting, step

STATEFUL = {"batch_norm"}  # does something else on the second run of a region, which it is told: compiling sees none


def as_written() -> AbstractContextManager[None]:
    """Programs that are loaded in it are not compiled: their arithmetic is that of their lines."""
    return setting(step, as_written=True)


def compiled(
    function: Callable[..., Any],
    keeps: float,
    calls: Literal["c++", "python"] | None = None,
    *,
    cheapest: bool = False,
    after_relu: str = "",
    before_relu: bool = False,
) -> Callable[..., Any]:
    """The function, compiled when it is first called.

    Of what it has for backward it keeps at most the part `keeps`; backward makes the rest again, in its own kernels.
    What it keeps is chosen by torch, to which element-wise ops are free and products are not; or with `cheapest` by how
    many bytes are moved to make it again, and how much is computed: a product of few channels may be the cheaper one.
    On a GPU the host's calls of kernels are compiled as well: short steps wait for the host, which is faster so than in
    Python. Compiling takes several times as long, and torch's cache on disk remembers it. Without a C++ compiler, or
    with one that fails, Python makes the calls; and where the program's steps are captured as a CUDA graph, as a replay
    makes none.

    `after_relu` is the argument that is a relu's result, if there is one: its gradient is made zero where it is, in the
    kernel that adds it up. The relu need not do it again, in each of the kernels that begin a backward: its block is
    compiled with `before_relu`. That is for a relu whose result no other block reads. To mask it twice does no harm.
    """
    if step.as_written:
        return function
    host_calls.own_cache_folder()
    assert isinstance(function, FunctionType)
    if calls is None:
        calls = "python" if function.__globals__.get("CUDA_GRAPHS") else "c++"
    block = _Block(function, keeps, calls, cheapest, after_relu)

    def either(again: bool) -> Callable[..., Any]:
        plain = block.compiled(again, masked=False)
        return _first_that_compiles(block.compiled(again, masked=True), plain) if before_relu else plain

    first = either(again=False)
    if not block.stateful:
        return first
    second = either(again=True)
    return lambda *arguments: (second if step.thread.replaying else first)(*arguments)


class _Block:
    """A function of a program, which is compiled in several ways."""

    def __init__(self, function: FunctionType, keeps: float, calls: str, cheapest: bool, after_relu: str) -> None:
        from shardwright.pipeline.runtime.compiler.partitioner import (
            graph_compiler,  # slow to import, and few programs need it
        )

        self.function, self.calls, self.after_relu = function, calls, after_relu
        self.name = f"{function.__name__}_keeps_{round(100 * keeps)}" + "_cheapest" * cheapest
        self.compile_graph = graph_compiler(keeps, cheapest)
        # Collectives and what else knows of ranks run as they are, between the compiled parts of the function.
        known = function.__globals__
        origins = {name: str(getattr(known.get(name), "__module__", "")) for name in function.__code__.co_names}
        of_runtime = {name for name, origin in origins.items() if origin.startswith("shardwright.pipeline.runtime.")}
        self.stateful = of_runtime & STATEFUL  # torch.ops.aten.batch_norm is not
        self.outside = known | {name: torch.compiler.disable(known[name]) for name in of_runtime - STATEFUL}

    def compiled(self, again: bool, masked: bool) -> Callable[..., Any]:
        # What was compiled is known by the code that it was made of: each way to compile it needs a code of its own.
        name = self.name + "_again" * again + "_masked" * masked
        of_run = {name: partial(self.function.__globals__[name], again=again) for name in self.stateful}
        code = _named(self.function.__code__, name)
        own = FunctionType(code, self.outside | of_run, name, self.function.__defaults__)
        own = _after_relu(own, self.after_relu, name) if self.after_relu else own
        # A gradient that is masked is that of the function's result, not of a part's: there must be no parts.
        how = {"backend": partial(self._backend, masked=masked), "dynamic": False, "fullgraph": masked}
        result: Callable[..., Any] = torch.compile(own, **how)
        return result

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Any], masked: bool) -> Any:
        if self.calls == "python" or not host_calls.in_cpp(inputs):
            return self.compile_graph(graph, inputs, masked, in_cpp=False)
        host_calls.wake_backward(inputs)
        kept = copy.deepcopy(graph)  # compiling changes what it is given
        return host_calls.or_from_python(
            lambda: self.compile_graph(graph, inputs, masked, in_cpp=True),
            lambda: self.compile_graph(kept, inputs, masked, in_cpp=False),
        )


def _first_that_compiles(one: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """The first, unless torch cannot make one graph of it: it says so before anything is run."""
    chosen = one

    def call(*given: Any) -> Any:
        nonlocal chosen
        try:
            return chosen(*given)
        except torch._dynamo.exc.Unsupported:
            if chosen is other:
                raise
            chosen = other
        return chosen(*given)

    return call


def _named(code: CodeType, name: str) -> CodeType:
    return code.replace(co_name=name, co_qualname=name)


def _after_relu(function: FunctionType, argument: str, name: str) -> FunctionType:
    place, masks = function.__code__.co_varnames.index(argument), _MasksGradient

    def masking(*given: Any) -> Any:
        return function(*given[:place], masks.apply(given[place]), *given[place + 1 :])  # type: ignore[no-untyped-call]

    # With the function's own globals: others' would be looked for in a module of their name.
    return FunctionType(_named(masking.__code__, name), function.__globals__, name, None, masking.__closure__)


class _MasksGradient(torch.autograd.Function):
    """A relu's result as it is; its gradient is zero where that is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        masked: Tensor = torch.ops.aten.threshold_backward(gradient, x, 0)
        return masked


def channels_last(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of two-dimensional convolutions with their channels together in memory, as tensor cores read them."""
    for tensor in tensors.values():
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    return tensors


def use_kernels_of(program: Any) -> None:
    """Of oneDNN on a CPU, as the cluster stage found them faster; a program that does not say leaves it to torch."""
    if hasattr(program, "ONEDNN"):
        torch.backends.mkldnn.enabled = program.ONEDNN
