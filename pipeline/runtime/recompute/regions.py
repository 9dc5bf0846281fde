"""Regions whose activations are dropped after the forward pass and computed again in the backward pass.

Inside a region `kept` runs a function whose results are not dropped: the second run takes them from the first, and
computes only what the function was given, as far as its own backward asks for that. So a region can keep what is
expensive to compute (products, attention, collectives) and repeat what is cheap.

How: what autograd keeps of the function's arguments is replaced by a note; on both runs the region itself keeps the
arguments, so that a note can ask it for them. What else is kept (results, statistics) belongs to what is around the
region, which may be another region that drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shardwright.pipeline.runtime.context import setting, step
from shardwright.pipeline.runtime.programs.autocast import as_autocast
from shardwright.pipeline.runtime.recompute.random_draws import Drawn
from shardwright.pipeline.runtime.recompute.regather import Hooks, StridedView, hooks_around, keep_shards, memory_of

Result = TypeVar("Result")  # a tensor, or several


def recompute(region: Callable[..., Result], *arguments: Any) -> Result:
    """Runs the region; regions may be nested."""
    frame, drawn = RecomputeRegion(hooks_around()), Drawn(_device_of(arguments))

    def run(*given: Any) -> Result:
        with frame.entered():
            return region(*given)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Around the two runs, each inside the region's own hooks on what autograd keeps."""
        shards = keep_shards if step.thread.keeping_shards else nullcontext
        return shards(), _replay(shards, drawn)

    # Torch would keep and restore the generators' states for every region; few regions draw numbers. In a region
    # gradients of weights are made with the others.
    with setting(step.thread, deferred=None):
        result: Result = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    drawn.end()
    return result


def recompute_except_last(region: Callable[..., Result], *arguments: Any) -> Result:
    """As `recompute`, but in the last pass of a step, which runs the region once and keeps everything."""
    return region(*arguments) if step.thread.last_pass else recompute(region, *arguments)


def replaying() -> bool:
    """Whether this is the second run of a region: what changes state (batch-norm statistics) must not do so again."""
    return step.thread.replaying


def kept(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The function's result; in a region it is not computed a second time."""
    region = step.thread.region
    if region is None or not torch.is_grad_enabled():
        return function(*arguments, **named)
    arguments = as_autocast(getattr(function, "__name__", ""), arguments)  # inside, a note could not find them
    if region.runs > 1:
        return region.replay(arguments)
    return region.run(function, arguments, named)


@contextmanager
def _replay(shards: Callable[[], AbstractContextManager[None]], drawn: Drawn) -> Iterator[None]:
    with setting(step.thread, replaying=True), shards(), drawn.again():
        yield


# ------------------------------------------------------------------------------------------------------ what is kept


class _Holding(torch.autograd.Function):
    """A node that keeps tensors as autograd keeps them: by the hooks that are in force."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return dummy.new_empty(0)


class _Again(torch.autograd.Function):
    """Results as the second run has them: what is computed of them keeps this node, which does not keep them.

    A leaf would be kept by the node that its gradient goes to, until the second run ends.
    """

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, grads: tuple[bool, ...], *results: Tensor) -> tuple[Tensor, ...]:
        found = tuple(tensor.detach() for tensor in results)
        ctx.mark_non_differentiable(*(tensor for tensor, grad in zip(found, grads, strict=True) if not grad))
        return found


def _holder(tensors: list[Tensor]) -> Any:
    """Keeps tensors as autograd would, for as long as it lives: they are its `grad_fn.saved_tensors`."""
    given = [tensor.detach() for tensor in tensors]
    return _Holding.apply(torch.empty(0, requires_grad=True), *given)  # type: ignore[no-untyped-call]


@dataclass
class _KeptArguments:
    """The arguments of a call of `kept` that its backward needs. Notes know it and a region does not: who keeps the
    arguments knows the region, and autograd's part of such a circle is not seen by the garbage collector."""

    holder: Tensor | None = None  # by which the region keeps them
    needed: list[int] = field(default_factory=list)  # their places
    notes: int = 0  # not yet asked for
    found: tuple[Tensor, ...] = ()

    def argument(self, place: int) -> Tensor:
        """Autograd asks the region for them once, and lets go of them with the last."""
        if self.holder is not None:
            self.found, self.holder = self.holder.grad_fn.saved_tensors, None
        self.notes -= 1
        tensor = self.found[self.needed.index(place)]
        self.found = self.found if self.notes else ()
        return tensor


@dataclass
class _KeptResults:
    """Of a call of `kept` on the first run of its region, for the second."""

    holder: Tensor | None
    single: bool
    grads: tuple[bool, ...]
    needed: tuple[int, ...]  # places of the arguments that backward needs
    drawn: Drawn


@dataclass(frozen=True)
class _ArgumentNote:
    """What autograd keeps in place of an argument, or of a view of it."""

    arguments: _KeptArguments
    place: int
    view: StridedView


class RecomputeRegion:
    """From its first run to its second."""

    def __init__(self, around: Hooks) -> None:
        self.around = around
        self.runs = 0
        self.calls: list[_KeptResults] = []
        self.next = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.runs += 1
        self.next = 0
        with setting(step.thread, region=self):
            yield

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = _KeptArguments()
        places = {(memory_of(a), a.dtype): n for n, a in enumerate(arguments) if isinstance(a, Tensor)}
        pack_around, unpack_around = self.around

        def pack(tensor: Tensor) -> Any:  # autograd holds on to it: it must not refer to the arguments
            place = places.get((memory_of(tensor), tensor.dtype))
            if place is None:
                return pack_around(tensor)
            given.notes += 1
            if place not in given.needed:
                given.needed.append(place)
            return _ArgumentNote(given, place, StridedView.of(tensor))

        def unpack(packed: Any) -> Tensor:
            if not isinstance(packed, _ArgumentNote):
                return unpack_around(packed)
            return packed.view.on(packed.arguments.argument(packed.place))

        drawn = Drawn(_device_of(arguments))
        with saved_tensors_hooks(pack, unpack):
            result = function(*arguments, **named)
        drawn.end()
        single = isinstance(result, Tensor)
        results = [result] if single else list(result)
        given.holder = _holder([arguments[place] for place in given.needed])
        with saved_tensors_hooks(*self.around):
            holder = _holder(results)
        grads = tuple(t.requires_grad for t in results)
        self.calls.append(_KeptResults(holder, single, grads, tuple(given.needed), drawn))
        return result

    def replay(self, arguments: tuple[Any, ...]) -> Any:
        call = self.calls[self.next]
        self.next += 1
        _holder([arguments[place] for place in call.needed])
        call.drawn.skip()
        assert call.holder is not None, "a region is run again once"
        found, call.holder = call.holder.grad_fn.saved_tensors, None
        results = _Again.apply(torch.empty(0, requires_grad=True), call.grads, *found)  # type: ignore[no-untyped-call]
        return results[0] if call.single else results


def _device_of(arguments: tuple[Any, ...]) -> torch.device:
    return next((a.device for a in arguments if isinstance(a, Tensor)), torch.device("cpu"))
