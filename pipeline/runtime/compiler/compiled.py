"""Blocks that `torch.compile` turns into kernels of their own, inside recompute regions and not around them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
import torch._functorch.config as partitioning
from torch import Tensor, fx

from pipeline.runtime.compiler import host_calls
from pipeline.runtime.compiler.cache import own_cache_folder
from pipeline.runtime.recompute.regions import replaying
from pipeline.runtime_names import NAMES

STATEFUL = {"batch_norm"}  # does something else on the second run of a region, which it is told: compiling sees none


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


def compiled(
    function: Callable[..., Any],
    keeps: float,
    calls: Literal["c++", "python"] = "c++",
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
    with one that fails, Python makes the calls.

    `after_relu` is the argument that is a relu's result, if there is one: its gradient is made zero where it is, in the
    kernel that adds it up. The relu need not do it again, in each of the kernels that begin a backward: its block is
    compiled with `before_relu`. That is for a relu whose result no other block reads. To mask it twice does no harm.
    """
    if _Here.as_written:
        return function
    own_cache_folder()
    from torch._inductor import config as inductor  # slow to import, and few programs need them
    from torch._inductor.compile_fx import compile_fx

    from pipeline.runtime.compiler.batch_norm import decompositions
    from pipeline.runtime.compiler.partitioner import Partitioner

    def build(graph: fx.GraphModule, inputs: Sequence[Any], masked: bool, in_cpp: bool) -> Any:
        # Backward is compiled here too, not when it first runs: torch 2.11 forgets by then that calls are in C++, and a
        # compiler that fails would end the step.
        # Products of odd sizes are padded, always (without it they take several times as long): torch would time which
        # is faster, and might do what takes more memory than the plan was made for, on one rank and not on another.
        # Convolutions of single pixels are products, and a GPU's are faster as such.
        partitioner, budget = Partitioner(masked, keeps if cheapest else None), 1.0 if cheapest else keeps
        with (
            partitioning.patch(activation_memory_budget=budget, force_non_lazy_backward_lowering=True),
            inductor.patch(custom_partitioner_fn=partitioner, cpp_wrapper=in_cpp, force_shape_pad=True),
            inductor.patch(conv_1x1_as_mm=host_calls.on_card(inputs)),
        ):
            return compile_fx(graph, inputs, decompositions=decompositions())

    def backend(graph: fx.GraphModule, inputs: Sequence[Any], masked: bool) -> Any:
        if calls == "python" or not host_calls.in_cpp(inputs):
            return build(graph, inputs, masked, in_cpp=False)
        host_calls.wake_backward(inputs)
        kept = copy.deepcopy(graph)  # compiling changes what it is given
        return host_calls.or_from_python(
            lambda: build(graph, inputs, masked, in_cpp=True), lambda: build(kept, inputs, masked, in_cpp=False)
        )

    def made(again: bool, masked: bool) -> Callable[..., Any]:
        # What was compiled is known by the code that it was made of: each way to compile it needs a code of its own.
        ways = "_cheapest" * cheapest + "_again" * again + "_masked" * masked
        name = f"{function.__name__}_keeps_{round(100 * keeps)}{ways}"
        of_run = {name: partial(known[name], again=again) for name in stateful}
        own = FunctionType(_named(function.__code__, name), outside | of_run, name, function.__defaults__)
        own = _after_relu(own, after_relu, name) if after_relu else own
        # A gradient that is masked is that of the function's result, not of a part's: there must be no parts.
        how = {"backend": partial(backend, masked=masked), "dynamic": False, "fullgraph": masked}
        result: Callable[..., Any] = torch.compile(own, **how)
        return result

    def either(again: bool) -> Callable[..., Any]:
        plain = made(again, masked=False)
        return _first_that_compiles(made(again, masked=True), plain) if before_relu else plain

    assert isinstance(function, FunctionType)
    # Collectives and what else knows of ranks run as they are, between the compiled parts of the function.
    known = function.__globals__
    of_runtime = {name for name in function.__code__.co_names if name in NAMES and name in known}
    as_they_are, stateful = of_runtime - STATEFUL, of_runtime & STATEFUL  # torch.ops.aten.batch_norm is neither
    outside = known | {name: torch.compiler.disable(known[name]) for name in as_they_are}
    first = either(again=False)
    if not stateful:
        return first
    second = either(again=True)
    return lambda *arguments: (second if replaying() else first)(*arguments)


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
