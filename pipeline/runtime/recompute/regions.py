"""Regions whose activations are dropped after the forward pass and computed again in the backward pass.

Inside a region `kept` runs a function whose results are not dropped: the second run takes them from the first, and
computes only what the function was given, as far as its own backward asks for that. So a region can keep what is dear
to compute (products, attention, collectives) and repeat what is cheap.

How: what autograd keeps of the function's arguments is replaced by a note; on both runs the region itself keeps the
arguments, so that a note can ask it for them. What else is kept (results, statistics) belongs to what is around the
region, which may be another region that drops it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pipeline.runtime.pipelining.deferred_weight_grads import not_recorded
from pipeline.runtime.programs.autocast import as_autocast
from pipeline.runtime.recompute.random_draws import Drawn
from pipeline.runtime.recompute.regather import keep_shards, keeping_shards
from pipeline.runtime.recompute.strided import StridedView

Result = TypeVar("Result")  # a tensor, or several
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _Here(threading.local):
    """What this thread runs: backward has threads of its own."""

    frame: _Frame | None = None  # the region
    replaying = False  # for the second time
    last_pass = False  # of a step


_here = _Here()


def recompute(region: Callable[..., Result], *arguments: Any) -> Result:
    """Runs the region; regions may be nested."""
    frame = _Frame(torch._C._autograd._top_saved_tensors_default_hooks(False) or (Tensor.detach, Tensor.detach))
    drawn = Drawn(_device_of(arguments))

    def run(*given: Any) -> Result:
        with frame.entered():
            return region(*given)

    # Torch would keep and restore the generators' states for every region; few regions draw numbers.
    contexts = partial(_contexts, drawn)
    with not_recorded():
        result: Result = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    drawn.end()
    return result


def recompute_except_last(region: Callable[..., Result], *arguments: Any) -> Result:
    """As `recompute`, but in the last pass of a step, which runs the region once and keeps everything."""
    return region(*arguments) if _here.last_pass else recompute(region, *arguments)


@contextmanager
def in_last_pass(last: bool) -> Iterator[None]:
    """Around a forward pass: whether it is the last of its step."""
    before, _here.last_pass = _here.last_pass, last
    try:
        yield
    finally:
        _here.last_pass = before


def replaying() -> bool:
    """Whether this is the second run of a region: what changes state (batch-norm statistics) must not do so again."""
    return _here.replaying


def kept(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The function's result; in a region it is not computed a second time."""
    frame = _here.frame
    if frame is None or not torch.is_grad_enabled():
        return function(*arguments, **named)
    arguments = as_autocast(getattr(function, "__name__", ""), arguments)  # inside, a note could not find them
    if frame.runs > 1:
        return frame.replay(arguments)
    return frame.run(function, arguments, named)


def _contexts(drawn: Drawn) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the two runs of a region, each inside the region's own hooks on what autograd keeps."""
    keeping = keeping_shards()
    return keep_shards() if keeping else nullcontext(), _replay(keeping, drawn)


@contextmanager
def _replay(keeping: bool, drawn: Drawn) -> Iterator[None]:
    before, _here.replaying = _here.replaying, True
    try:
        with keep_shards() if keeping else nullcontext(), drawn.again():
            yield
    finally:
        _here.replaying = before


# ------------------------------------------------------------------------------------------------------ what is kept


class _Held(torch.autograd.Function):
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


class _Holder:
    """Keeps tensors as autograd would: it lives as long as the result of its node."""

    def __init__(self, tensors: list[Tensor]) -> None:
        given = [tensor.detach() for tensor in tensors]
        self.result = _Held.apply(torch.empty(0, requires_grad=True), *given)  # type: ignore[no-untyped-call]

    def tensors(self) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.result.grad_fn.saved_tensors
        return found


@dataclass
class _Given:
    """The arguments of a call of `kept` that its backward needs. Notes know it and a region does not: who keeps the
    arguments knows the region, and autograd's part of such a circle is not seen by the garbage collector."""

    arguments: _Holder | None = None  # by which the region keeps them
    needed: list[int] = field(default_factory=list)  # their places
    notes: int = 0  # not yet asked for
    found: tuple[Tensor, ...] = ()

    def argument(self, place: int) -> Tensor:
        """Autograd asks the region for them once, and lets go of them with the last."""
        if self.arguments is not None:
            self.found, self.arguments = self.arguments.tensors(), None
        self.notes -= 1
        tensor = self.found[self.needed.index(place)]
        self.found = self.found if self.notes else ()
        return tensor


@dataclass
class _Made:
    """The results of a call of `kept` on the first run of its region, for the second."""

    results: _Holder | None
    single: bool
    grads: tuple[bool, ...]
    needed: tuple[int, ...]  # places of the arguments that backward needs
    drawn: Drawn


@dataclass(frozen=True)
class _Note:
    """What autograd keeps in place of an argument, or of a view of it."""

    given: _Given
    place: int
    view: StridedView

    def tensor(self) -> Tensor:
        return self.view.on(self.given.argument(self.place))


class _Frame:
    """A region, from its first run to its second."""

    def __init__(self, around: Hooks) -> None:
        self.around = around
        self.runs = 0
        self.calls: list[_Made] = []
        self.next = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, _here.frame = _here.frame, self
        self.runs += 1
        self.next = 0
        try:
            yield
        finally:
            _here.frame = before

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = _Given()
        places = {(_memory(a), a.dtype): n for n, a in enumerate(arguments) if isinstance(a, Tensor)}
        pack_around, unpack_around = self.around

        def pack(tensor: Tensor) -> Any:  # autograd holds on to it: it must not refer to the arguments
            place = places.get((_memory(tensor), tensor.dtype))
            if place is None:
                return pack_around(tensor)
            given.notes += 1
            if place not in given.needed:
                given.needed.append(place)
            return _Note(given, place, StridedView.of(tensor))

        def unpack(packed: Any) -> Tensor:
            return packed.tensor() if isinstance(packed, _Note) else unpack_around(packed)

        drawn = Drawn(_device_of(arguments))
        with saved_tensors_hooks(pack, unpack):
            result = function(*arguments, **named)
        drawn.end()
        results = [result] if isinstance(result, Tensor) else list(result)
        given.arguments = _Holder([arguments[place] for place in given.needed])
        with saved_tensors_hooks(*self.around):
            held = _Holder(results)
        single, grads = isinstance(result, Tensor), tuple(t.requires_grad for t in results)
        self.calls.append(_Made(held, single, grads, tuple(given.needed), drawn))
        return result

    def replay(self, arguments: tuple[Any, ...]) -> Any:
        call = self.calls[self.next]
        self.next += 1
        _Holder([arguments[place] for place in call.needed])
        call.drawn.skip()
        assert call.results is not None, "a region is run again once"
        found, call.results = call.results.tensors(), None
        results = _Again.apply(torch.empty(0, requires_grad=True), call.grads, *found)  # type: ignore[no-untyped-call]
        return results[0] if call.single else results


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _device_of(arguments: tuple[Any, ...]) -> torch.device:
    return next((a.device for a in arguments if isinstance(a, Tensor)), torch.device("cpu"))
